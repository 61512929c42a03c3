"""The C core, as Python sees it. Everything here is private; the public names are in ``fsdpc``."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, final

import numpy as np
from numpy.typing import NDArray

class CommError(RuntimeError):
    """Ranks could not talk to each other; base of the communication errors."""

class PeerError(CommError):
    """Another rank died, left or raised; the message says which and why."""

class CommTimeout(CommError, TimeoutError):
    """A rank did not arrive in time; the message says which and what for."""

class MismatchError(CommError, ValueError):
    """Ranks disagree about what they do; the message quotes the difference."""

class StateError(RuntimeError):
    """A call came out of order."""

class OutOfMemoryError(MemoryError):
    """Device memory is exhausted."""

# A contiguous, writable tensor or array in host memory: DLPack or the buffer protocol.
_Array = Any

class _Callbacks(Protocol):
    def all_gather(self, memory: NDArray[np.uint8], piece_bytes: int, what: str) -> object: ...
    def reduce_scatter(
        self, memory: NDArray[np.uint8], piece_numel: int, dtype: str, what: str
    ) -> object: ...
    def all_reduce(
        self, memory: NDArray[np.uint8], numel: int, dtype: str, op: str, what: str
    ) -> object: ...
    def broadcast(self, memory: NDArray[np.uint8], root: int, what: str) -> object: ...
    def barrier(self, what: str) -> object: ...

@final
class Comm:
    """Collectives among the ranks of a group, in place on arrays and tensors."""

    @classmethod
    def self_(cls) -> Comm: ...
    @classmethod
    def shm(cls, rank: int, world: int, name: str, timeout: float) -> Comm: ...
    @classmethod
    def c10d(cls, rank: int, world: int, callbacks: _Callbacks) -> Comm: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def kind(self) -> Literal["self", "shm", "c10d"]: ...
    @property
    def closed(self) -> bool: ...
    def all_gather(self, array: _Array, what: str = "") -> None: ...
    def reduce_scatter(self, array: _Array, what: str = "") -> None: ...
    def all_reduce(
        self, array: _Array, op: Literal["sum", "max", "min"] = "sum", what: str = ""
    ) -> None: ...
    def broadcast(self, array: _Array, root: int = 0, what: str = "") -> None: ...
    def barrier(self, what: str = "") -> None: ...
    def agree(self, text: str, what: str = "") -> None: ...
    def abort(self, text: str) -> None: ...
    def close(self) -> None: ...
    def buffer(self, bytes: int, common: bool = False) -> CommBuffer: ...

@final
class CommBuffer:
    """Memory that all ranks of a group see; made by Comm.buffer()."""

    @property
    def bytes(self) -> int: ...
    @property
    def common(self) -> bool: ...
    def view(self, rank: int | None = None) -> NDArray[np.uint8]: ...

def tensor_info(
    tensor: Any, how: Literal["any", "torch", "methods"] = "any", repeat: int = 1
) -> dict[str, Any]: ...
def export_dlpack(array: _Array) -> Any: ...
def layout(
    specs: Sequence[tuple[str, int, str, str, str, bool]],
    world: int,
    align_bytes: int,
    spans: bool = False,
    /,
) -> dict[str, Any]: ...
def get_num_threads() -> int: ...
def set_num_threads(threads: int, /) -> None: ...
def kernel_names() -> list[str]: ...
def kernel_cast(
    dst: _Array,
    dst_dtype: str,
    src: _Array,
    src_dtype: str,
    scale: float = 1.0,
    kernels: str | None = None,
) -> None: ...
def kernel_accumulate(
    dst: _Array,
    dst_dtype: str,
    src: _Array,
    src_dtype: str,
    scale: float = 1.0,
    kernels: str | None = None,
) -> None: ...
def kernel_reduce(
    acc: _Array,
    acc_dtype: str,
    src: Sequence[_Array | None],
    src_dtype: str,
    scale: float = 1.0,
    add: bool = False,
    kernels: str | None = None,
) -> None: ...
def kernel_norm2(
    src: _Array, dtype: str, kernels: str | None = None
) -> tuple[float, float, bool]: ...
