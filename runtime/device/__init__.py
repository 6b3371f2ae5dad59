"""Devices: what executes a plan's steps."""
