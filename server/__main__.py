"""`python -m server` is `headrace`."""

from server.cli.main import main

main()
