"""The schedule of a step: gathers, releases and reductions of units, in the engine's order.

The engine's trace of a real step has the same entries (tests/dist/test_plan_schedule.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdpc.plan.engine import EngineMemory, reshards
from fsdpc.plan.model import Setup, Unit


@dataclass(frozen=True)
class Event:
    """An entry of the schedule. ``op``: "gather", "release" or "reduce". ``bytes``: the size of the
    collective's buffer. It is 0 if there is no collective: for releases, for gathers whose values
    are still in their slot, and for all entries if there is one shard.
    """

    phase: str
    op: str
    unit: str
    bytes: int = 0


def schedule(units: tuple[Unit, ...], engine: EngineMemory, setup: Setup) -> tuple[Event, ...]:
    """Return the events of a micro-batch whose gradients are reduced. ``units`` are in the order of
    the forward, and outer units come before inner ones.
    """
    if len(units) != len(engine.by_unit):
        raise ValueError(f"{len(units)} units, but memory of {len(engine.by_unit)}")
    step = _Step(units, engine, setup)
    return tuple([*step.forward(), *step.backward()])


class _Step:
    def __init__(self, units: tuple[Unit, ...], engine: EngineMemory, setup: Setup) -> None:
        self.units, self.engine, self.setup = units, engine, setup
        self.reshards = [reshards(unit, setup) for unit in units]
        self.in_slot: dict[int, int] = {}  # slot -> the unit whose values are in it

    def _gather(self, phase: str, i: int) -> Event:
        slot, size = self.engine.slot_of[i], self.engine.by_unit[i]["gathered_bytes"]
        here = slot >= 0 and self.in_slot.get(slot) == i
        self.in_slot[slot] = i
        moved = 0 if here or self.setup.shards == 1 else size
        return Event(phase, "gather", self.units[i].name, moved)

    def forward(self) -> Iterator[Event]:
        open_units: list[int] = []
        for i, unit in enumerate(self.units):
            yield from self._close(open_units, unit.depth)
            yield self._gather("forward", i)
            open_units.append(i)
        yield from self._close(open_units, 0)

    def _close(self, open_units: list[int], depth: int) -> Iterator[Event]:
        while open_units and self.units[open_units[-1]].depth >= depth:
            i = open_units.pop()
            if self.reshards[i]:
                yield Event("forward", "release", self.units[i].name)

    def backward(self) -> Iterator[Event]:
        inner: dict[int, list[int]] = {i: [] for i in range(-1, len(self.units))}
        path: list[int] = []
        for i, unit in enumerate(self.units):
            while path and self.units[path[-1]].depth >= unit.depth:
                path.pop()
            inner[path[-1] if path else -1].append(i)
            path.append(i)
        for i in reversed(inner[-1]):
            yield from self._back_through(i, inner)

    def _back_through(self, i: int, inner: dict[int, list[int]]) -> Iterator[Event]:
        unit, size = self.units[i], self.engine.by_unit[i]
        if self.reshards[i]:
            yield self._gather("backward", i)
        for each in reversed(inner[i]):
            yield from self._back_through(each, inner)
        yield Event("backward", "release", unit.name)
        if any(param.trainable for param in unit.params):
            summed = size["reduced_bytes"] if self.setup.shards > 1 else 0
            yield Event("backward", "reduce", unit.name, summed)
