"""The CUDA device: a plan's kernels on one NVIDIA GPU, through the driver alone."""
