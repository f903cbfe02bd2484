"""Devices and tensors: executes step plans."""

import os

# torch's OpenMP team spins for milliseconds between two operators, and then takes the cores of every other process of
# the server. A thousand rounds are microseconds. The library reads this once, when torch loads it; a user's own wins.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
