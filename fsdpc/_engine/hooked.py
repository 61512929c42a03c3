"""Units whose gradients a function in Python sums, in place of the engine's sum.

Collectives in such functions match by order, so before each call the ranks exchange which unit is
next and which of its parameters have gradients. If the units differ (data-dependent routing), calls
are deferred from then on to the end of backward, and made in module order. A unit without gradients
on any rank makes no call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fsdpc import _C
from fsdpc._comm.channel import this_rank

# (unit, gradients of each segment, rows of the layout) -> this rank's pieces of the sums, divided.
Summing = Callable[[Any, list[torch.Tensor], list[dict[str, Any]]], list[torch.Tensor]]
_END = -1  # in place of a unit's number: this rank has no unit left to reduce
_DIFFERENT = -2  # ranks of another group of the unit gave different numbers


def attach(tree: Any, hosts: Sequence[Any]) -> None:
    """Let each host's ``_summing``, if it has one, sum the gradients of its unit in ``tree``.
    Local. The hosts and their order are the same on all ranks.
    """
    orders: dict[tuple[int, ...], _Order] = {}
    for host in hosts:
        if host._summing is None and host._unit.flat.comm_hook is not None:
            host._unit.flat.comm_hook = None
    sums = [(host._unit, host._summing) for host in hosts if host._summing is not None]
    for number, (unit, summing) in enumerate(each for each in sums if any(each[0].trainable)):
        comms = [comm for comm in unit.groups.comms if comm.world > 1]
        key = tuple(map(id, comms))
        if key not in orders:
            orders[key] = _Order(comms, tree, tree.units.index(unit))
        orders[key].add(number, _Hooked(unit, summing))
    everyone = list(orders.values())
    if everyone:
        tree.core.before_end = lambda: [order.call_deferred() for order in everyone]


class _Hooked:
    """One unit: packs the gradients, calls the function, accumulates the result."""

    def __init__(self, unit: Any, summing: Summing) -> None:
        self.unit = weakref.ref(unit)
        self.summing = summing
        layout = unit.flat.layout()
        self.bytes = layout["reduce_bytes"]
        self.segments = [segment for segment in layout["segments"] if segment["trainable"]]

    def reduce(self, used: bytes) -> None:
        unit = self.unit()
        buffer = torch.empty(self.bytes, dtype=torch.uint8, device=unit.device)
        unit.flat.pack_grads(buffer)
        grads = [self._grads(unit, buffer, segment) for segment in self.segments]
        with torch.no_grad():
            pieces = self.summing(unit, grads, self.segments)
        unit.flat.take_sums(pieces, used)

    def _grads(self, unit: Any, buffer: torch.Tensor, segment: dict[str, Any]) -> torch.Tensor:
        dtype, begin = getattr(torch, segment["reduce"]), segment["reduce_offset"]
        end = begin + segment["piece_numel"] * unit.groups.shard.world * dtype.itemsize
        return buffer[begin:end].view(dtype).detach()


class _Order:
    """The units of the same communicators; their ranks agree on the order of calls."""

    def __init__(self, comms: list[Any], tree: Any, first: int) -> None:
        self.comms = comms
        self.tree = weakref.ref(tree)
        self.first = first  # one of the units, by its number in the tree
        self.members: list[_Hooked] = []
        self.width = 0

    def add(self, number: int, member: _Hooked) -> None:
        unit = member.unit()
        self.members.append(member)
        self.width = max(self.width, len(unit.infos), len(self.members))
        unit.flat.comm_hook = lambda: self._call_in_order(number, member)

    def _call_in_order(self, number: int, member: _Hooked) -> bool:
        unit = member.unit()
        used = self._agree(number, unit.flat.grad_bits(), f"communication hook of {unit.name}")
        if used is None:
            self.tree().core.defer_reduces()
            return False
        if any(used):
            member.reduce(used)
        return True

    def call_deferred(self) -> None:
        """Make the deferred calls, at the end of every backward. Collective. ``MismatchError``:
        ranks called hooks of different units.
        """
        what = "communication hooks at the end of backward"
        while True:
            units = [member.unit() for member in self.members]
            kept = bytes(unit.flat.sync and unit.flat.kept for unit in units)
            some = self._agree(_END, kept, what)
            if some is None:
                raise _C.MismatchError(
                    f"{what}: the ranks of the process group called hooks of different units "
                    f"(rank {this_rank(self.comms[0])} has no call left)"
                )
            if not any(some):
                return
            for member, waits in zip(self.members, some, strict=True):
                if waits:
                    name = member.unit().name
                    bits = member.unit().flat.grad_bits()
                    used = self._agree(_END, bits, f"communication hook of {name}")
                    member.reduce(used)

    def _agree(self, number: int, own: Sequence[int], what: str) -> bytes | None:
        """Elementwise OR of ``own`` over ranks; None if ranks differ in ``number``. Collective."""
        mine = np.zeros(4 + self.width, np.uint8)
        mine[:4] = np.array([number], np.int32).view(np.uint8)
        mine[4 : 4 + len(own)] = np.frombuffer(bytes(own), np.uint8)
        different = np.array([_DIFFERENT], np.int32).view(np.uint8)
        self.tree().core.before_hook(self.first, what)
        for comm in self.comms:
            rows = np.tile(mine, (comm.world, 1))  # a fake process group does not write them
            comm.all_gather(rows, what=what)
            if (rows[:, :4] != mine[:4]).any():
                mine[:4] = different
            mine[4:] = rows[:, 4:].max(axis=0)
        return None if (mine[:4] == different).all() else mine[4 : 4 + len(own)].tobytes()
