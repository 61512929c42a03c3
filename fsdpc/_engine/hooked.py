"""Communication hooks: a Python function, not the engine, sums a unit's gradients over the ranks.

The ranks' collectives in such functions match by their order. Therefore, before each call the ranks
exchange which unit is next and which of its parameters have gradients. If the units differ, as with
data-dependent routing, all further calls are deferred to the end of backward and made in module
order. There is no call for a unit that has no gradients on any rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fsdpc import _C
from fsdpc._comm.channel import this_rank

# A function that gets the unit, the gradients of each segment and the layouts of the segments. It
# returns this rank's shard of each segment's gradients, summed over the ranks and divided.
Summing = Callable[[Any, list[torch.Tensor], list[dict[str, Any]]], list[torch.Tensor]]
_END = -1  # sent in place of a unit's number: this rank has no unit left to reduce
_DIFFERENT = -2  # sent in place of a unit's number: ranks of another group sent different numbers


def attach(tree: Any, hosts: Sequence[Any]) -> None:
    """For each ``UnitHost`` in ``hosts`` that has a function ``_summing``, let this function sum
    the gradients of the host's unit. ``hosts`` must be equal, in order too, on all ranks. Local.
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
    """A unit and the function ``summing`` that sums its gradients. ``reduce`` packs the gradients,
    calls ``summing`` and accumulates the result.
    """

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
    """The units that share the communicators ``comms``. The ranks of these communicators agree on
    the order in which the units' functions are called.
    """

    def __init__(self, comms: list[Any], tree: Any, first: int) -> None:
        self.comms = comms
        self.tree = weakref.ref(tree)
        self.first = first  # the index of the first of these units in `tree.units`
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
        """Make the deferred calls; run at the end of every backward. Collective.

        ``MismatchError``: ranks called hooks of different units.
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
        """Return the elementwise OR of ``own`` over ranks; None if ranks have different ``number``.

        Collective.
        """
        mine = np.zeros(4 + self.width, np.uint8)
        mine[:4] = np.array([number], np.int32).view(np.uint8)
        mine[4 : 4 + len(own)] = np.frombuffer(bytes(own), np.uint8)
        different = np.array([_DIFFERENT], np.int32).view(np.uint8)
        self.tree().core.before_hook(self.first, what)
        for comm in self.comms:
            # Every row begins as `mine`: in a fake process group all_gather does not change `rows`.
            rows = np.tile(mine, (comm.world, 1))
            comm.all_gather(rows, what=what)
            if (rows[:, :4] != mine[:4]).any():
                mine[:4] = different
            mine[4:] = rows[:, 4:].max(axis=0)
        return None if (mine[:4] == different).all() else mine[4 : 4 + len(own)].tobytes()
