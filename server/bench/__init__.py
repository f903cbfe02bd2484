"""`headrace bench`: measures what runs here against what this machine could do."""
