"""Benchmarks on a GPU: ``python -m gpu.run`` and the others, in the folder ``benchmarks``."""
