"""A counter of the bytes of live tensors. Tensors that share a storage are counted once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fsdpc._torch import TorchDispatchMode, tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators allocate while the mode is active. Storages of fake
    tensors count, too.

    ``bytes``: the live bytes now. ``top``: the maximum since ``start``. Workspace that an
    operator allocates and frees by itself is not counted.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.bytes = self.top = 0
        self._sizes: dict[int, int] = {}
        self._known = [t.untyped_storage() for t in known]  # keeps the ids from being used again
        self._ids = {id(storage) for storage in self._known}

    def start(self) -> None:
        """Begin a new part: ``top`` is the maximum from now on."""
        self.top = self.bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._sizes or key in self._ids:
            return
        size = storage.nbytes()
        self._sizes[key] = size
        self.bytes += size
        self.top = max(self.top, self.bytes)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)
