"""Devices and tensors: executes step plans."""
