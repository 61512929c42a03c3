"""Optimizer states as tables whose keys are the names of the parameters."""
