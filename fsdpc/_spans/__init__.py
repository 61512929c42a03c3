"""Spans, which say where the elements of a tensor are on a rank."""
