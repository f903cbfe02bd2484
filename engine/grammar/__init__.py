"""Constraints on the output: compiled off the engine's loop, asked for a mask of allowed tokens before each choice."""
