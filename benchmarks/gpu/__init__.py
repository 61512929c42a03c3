"""Benchmarks on a GPU. Run a module, as in ``python -m gpu.run``, in the folder ``benchmarks``."""
