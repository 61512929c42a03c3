"""The entries of a ledger of one rank's memory, for plans and for runs.

``Row``: planned bytes of a role. ``Line``: planned bytes beside the bytes of a run. ``Point``: the
live bytes at one moment of a step. This file does not need torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

ALWAYS = ("rest", "forward", "backward", "step")
Key = tuple[str, str]  # (role, unit); the unit is "" for memory that units share


class Role(NamedTuple):
    """A role of memory. ``stat``: the role's name in ``fsdpc.memory_stats``, or "" if the engine
    does not allocate the memory.
    """

    colour: str
    stat: str = ""


# In the order of pictures, from the bottom up. The colours differ in print, and for colour-blind
# readers.
ROLES = {
    "shards": Role("#1b4f72", "master_bytes"),
    "gradient shards": Role("#2e86c1", "grad_bytes"),
    "optimizer states": Role("#85c1e9"),
    "buffers of states": Role("#5dade2"),
    "gather slots": Role("#117a65", "gather_bytes"),
    "reduce slots": Role("#45b39d", "reduce_bytes"),
    "no_sync gradients": Role("#a2d9ce", "local_bytes"),
    "update's temporaries": Role("#d4e6f1"),
    "buffers": Role("#626567"),
    "inputs": Role("#979a9a"),
    "activations": Role("#b9770e"),
    "recomputed": Role("#f0b27a"),
    "unit gradients": Role("#922b21"),
    "logits and loss": Role("#d98880"),
    "workspace": Role("#bfc9ca"),
    "device context": Role("#7b7d7d"),
    "communicators": Role("#b3b6b7"),
    "allocator": Role("#e5e7e9"),
    "spare memory": Role("#6c3483", "spare_bytes"),
    "temporaries": Role("#f7dc6f"),
    "other": Role("#d7bde2"),
}
ENGINE = {name: role.stat for name, role in ROLES.items() if role.stat}
SHARDS = ("shards", "gradient shards")  # every unit has these
SLOTS = ("gather slots", "reduce slots", "spare memory")  # not in torch's allocator


@dataclass(frozen=True)
class Row:
    """Planned bytes of a role. ``exact``: whether a run has the same bytes; other rows are from a
    formula, a trace or an assumption. ``where``: ``device``, ``host`` or ``disk``.
    """

    role: str
    bytes: int
    lifetime: tuple[str, ...]
    why: str
    exact: bool = False
    where: str = "device"


@dataclass(frozen=True)
class Line:
    """Planned and actual bytes of a role. ``planned``: None if the planner does not know the bytes,
    such as those of states of an unknown optimizer. ``assumed``: whether ``planned`` is an
    assumption that was made without a device. A run may then differ from ``planned``.
    """

    role: str
    planned: int | None
    actual: int
    note: str = ""
    assumed: bool = False

    @property
    def differs(self) -> bool:
        return self.planned is not None and self.planned != self.actual and not self.assumed

    @property
    def verdict(self) -> str:
        if self.planned is None:
            return ""
        if self.assumed:
            return "assumed"
        return f"DIFFERS by {self.actual - self.planned:+,} B" if self.differs else "equal"


@dataclass(frozen=True)
class Point:
    """Live bytes by role and unit, at one moment or at the highest point of a part of a step.
    ``doubt``: the bytes by which activations may exceed the planned ones.
    """

    phase: str
    unit: str
    live: dict[Key, int]
    doubt: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(self.live.values())

    def of(self, role: str) -> int:
        """Bytes of a role in the memory that units share."""
        return self.live.get((role, ""), 0)

    @property
    def roles(self) -> dict[str, int]:
        return total(self.live, 0)

    def as_dict(self) -> dict[str, Any]:
        """The point as plain values, for JSON."""
        return {"phase": self.phase, "unit": self.unit, "bytes": self.bytes, "roles": self.roles}


def total(live: dict[Key, int], part: int) -> dict[str, int]:
    """Bytes by role (``part`` 0) or by unit (1)."""
    found: dict[str, int] = {}
    for key, count in live.items():
        found[key[part]] = found.get(key[part], 0) + count
    return found


def tops(points: Iterable[Point]) -> list[Point]:
    """The highest point of each phase, in the order of the phases."""
    found: dict[str, Point] = {}
    for point in points:
        if point.phase not in found or point.bytes > found[point.phase].bytes:
            found[point.phase] = point
    return list(found.values())
