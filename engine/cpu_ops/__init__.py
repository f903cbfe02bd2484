"""Operators for CPUs in C++, compiled on the machine that runs them: sources, build, and the call from Python.

A step is a list of jobs that a team of threads runs without coming back to Python in between. What the jobs of a model
are, engine/models knows; what a job computes stands in src/. Without a compiler there is none of this, and the engine
runs on torch's operators.
"""
