"""Calibration: weights are rounded by what the model does on a text."""
