"""CUDA C++ templates, compiled by NVRTC, and their families."""

from .steps import runtime_kernels

__all__ = ["runtime_kernels"]
