"""Kernel families: templates, their parameters, argument lists and numpy references."""
