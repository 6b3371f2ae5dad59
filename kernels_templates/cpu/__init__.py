"""C++ templates for x86-64 CPUs."""
