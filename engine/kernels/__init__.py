"""GPU kernels written in Triton."""
