"""CUDA C++ templates, compiled by NVRTC, and their families."""
