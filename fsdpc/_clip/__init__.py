"""Norms of gradients and clipping."""
