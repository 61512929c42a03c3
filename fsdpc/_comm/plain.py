"""Encoding of plain values as bytes, for messages between ranks. Decoding a message runs no code.

A message has a JSON text that describes the value, followed by the raw bytes of tensors, arrays and
bytes objects. Decoding checks the message: a peer, or any other process that reaches the process
group's store, can send a wrong value but no code. The format is:

    "fsdpc1" | length of the JSON, 8 bytes | JSON | raw bytes

In the JSON, a list stands for a list. A type that JSON lacks is written as an object with one key,
which names the type.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_MAGIC = b"fsdpc1"
_HEAD = struct.Struct(f"<{len(_MAGIC)}sQ")
_DEEPEST = 100
_DTYPES = {str(d)[6:]: d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_NUMPY_KINDS = "biufc"


@dataclass(frozen=True)
class Outline:
    """A placeholder for a tensor that is not 0-dim. The tensor's elements are sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    index: int = -1  # the number of the tensor; -1: the receiver needs no number

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Malformed(ValueError):
    """Raised for bytes that are not a message of ``encode``."""


# --- to bytes ------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """Return the value as bytes. ``TypeError`` names the path of an item that is not plain."""
    form, raw = parts_of(value)
    text = json.dumps(form, separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(_MAGIC, len(text)), text, *raw])


def parts_of(value: Any) -> tuple[Any, list[bytes]]:
    """Return the value's description for JSON, and its raw bytes. Errors as in ``encode``."""
    writer = _Writer()
    return writer.form(value, "", 0), writer.raw


_PLAIN = {type(None), bool, int, float, str}


class _Writer:
    def __init__(self) -> None:
        self.raw: list[bytes] = []

    def form(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if depth > _DEEPEST:
            raise TypeError(f"{path or 'the value'} is nested deeper than {_DEEPEST} containers")
        write = _WRITERS.get(kind)
        if write is not None:
            return write(self, value, path, depth)
        if isinstance(value, np.generic):
            return {"number": [_numpy_name(value.dtype, path), self.add(value.tobytes())]}
        raise TypeError(
            f"{path or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which cannot be "
            "sent to other ranks: numbers, texts, tensors, arrays and lists, tuples, sets and "
            "dicts of them can"
        )

    def add(self, raw: bytes) -> int:
        self.raw.append(raw)
        return len(raw)

    def items(self, values: Any, path: str, depth: int) -> list[Any]:
        if _PLAIN.issuperset(map(type, values)):
            return list(values)
        return [self.form(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(values)]

    def pairs(self, values: dict[Any, Any], path: str, depth: int) -> list[Any]:
        return [
            [self.form(key, f"a key of {path or 'the value'}", depth + 1),
             self.form(value, f"{path}[{key!r}]", depth + 1)]
            for key, value in values.items()
        ]  # fmt: skip

    def tensor(self, tensor: torch.Tensor, path: str, depth: int) -> Any:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TypeError(f"{path or 'the value'} is a {tensor.layout} tensor, not a dense one")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return {"tensor": [str(tensor.dtype)[6:], list(tensor.shape), self.add(raw)]}

    def array(self, array: np.ndarray, path: str, depth: int) -> Any:
        name = _numpy_name(array.dtype, path)
        return {"array": [name, list(array.shape), self.add(array.tobytes())]}


def _numpy_name(dtype: np.dtype, path: str) -> str:
    if dtype.kind not in _NUMPY_KINDS:
        raise TypeError(
            f"{path or 'the value'} is a NumPy array of dtype {dtype}, which cannot be sent to "
            "other ranks: convert it to an array of numbers or bools"
        )
    return dtype.str


_WRITERS: dict[type, Callable[[_Writer, Any, str, int], Any]] = {
    list: _Writer.items,
    tuple: lambda w, v, path, depth: {"tuple": w.items(v, path, depth)},
    torch.Size: lambda w, v, path, depth: {"size": list(v)},
    set: lambda w, v, path, depth: {"set": w.items(v, path, depth)},
    frozenset: lambda w, v, path, depth: {"frozenset": w.items(v, path, depth)},
    dict: lambda w, v, path, depth: {"dict": w.pairs(v, path, depth)},
    OrderedDict: lambda w, v, path, depth: {"ordered": w.pairs(v, path, depth)},
    Counter: lambda w, v, path, depth: {"counter": w.pairs(v, path, depth)},
    bytes: lambda w, v, path, depth: {"bytes": w.add(v)},
    complex: lambda w, v, path, depth: {"complex": [v.real, v.imag]},
    torch.dtype: lambda w, v, path, depth: {"dtype": str(v)[6:]},
    torch.device: lambda w, v, path, depth: {"device": str(v)},
    torch.Tensor: _Writer.tensor,
    torch.nn.Parameter: _Writer.tensor,
    np.ndarray: _Writer.array,
    Outline: lambda w, v, path, depth: {"outline": [list(v.shape), str(v.dtype)[6:], v.index]},
}


# --- from bytes ----------------------------------------------------------------------------------


def decode(data: bytes) -> Any:
    """Return the value from which ``encode`` made ``data``. ``Malformed`` for other bytes."""
    try:
        magic, length = _HEAD.unpack_from(data)
        if magic != _MAGIC or length > len(data) - _HEAD.size:
            raise Malformed("the first bytes are not those of an fsdpc message")
        begin = _HEAD.size + length
        reader = _Reader(memoryview(data)[begin:])
        value = reader.value(json.loads(bytes(data[_HEAD.size : begin])))
        if reader.at != len(reader.raw):
            raise Malformed("the message is longer than its head states")
        return value
    except Malformed:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, RuntimeError) as error:
        raise Malformed(f"{type(error).__name__}: {error}") from error
    except struct.error as error:
        raise Malformed(f"the message is shorter than its head: {error}") from error


class _Reader:
    def __init__(self, raw: memoryview) -> None:
        self.raw = raw
        self.at = 0

    def take(self, count: Any) -> bytes:
        if type(count) is not int or not 0 <= count <= len(self.raw) - self.at:
            raise Malformed(f"{count!r} bytes where {len(self.raw) - self.at} are left")
        begin, self.at = self.at, self.at + count
        return bytes(self.raw[begin : self.at])

    def value(self, form: Any) -> Any:
        if isinstance(form, list):
            return self.items(form)
        if not isinstance(form, dict):
            return form
        if len(form) != 1:
            raise Malformed("an object of several kinds")
        ((kind, content),) = form.items()
        read = _READERS.get(kind)
        if read is None:
            raise Malformed(f"there is no kind {kind!r:.40}")
        return read(self, content)

    def items(self, forms: Any) -> list[Any]:
        if not isinstance(forms, list):
            raise Malformed("the items are not a list")
        return [self.value(form) for form in forms]

    def pairs(self, forms: Any) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(value)) for key, value in forms]

    def tensor(self, content: Any) -> torch.Tensor:
        name, shape, count = content
        dtype, sizes = _dtype(name), _sizes(shape)
        _check_bytes(math.prod(sizes), dtype.itemsize, count)
        made = torch.empty(sizes, dtype=dtype, device="cpu")
        if count:
            raw = torch.from_numpy(np.frombuffer(bytearray(self.take(count)), dtype=np.uint8))
            made.view(-1).view(torch.uint8).copy_(raw)
        return made

    def array(self, content: Any) -> np.ndarray:
        name, shape, count = content
        dtype, sizes = _numpy_dtype(name), _sizes(shape)
        _check_bytes(math.prod(sizes), dtype.itemsize, count)
        return np.frombuffer(self.take(count), dtype).reshape(sizes).copy()

    def number(self, content: Any) -> np.generic:
        name, count = content
        dtype = _numpy_dtype(name)
        _check_bytes(1, dtype.itemsize, count)
        return np.frombuffer(self.take(count), dtype)[0]

    def outline(self, content: Any) -> Outline:
        shape, name, index = content
        if type(index) is not int:
            raise Malformed("an outline without a number")
        return Outline(_sizes(shape), _dtype(name), index)


def _check_bytes(numel: int, itemsize: int, count: Any) -> None:
    if type(count) is not int or numel * itemsize != count:
        raise Malformed(f"{count!r} bytes for {numel} elements of {itemsize}")


def _sizes(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise Malformed(f"{shape!r:.40} is not a shape")
    return tuple(shape)


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise Malformed(f"there is no dtype {name!r:.40}")
    return _DTYPES[name]


def _numpy_dtype(name: Any) -> np.dtype:
    dtype = np.dtype(name) if isinstance(name, str) and len(name) <= 8 else None
    if dtype is None or dtype.kind not in _NUMPY_KINDS or dtype.subdtype is not None:
        raise Malformed(f"there is no dtype {name!r:.40}")
    return dtype


def _complex(reader: _Reader, content: Any) -> complex:
    real, imag = content
    return complex(float(real), float(imag))


_READERS: dict[str, Callable[[_Reader, Any], Any]] = {
    "tuple": lambda r, content: tuple(r.items(content)),
    "size": lambda r, content: torch.Size(_sizes(content)),
    "set": lambda r, content: set(r.items(content)),
    "frozenset": lambda r, content: frozenset(r.items(content)),
    "dict": lambda r, content: dict(r.pairs(content)),
    "ordered": lambda r, content: OrderedDict(r.pairs(content)),
    "counter": lambda r, content: Counter(dict(r.pairs(content))),
    "bytes": _Reader.take,
    "complex": _complex,
    "dtype": lambda r, content: _dtype(content),
    "device": lambda r, content: torch.device(content),
    "tensor": _Reader.tensor,
    "array": _Reader.array,
    "number": _Reader.number,
    "outline": _Reader.outline,
}
