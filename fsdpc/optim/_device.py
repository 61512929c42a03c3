"""Steps of parameters in a GPU's memory. Kernels on torch's current stream step the parameters,
without a host sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdpc import _C
from fsdpc._clip.device import norm_and_factor, scaling_of, tree_for
from fsdpc._engine.device import CPU, engine_device, stand_in
from fsdpc._engine.writeback import owner_of
from fsdpc._torch import foreach_norm

SCRATCH = 256  # bytes of scratch memory per tensor, see csrc/device/device.h


class Control(NamedTuple):
    """One-element tensors on the GPU, which the kernels of a step read."""

    grad_scale: Tensor | None = None  # float32
    found_inf: Tensor | None = None  # float32
    clip: Tensor | None = None  # float64


def gpu_of(param: Tensor) -> int | None:
    """Return the GPU whose memory has a parameter's values, or None for host memory. Local.

    A simulated GPU uses host memory, so the number of the GPU comes from the parameter's unit.
    """
    if param.device.type == "cuda":
        return engine_device(param.device)
    if not stand_in():
        return None
    unit = owner_of(param)
    return None if unit is None or unit.flat.offloaded else unit.groups.shard.device


def ordinals_of(params: Sequence[Tensor]) -> list[int | None]:
    """Return ``gpu_of`` of each parameter. Fast if all parameters are in host memory. Local."""
    if not stand_in() and not any(param.is_cuda for param in params):
        return [None] * len(params)
    return [gpu_of(param) for param in params]


def only_gpu(params: Sequence[Tensor]) -> int | None:
    """Return the GPU that has all parameters, or None if there is no such GPU. Local. All ranks
    return a GPU, or all return None.
    """
    found = set(ordinals_of(params))
    return found.pop() if len(found) == 1 else None


def step_on(
    ordinal: int,
    kind: Any,
    rule: tuple[Any, ...],
    control: Control,
    values: list[Tensor],
    grads: list[Tensor],
    states: tuple[list[Tensor], ...],
    steps: list[Tensor],
    places: tuple[tuple[int, int, int], ...] | None,
    edges: Any,
) -> None:
    """Call ``_C.optim_step`` for tensors on a GPU."""
    device = values[0].device
    # The tensor may be freed before the kernels run, because only later work of the same stream
    # gets this memory from the allocator.
    scratch = torch.empty(len(values) * SCRATCH, dtype=torch.uint8, device=device)
    shared = None if edges is None else torch.from_numpy(edges).to(device)
    _C.optim_step(
        kind,
        rule,
        values,
        grads,
        states,
        steps,
        places,
        shared,
        device=ordinal,
        control=control,
        scratch=scratch,
    )
    if kind == "edges8":
        edges[...] = shared.cpu().numpy()


def norm_of_units(params: Sequence[Tensor]) -> Tensor | None:
    """Return the norm of these parameters' gradients over all ranks, as a float64 tensor on the
    GPU, without a host sync. Return None if not all parameters belong to units of one tree.
    Collective if the result is not None.
    """
    units = {id(unit): unit for unit in map(owner_of, params)}
    if None in units.values():
        return None
    found: list[Any] = list(units.values())
    tree = tree_for(found, 2.0)
    if tree is None:
        return None
    own = {id(param) for param in params}
    with scaling_of(found) as masks:
        own_masks = {unit: _mask(unit, mask, own) for unit, mask in masks.items()}
        return norm_and_factor(tree, own_masks, [], 2.0, 1.0, scale=False)[0]


def _mask(unit: Any, with_grad: bytes, own: set[int]) -> bytes:
    """Return a mask of the unit's parameters that have a gradient and belong to the optimizer."""
    mask = bytearray(with_grad)
    for param, _, covers in unit.optim_params:
        if id(param) not in own:
            for index in covers:
                mask[index] = 0
    return bytes(mask)


def sum_squares(grads: list[Tensor]) -> float:
    """Return the sum of squares of this rank's gradients. The host waits for gradients on a GPU."""
    there = [grad for grad in grads if not grad.is_cpu]
    total = _C.optim_sum_squares([g for g in grads if g.is_cpu], torch.get_num_threads())
    if there:
        norms = foreach_norm(there, 2.0, dtype=torch.float64)
        total += float(torch.stack(list(norms)).square().sum())
    return total


def step_device(param: Tensor) -> torch.device:
    """Return the device of a parameter's state ``step``, which is the GPU that has the parameter,
    or the host. Local.
    """
    return param.device if param.device.type == "cuda" else CPU


def refuse_disk(params: Sequence[Tensor]) -> None:
    """Raise ``NotImplementedError`` if a parameter is on a GPU. Local."""
    for param in params:
        if gpu_of(param) is not None:
            raise NotImplementedError(
                f"offload=Disk(...): a parameter of shape {tuple(param.shape)} is on a GPU, and "
                "states on a disk are stepped in host memory: shard with "
                "CPUOffload(offload_params=True)"
            )
