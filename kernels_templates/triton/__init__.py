"""Triton kernels for GPUs: the same arguments and meaning as CUDA C++ kernels, in families of their own."""
