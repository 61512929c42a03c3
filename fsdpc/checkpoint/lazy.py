"""Tensors in files, rearranged by torch's own functions before anything is read.

A ``Lazy`` is a tensor without memory. ``torch.cat``, ``stack``, ``split``, ``transpose``, ``view``
and similar functions return another ``Lazy``, which records where its elements come from. So a key
map is plain torch code, and each rank reads only its part of the result, in bounded memory.
Functions that compute new values (such as a dequantisation) read their arguments whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fsdpc._companions.spans import block_spans, blocks_of
from fsdpc._torch import make_wrapper_subclass, tree_leaves, tree_map
from fsdpc.lowbit import encode_rows

_CHUNK_BYTES = 8 << 20
_RUN_BYTES = 16 << 10  # runs of fewer bytes are read together with the bytes between them
_MOST_RUNS = 1 << 16
_aten = torch.ops.aten
Run = tuple["Source", int, int]


def _room(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor whose memory comes from plain malloc, for use during a short time. Torch
    itself would allocate aligned memory, for which the C library rarely reuses freed chunks, so
    that the heap would grow during a long read.
    """
    raw = np.empty(math.prod(sizes) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(tuple(sizes))


class Node:
    """A description of where the elements of a tensor come from."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self.cost = dtype.itemsize  # bytes of memory that reading takes for each element

    def block(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return the values of a block. The memory may be shared with other blocks. Local."""
        raise NotImplementedError

    def runs(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Run]:
        """Return where the elements of a block are, in row-major order, as runs ``(source, first
        element, count)``. Raises ``TypeError`` if the elements are computed, or if there would be
        too many runs.
        """
        raise TypeError("its values are computed")

    def read(self, first: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with elements in row-major order, from element ``first`` on."""
        at, step = 0, max(1, _CHUNK_BYTES // self.cost)
        while at < len(target):
            count = min(step, len(target) - at)
            for offsets, sizes in blocks_of(self.shape, first + at, count):
                numel = math.prod(sizes)
                target[at : at + numel].view(sizes).copy_(self.block(offsets, sizes))
                at += numel


class Source(Node):
    """A tensor of a file. ``fetch(first, target)`` fills ``target`` with elements from ``first``
    on.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        fetch: Callable[[int, torch.Tensor], None],
    ) -> None:
        super().__init__(shape, dtype)
        self._fetch = fetch

    def read(self, first: int, target: torch.Tensor) -> None:
        if target.dtype == self.dtype:
            self._fetch(first, target)
        else:
            super().read(first, target)

    def block(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        found = _room(sizes, self.dtype)
        if found.numel():
            self._fill(found, tuple(offsets), tuple(sizes))
        return found

    def runs(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Run]:
        spans = block_spans(self.shape, offsets, sizes).tolist()
        return [(self, begin, count) for begin, _, count in spans if count]

    def _fill(self, found: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        spans = block_spans(self.shape, offsets, sizes)
        item = self.dtype.itemsize
        if len(spans) == 1 or int(spans[0, 2]) * item >= _RUN_BYTES:
            flat = found.view(-1)
            for begin, at, count in spans.tolist():
                self._fetch(begin, flat[at : at + count])
            return
        stride = math.prod(self.shape[1:])
        step = _CHUNK_BYTES // (stride * item)
        if step == 0:  # a row is larger than a chunk
            inner = Source(self.shape[1:], self.dtype, self._fetch)
            for row in range(sizes[0]):
                base = (offsets[0] + row) * stride
                inner._fetch = lambda first, target, base=base: self._fetch(base + first, target)
                inner._fill(found[row], offsets[1:], sizes[1:])
            return
        whole = [slice(o, o + n) for o, n in zip(offsets[1:], sizes[1:], strict=True)]
        for row in range(0, sizes[0], step):
            rows = min(step, sizes[0] - row)
            part = _room((rows, *self.shape[1:]), self.dtype)
            self._fetch((offsets[0] + row) * stride, part.view(-1))
            found[row : row + rows] = part[(slice(None), *whole)]


class _Memory(Node):
    """Values that were computed and are in memory."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values.shape, values.dtype)
        self._computed = values

    def block(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return self._computed[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


class _Cat(Node):
    def __init__(self, parts: Sequence[Node], dim: int) -> None:
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        super().__init__(shape, parts[0].dtype)
        self._parts, self._dim = parts, dim
        self._begins = np.cumsum([0] + [part.shape[dim] for part in parts])

    def block(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        dim, begins = self._dim, self._begins
        low, high = offsets[dim], offsets[dim] + sizes[dim]
        found = []
        first = int(np.searchsorted(begins, low, side="right")) - 1
        for part, begin in zip(self._parts[first:], begins[first:].tolist(), strict=False):
            start, stop = max(low, begin), min(high, begin + part.shape[dim])
            if begin >= high:
                break
            if stop > start:
                own, length = list(offsets), list(sizes)
                own[dim], length[dim] = start - begin, stop - start
                found.append(part.block(own, length))
        if len(found) == 1:
            return found[0]
        whole = _room(sizes, self.dtype)
        return torch.cat(found, dim, out=whole)

    def runs(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Run]:
        dim, found = self._dim, []
        if any(n > 1 for n in sizes[:dim]):
            return _by_rows(self, offsets, sizes)
        for part, begin in zip(self._parts, self._begins.tolist(), strict=False):
            start = max(offsets[dim], begin)
            stop = min(offsets[dim] + sizes[dim], begin + part.shape[dim])
            if stop > start:
                own, length = list(offsets), list(sizes)
                own[dim], length[dim] = start - begin, stop - start
                found += part.runs(own, length)
        return found


class _Cut(Node):
    """The indices ``[start, start + length)`` of ``source`` in dimension ``dim``."""

    def __init__(self, source: Node, dim: int, start: int, length: int) -> None:
        super().__init__((*source.shape[:dim], length, *source.shape[dim + 1 :]), source.dtype)
        self._source, self._dim, self._start = source, dim, start

    def block(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        own = list(offsets)
        own[self._dim] += self._start
        return self._source.block(own, sizes)

    def runs(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Run]:
        own = list(offsets)
        own[self._dim] += self._start
        return self._source.runs(own, sizes)


class _Permuted(Node):
    def __init__(self, source: Node, dims: Sequence[int]) -> None:
        super().__init__([source.shape[dim] for dim in dims], source.dtype)
        self._source, self._dims = source, list(dims)

    def block(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        own, length = [0] * len(self._dims), [0] * len(self._dims)
        for place, dim in enumerate(self._dims):
            own[dim], length[dim] = offsets[place], sizes[place]
        return self._source.block(own, length).permute(self._dims)

    def runs(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Run]:
        wide = [dim for dim, n in zip(self._dims, sizes, strict=True) if n > 1]
        if wide != sorted(wide):
            return _by_rows(self, offsets, sizes)
        own, length = [0] * len(self._dims), [0] * len(self._dims)
        for place, dim in enumerate(self._dims):
            own[dim], length[dim] = offsets[place], sizes[place]
        return self._source.runs(own, length)


class _Viewed(Node):
    """The elements of ``source`` in the same order, in another shape."""

    def __init__(self, source: Node, shape: Sequence[int]) -> None:
        super().__init__(shape, source.dtype)
        self._source = source

    def block(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        found = _room(sizes, self.dtype)
        flat = found.view(-1)
        for begin, at, count in block_spans(self.shape, offsets, sizes).tolist():
            for own, length in blocks_of(self._source.shape, begin, count) if count else ():
                numel = math.prod(length)
                flat[at : at + numel].view(length).copy_(self._source.block(own, length))
                at += numel
        return found

    def runs(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Run]:
        found: list[Run] = []
        for begin, _, count in block_spans(self.shape, offsets, sizes).tolist():
            for own, length in blocks_of(self._source.shape, begin, count) if count else ():
                found += self._source.runs(own, length)
        return found


class Coded(Node):
    """The quantized rows (``fsdpc.lowbit``) of a matrix, with ``row_bytes`` bytes per row."""

    def __init__(self, source: Node, codec: str, row_bytes: int) -> None:
        super().__init__((source.shape[0], row_bytes), torch.uint8)
        self._source, self._codec = source, codec
        self.cost = -(-source.shape[1] * source.dtype.itemsize // row_bytes) + 1

    def block(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        rows = (sizes[0], self._source.shape[1])
        coded = encode_rows(self._source.block((offsets[0], 0), rows), self._codec)
        return coded[:, offsets[1] : offsets[1] + sizes[1]]


def _by_rows(node: Node, offsets: Sequence[int], sizes: Sequence[int]) -> list[Run]:
    """Slice a block at each index of its first dimension of a size larger than one. Return the
    runs of all slices, one slice after the other.
    """
    dim = next(i for i, n in enumerate(sizes) if n > 1)
    if sizes[dim] > _MOST_RUNS:
        raise TypeError(f"its elements lie in more than {_MOST_RUNS} pieces")
    found: list[Run] = []
    for index in range(sizes[dim]):
        own, length = list(offsets), list(sizes)
        own[dim], length[dim] = offsets[dim] + index, 1
        found += node.runs(own, length)
        if len(found) > _MOST_RUNS:
            raise TypeError(f"its elements lie in more than {_MOST_RUNS} pieces")
    return found


def merged(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, but join runs that directly follow each other in a source."""
    found: list[Run] = []
    for source, begin, count in runs:
        if found and found[-1][0] is source and sum(found[-1][1:]) == begin:
            found[-1] = (source, found[-1][1], found[-1][2] + count)
        else:
            found.append((source, begin, count))
    return found


class Lazy(torch.Tensor):
    """A tensor without memory; see the docstring of the module. ``node`` describes where the
    elements come from.
    """

    node: Node

    @staticmethod
    def __new__(cls, node: Node) -> Lazy:
        """Return a tensor that torch treats as a contiguous tensor on the CPU."""
        made: Lazy = make_wrapper_subclass(cls, node.shape, dtype=node.dtype, device="cpu")
        made.node = node
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Lazy({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return a ``Lazy`` if ``func`` only moves elements, else read the arguments and compute.
        Raises ``TypeError`` for an operation in place.
        """
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise TypeError(
                f"{func} would change a tensor of a file: use the form that returns one"
            )
        moved = _MOVES.get(func)
        if moved is None:
            args, kwargs = tree_map(_values, (args, kwargs))
            return tree_map(_as_lazy, func(*args, **kwargs))
        expected = func(*tree_map(_outline, args), **kwargs)  # raises as torch would
        found = moved(*args, **kwargs)
        pairs = zip(tree_leaves(expected), tree_leaves(found), strict=True)
        assert all((e.shape, e.dtype) == (f.shape, f.dtype) for e, f in pairs), func
        return found


def _outline(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _values(value: Any) -> Any:
    if not isinstance(value, Lazy):
        return value
    found = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    value.node.read(0, found.view(-1))
    return found


def _as_lazy(value: Any) -> Any:
    return Lazy(_Memory(value)) if isinstance(value, torch.Tensor) else value


def _dim(tensor: torch.Tensor, dim: int) -> int:
    return dim % max(tensor.ndim, 1)


def _node(tensor: torch.Tensor) -> Node:
    return tensor.node if isinstance(tensor, Lazy) else _Memory(tensor)


def _same(x: Lazy, *args: Any, **kwargs: Any) -> Lazy:
    return Lazy(x.node)


def _view(x: Lazy, shape: Sequence[int], *args: Any) -> Lazy:
    sizes = list(shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.numel() // max(1, -math.prod(sizes))
    return Lazy(_Viewed(x.node, sizes))


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Lazy:
    if len({x.dtype for x in tensors}) > 1:
        return Lazy(_Memory(torch.cat([_values(x) for x in tensors], dim)))
    return Lazy(_Cat([_node(x) for x in tensors], _dim(tensors[0], dim)))


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Lazy:
    at = dim % (tensors[0].ndim + 1)
    shape = list(tensors[0].shape)
    parts = [_Viewed(_node(x), [*shape[:at], 1, *shape[at:]]) for x in tensors]
    return Lazy(_Cat(parts, at))


def _permute(x: Lazy, dims: Sequence[int]) -> Lazy:
    return Lazy(_Permuted(x.node, [_dim(x, dim) for dim in dims]))


def _transpose(x: Lazy, one: int = 0, other: int = 1) -> Lazy:
    dims = list(range(x.ndim))
    if dims:
        one, other = _dim(x, one), _dim(x, other)
        dims[one], dims[other] = dims[other], dims[one]
    return _permute(x, dims)


def _slice(
    x: Lazy, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    dim = _dim(x, dim)
    begin, stop, _ = slice(start, end).indices(x.shape[dim])
    if step == 1:
        return Lazy(_Cut(x.node, dim, begin, max(0, stop - begin)))
    picks = [_Cut(x.node, dim, at, 1) for at in range(begin, stop, step)]
    return Lazy(_Cat(picks, dim)) if picks else Lazy(_Cut(x.node, dim, 0, 0))


def _select(x: Lazy, dim: int, index: int) -> Lazy:
    dim = _dim(x, dim)
    cut = _Cut(x.node, dim, index % x.shape[dim], 1)
    return Lazy(_Viewed(cut, [*cut.shape[:dim], *cut.shape[dim + 1 :]]))


def _unbind(x: Lazy, dim: int = 0) -> list[Lazy]:
    return [_select(x, dim, i) for i in range(x.shape[_dim(x, dim)])]


def _split(x: Lazy, size: int, dim: int = 0) -> list[Lazy]:
    dim, total = _dim(x, dim), x.shape[_dim(x, dim)]
    return _split_by(x, [min(size, total - at) for at in range(0, total, size)], dim)


def _split_by(x: Lazy, sizes: Sequence[int], dim: int = 0) -> list[Lazy]:
    dim = _dim(x, dim)
    begins = np.cumsum([0, *sizes]).tolist()
    return [Lazy(_Cut(x.node, dim, b, n)) for b, n in zip(begins, sizes, strict=False)]


def _squeeze(x: Lazy, dims: int | Sequence[int] | None = None) -> Lazy:
    asked = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {_dim(x, dim) for dim in asked}
    shape = [n for i, n in enumerate(x.shape) if n != 1 or i not in gone]
    return Lazy(_Viewed(x.node, shape))


def _unsqueeze(x: Lazy, dim: int) -> Lazy:
    at = dim % (x.ndim + 1)
    return Lazy(_Viewed(x.node, [*x.shape[:at], 1, *x.shape[at:]]))


_MOVES: dict[Any, Callable[..., Any]] = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.clone.default: _same,
    _aten.contiguous.default: _same,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.reshape.default: _view,
    _aten._reshape_alias.default: _view,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _transpose,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_by,
    _aten.squeeze.default: _squeeze,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    _aten.unsqueeze.default: _unsqueeze,
}
