"""Turning lowered programs into machine code, one module per generator."""
