"""The dtype in which gradients are sent between GPUs (docs/decisions/016-low-precision-wire.md).

NCCL's ordinary kernels round a sum in bfloat16 or float16 after adding each rank's values; NCCL's
kernels for symmetric memory sum in float32 and round once. Therefore gradients without a
``reduce_dtype`` are sent as float32 if a sum over more than two ranks would be rounded repeatedly.
"""

from __future__ import annotations

import weakref

import torch

from fsdpc import _C

NARROW = (torch.bfloat16, torch.float16)
_one_host: weakref.WeakSet[_C.Comm] = weakref.WeakSet()


def note_one_host(comm: _C.Comm) -> None:
    """Record that all ranks of this communicator run on one host. Local."""
    _one_host.add(comm)


def sums_wide(comm: _C.Comm) -> bool:
    """Whether sums of bfloat16 or float16 gradients are rounded only once. Local."""
    return not comm.rounds_sums or comm.world <= 2 or (comm.symmetric and comm in _one_host)


def default_dtype(compute: torch.dtype, comm: _C.Comm) -> torch.dtype:
    """Return the dtype in which gradients are sent if ``MixedPrecision`` has no ``reduce_dtype``.

    ``compute`` is the parameters' compute dtype. Local; the result is the same on all ranks of
    ``comm``.
    """
    return torch.float32 if compute in NARROW and not sums_wide(comm) else compute


def remark(comm: _C.Comm, names: str) -> str:
    """Return a text that says how NCCL rounds sums of the dtypes in ``names``; "" if nothing needs
    to be said. The text becomes a part of ``model.precision_line``.
    """
    if not comm.rounds_sums or comm.world <= 2 or not ("bf16" in names or "fp16" in names):
        return ""
    if sums_wide(comm):
        return " (summed in fp32, symmetric memory)"
    return " (rounded at each rank, as reduce_dtype asks)"
