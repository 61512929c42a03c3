"""Optimizer state dicts."""
