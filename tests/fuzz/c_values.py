"""Arguments for random calls of the extension: valid ones, odd ones, and objects that change other
objects.

``Hostile`` objects answer every special method by running ``mischief``: a further random call, or a
change of a list while C code reads the list.
"""

from __future__ import annotations

import array
import dataclasses
import mmap
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fsdpc import _C

Mischief = Callable[[], None]

SPECS = [
    ("w", 12, "float32", "float32", "float32", True),
    ("b", 3, "float32", "float32", "float32", True),
]
MIXED = [
    ("w", 10, "float32", "bfloat16", "float32", True),
    ("t", 5, "uint8", "uint8", "uint8", False),
    ("d", 7, "float64", "float64", "float64", True),
    ("h", 9, "float16", "float16", "float32", True),
]
FROZEN = [("w", 6, "float32", "float32", "float32", False)]
EMPTY = [("z", 0, "float32", "float32", "float32", True), ("w", 4, *["float32"] * 3, True)]
ALL_SPECS = [SPECS, MIXED, FROZEN, EMPTY]
DTYPES = ["float32", "float16", "bfloat16", "float64", "uint8"]
CODECS = ["", *(name for name, *_ in _C.CODECS), "x"]
KERNELS = [None, "plain", "avx2", "avx512", "cuda:0", "x", "cuda:", "cuda:99999999999999999999"]


class Hostile:
    """An object that runs ``mischief`` whenever C code calls one of its special methods."""

    def __init__(self, rng: random.Random, mischief: Mischief) -> None:
        object.__setattr__(self, "_rng", rng)
        object.__setattr__(self, "_mischief", mischief)

    def _act(self) -> None:
        object.__getattribute__(self, "_mischief")()
        if object.__getattribute__(self, "_rng").random() < 0.2:
            raise ValueError("hostile")

    def __getattr__(self, name: str) -> Any:
        self._act()
        if object.__getattribute__(self, "_rng").random() < 0.5:
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        self._act()

    def __eq__(self, other: object) -> bool:
        self._act()
        return True

    def __hash__(self) -> int:
        self._act()
        return hash("w")

    def __index__(self) -> int:
        self._act()
        return object.__getattribute__(self, "_rng").choice([0, 1, -1, 2, 2**40])

    def __float__(self) -> float:
        self._act()
        return 1.5

    def __bool__(self) -> bool:
        self._act()
        return True

    def __str__(self) -> str:
        self._act()
        return "float32"

    def __len__(self) -> int:
        self._act()
        return 2

    def __getitem__(self, key: Any) -> Any:
        self._act()
        if isinstance(key, int) and key > 2:
            raise IndexError
        return self

    def __iter__(self) -> Any:
        self._act()
        return iter([self, None])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._act()
        return object.__getattribute__(self, "_rng").choice([None, True, False, 0, -1, self])

    def __del__(self) -> None:
        try:
            object.__getattribute__(self, "_mischief")()
        except AttributeError:
            pass


@dataclasses.dataclass
class Pair:
    """A dataclass, which modules may return."""

    one: Any = None
    other: Any = None


class Sub(torch.Tensor):
    """A subclass of a tensor."""


def numbers(rng: random.Random) -> Any:
    return rng.choice(
        [0, 1, -1, 2, 3, 7, 64, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 2**70]
        + [True, 0.0, 1.5, -1.0, float("nan"), float("inf"), float("-inf"), 1e308]
    )


def texts(rng: random.Random) -> str:
    return rng.choice(
        ["", "x", "sum", "max", "é" * rng.randrange(300), "a\0b", "\ud800", "n" * 5000]
    )


def arrays(rng: random.Random) -> Any:
    """Return memory in one of many forms, writable or not, with few elements."""
    n = rng.choice([0, 1, 2, 3, 4, 5, 7, 12, 15, 24, 64])
    kind = rng.randrange(22)
    dtype = rng.choice(["f4", "f8", "f2", "u1", "i8", "c8", "?", ">f4", "O", "U3", "V0", "f4,O"])
    if kind < 6:
        return np.zeros(n, dtype=dtype)
    if kind == 6:
        return np.zeros(2 * n, dtype=dtype)[::2]
    if kind == 7:
        made = np.zeros(n, dtype=rng.choice(["f4", "u1", "f8"]))
        made.flags.writeable = False
        return made
    if kind == 8:
        return bytes(n)
    if kind == 9:
        return bytearray(n)
    if kind == 10:
        return memoryview(bytearray(4 * n)).cast(rng.choice(["f", "B", "i"]))
    if kind == 11:
        return array.array(rng.choice("fdbq"), [0] * n)
    if kind == 12:
        return mmap.mmap(-1, 4096, access=rng.choice([mmap.ACCESS_READ, mmap.ACCESS_WRITE]))
    if kind == 13:
        return np.broadcast_to(np.zeros(1, "u1"), rng.choice([(3,), (1, 2**40), (1, 2**31, 2**31)]))
    if kind == 14:
        return np.zeros((1,) * rng.choice([0, 1, 2, 16, 17, 32]), dtype="f4")
    return tensors(rng, n)


def tensors(rng: random.Random, n: int) -> Any:
    dtype = rng.choice([torch.float32] * 4 + [torch.float16, torch.bfloat16, torch.float64])
    kind = rng.randrange(12)
    if kind == 0:
        return torch.zeros(n, dtype=torch.complex64).conj()
    if kind == 1:
        return torch._neg_view(torch.zeros(n))
    if kind == 2:
        return torch.zeros(n, device="meta")
    if kind == 3:
        return torch.zeros(n).to_sparse()
    if kind == 4:
        return torch.zeros(1).expand(1, rng.choice([4, 12, 2**40]))
    if kind == 5:
        return torch.zeros(2 * n)[::2]
    if kind == 6:
        return torch.zeros(n).as_subclass(Sub)
    if kind == 7:
        return torch.zeros(n, dtype=rng.choice([torch.int64, torch.bool, torch.uint8]))
    if kind == 8:
        freed = torch.zeros(n)
        freed.untyped_storage().resize_(0)
        return freed
    if kind == 9:
        return (torch.zeros(n, requires_grad=True) * 2)[:]
    return torch.zeros(n, dtype=dtype, requires_grad=rng.random() < 0.3)


def nested(rng: random.Random, leaf: Callable[[], Any], depth: int = 0) -> Any:
    """Return nested containers, as a module may return them. Sometimes a container contains
    itself."""
    kind = rng.randrange(9)
    if depth > 2 or kind < 2:
        return leaf()
    parts = [nested(rng, leaf, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 2:
        return tuple(parts)
    if kind == 3:
        return dict(enumerate(parts))
    if kind == 4:
        return Pair(*(parts + [None, None])[:2])
    if kind == 5:
        return {i for i in range(3)}
    if kind == 6 and len(parts) < 2 and rng.random() < 0.3:
        parts.append(parts)
    return parts
