"""The router against simulated workers in virtual time: its own code, a model of theirs. See docs/simulator.md."""
