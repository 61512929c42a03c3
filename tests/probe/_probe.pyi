"""This module has all functions of ``fsdpc._C`` and further functions for tests and benchmarks. It
has its own module state and its own types.

In-place and editable builds have this module; wheels do not. See ``docs/decisions/025-probe.md``.
"""

from collections.abc import Sequence
from typing import Any, Literal

from fsdpc._C import *  # noqa: F403
from fsdpc._C import Comm, FlatParameter, _Array

def set_deadline(comm: Comm, seconds: float) -> None: ...
def tensor_info(
    tensor: Any, how: Literal["any", "torch", "methods"] = "any", repeat: int = 1
) -> dict[str, Any]: ...
def export_dlpack(array: _Array) -> Any: ...
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
def kernel_pack_plan(
    targets: Sequence[tuple[int, int, str]], bytes: int, kernels: str | None = None
) -> Any: ...
def kernel_pack(
    plan: Any, dst: _Array, src: Sequence[_Array | None], scale: float = 1.0
) -> None: ...
def kernel_scale_by(x: _Array, dtype: str, factor: _Array, kernels: str | None = None) -> None: ...
def kernel_norm2(
    src: _Array, dtype: str, kernels: str | None = None
) -> tuple[float, float, bool]: ...
def codec_sum(
    codec: str,
    values: _Array,
    dtype: str,
    row: int,
    own: int,
    coded: _Array,
    sums: _Array,
    sums_dtype: str,
    kernels: str,
    scale: float = 1.0,
    add: bool = False,
) -> None: ...
def codec_bytes(codec: str, rows: int, row: int, /) -> int: ...
def codec_encode(codec: str, values: _Array, dtype: str, row: int, out: _Array) -> None: ...
def codec_decode(codec: str, values: _Array, dtype: str, row: int, out: _Array) -> None: ...
def codec_round(
    codec: str, values: _Array, dtype: str, row: int, out: _Array, out_dtype: str
) -> None: ...
def gather(unit: FlatParameter, /) -> None: ...
def release(unit: FlatParameter, /) -> None: ...
def reduce(unit: FlatParameter, grads: Sequence[_Array | None], add: bool = False) -> None: ...
