"""The tier on a local disk, or in a directory that several machines share."""
