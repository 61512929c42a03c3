"""Comparison of two outcomes, whose tensors and floats may differ within a bound."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def difference(got: Any, expected: Any, rtol: float, where: str = "") -> str:
    """Return the first difference of `got` and `expected` and its place, or "" if they are equal.

    Tensors must have the same shape and dtype, and values that differ by at most `rtol` times the
    largest magnitude, because the libraries may add the gradients of ranks in different orders.
    Keys must have the same order. NaN differs from every value, because a NaN may come from memory
    that was not written; a case that expects NaN must test for it.
    """
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        return tensor_difference(got, expected, rtol, where)
    if type(got) is not type(expected):
        return f"{where or 'value'}: got {show(got)}, expected {show(expected)}"
    if isinstance(got, dict):
        if list(got) != list(expected):
            return f"{where or 'value'}: keys {list(got)}, expected {list(expected)}"
        return first(difference(got[key], expected[key], rtol, f"{where}[{key!r}]") for key in got)
    if isinstance(got, (list, tuple)):
        if len(got) != len(expected):
            return f"{where or 'value'}: got {show(got)}, expected {show(expected)}"
        pairs = zip(got, expected, strict=True)
        return first(difference(a, b, rtol, f"{where}[{i}]") for i, (a, b) in enumerate(pairs))
    if isinstance(got, float):
        same = math.isclose(got, expected, rel_tol=rtol)
    else:
        same = got == expected
    return "" if same else f"{where or 'value'}: got {show(got)}, expected {show(expected)}"


def show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def first(texts: Any) -> str:
    return next((text for text in texts if text), "")


def tensor_difference(got: Tensor, expected: Tensor, rtol: float, where: str) -> str:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return (
            f"{where or 'tensor'}: got {got.dtype} {tuple(got.shape)}, expected "
            f"{expected.dtype} {tuple(expected.shape)}"
        )
    if got.numel() == 0:
        return ""
    if got.is_complex():
        got, expected = got.view(got.real.dtype), expected.view(got.real.dtype)
    a, b = got.detach().double(), expected.detach().double()
    bound = rtol * float(b.abs().nan_to_num(0.0, 0.0, 0.0).max())
    same = (a == b) | ((a - b).abs() <= bound)
    if bool(same.all()):
        return ""
    at = int((~same).flatten().nonzero()[0])
    return (
        f"{where or 'tensor'}: got {a.flatten()[at]:.9g}, expected {b.flatten()[at]:.9g} at "
        f"{at} ({int((~same).sum())} of {got.numel()} elements differ)"
    )
