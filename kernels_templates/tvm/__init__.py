"""Kernels as TIR functions: the text that TVM compiles to objects with the same C entry as the templates in `cpu/`."""
