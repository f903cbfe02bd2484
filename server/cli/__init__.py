"""The `headrace` command. It imports nothing heavy before the arguments are read: help and mistakes answer at once."""
