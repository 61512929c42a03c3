"""The record of a memory profile: samples, peaks, growth over steps, and files of the record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdpc.plan.rows import SHARDS, Key, Point, tops, total
from fsdpc.plan.show import plain_table, size
from fsdpc.plan.snapshot import snapshot, write

# A growth is reported only after this many steps. The first step is not counted, because some
# memory always stays after it.
LEAST_STEPS = 3
LEAST_BYTES = 4096  # least growth per step: slower growth may be a list of losses
NAMED = 3  # the number of units that a growth names
TEMPORARIES: Key = ("temporaries", "")


@dataclass(frozen=True)
class Sample:
    """One moment of a run. ``live``: bytes by (role, unit); the unit is "" for memory that units
    share. ``over``: the peak of tensor bytes since the previous sample, minus tensor bytes now.
    ``gathered``: the units that are gathered. ``resident``: the resident bytes of the process.
    ``device``: bytes of torch's allocator on a GPU.
    """

    step: int
    phase: str
    unit: str
    event: str
    seconds: float
    live: dict[Key, int]
    over: int
    gathered: tuple[str, ...]
    resident: int
    device: dict[str, int]

    @property
    def point(self) -> Point:
        """The highest point since the previous sample: ``live``, and ``over`` as temporaries."""
        most = self.live.get(TEMPORARIES, 0) + self.over
        return Point(self.phase, self.unit, {**self.live, TEMPORARIES: most})


@dataclass(frozen=True)
class Boundary:
    """The end of a step. ``live``: as in samples, and the bytes of units that are still gathered.
    ``process``: the bytes of host memory that the process uses.
    """

    live: dict[Key, int]
    process: int


@dataclass(frozen=True)
class Growth:
    """A role that grew in every step except the first. ``units``: the units that grew most, with
    their bytes per step. For the role ``gathered``, bytes are those that were still gathered when
    the last step ended.
    """

    role: str
    bytes_per_step: int
    units: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        units = ", ".join(f"{unit or 'all units'} {size(n)}" for unit, n in self.units)
        if self.role == "gathered":
            return f"units are still gathered when steps end: {units}. {_HINT['gathered']}"
        return (
            f"{self.role} grow by {size(self.bytes_per_step)} a step: {units}. {_HINT[self.hint]}"
        )

    @property
    def hint(self) -> str:
        return self.role if self.role in _HINT else "other"


_HINT = {
    "activations": "Something keeps tensors of the forward after the step, such as outputs or "
    "losses in a list (append loss.item()), or hidden states on an attribute.",
    "gathered": "Units stay gathered after the step: call reshard() after unshard(), and "
    "backward() without retain_graph.",
    "optimizer states": "The optimizer keeps more with each step, such as a history per parameter.",
    "spare memory": "Two units in use needed one slot: see FSDPC_GATHER_SLOTS.",
    "other": "Tensors that were made outside of the model's passes stay.",
}


@dataclass
class Profile:
    """The record of ``profile_memory`` on this rank. ``str()`` gives a table of the peaks. All
    methods are local.
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    cache: str = ""
    samples: list[Sample] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)

    def named(self, tree: Any) -> None:
        comm = tree.units[0].groups.shard
        self.rank, self.world = comm.rank, comm.world

    def end(self, device: str, cache: str) -> None:
        self.device, self.cache = device, cache

    @property
    def peak(self) -> Sample:
        """The sample with most bytes."""
        return max(self.samples, key=lambda s: s.point.bytes)

    @property
    def _points(self) -> list[Point]:
        return [sample.point for sample in self.samples]

    def growth(self) -> list[Growth]:
        """Return leaks: roles whose bytes at the end of a step rose by 4 KiB or more in every step
        except the first, and units that are still gathered at the end of each step. The list is
        empty for fewer than four steps.
        """
        ends = [b.live for b in self.boundaries[1:]]
        if len(ends) < LEAST_STEPS:
            return []
        found = []
        for role in dict.fromkeys(role for live in ends for role, _ in live):
            totals = [total(live, 0).get(role, 0) for live in ends]
            rises = [b - a for a, b in zip(totals, totals[1:], strict=False)]
            if role == "gathered" and min(totals) > 0:
                found.append(_kept(ends[-1]))
            elif min(rises) >= LEAST_BYTES:
                found.append(_growth(role, ends))
        return sorted(found, key=lambda g: -g.bytes_per_step)

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain values, for JSON."""
        return {
            "schema": "fsdpc.profile/1",
            "source": "run",
            "rank": self.rank,
            "world": self.world,
            "device": self.device,
            "fragmentation": self.cache,
            "samples": [
                {
                    "step": s.step,
                    "phase": s.phase,
                    "unit": s.unit,
                    "event": s.event,
                    "seconds": s.seconds,
                    "live": [[role, unit, n] for (role, unit), n in s.live.items()],
                    "over_bytes": s.over,
                    "gathered": list(s.gathered),
                    "resident_bytes": s.resident,
                    "device": s.device,
                }
                for s in self.samples
            ],
            "peaks": [point.as_dict() for point in tops(self._points)],
            "process_bytes": [b.process for b in self.boundaries],
            "growth": [
                {"role": g.role, "bytes_per_step": g.bytes_per_step, "units": list(g.units)}
                for g in self.growth()
            ],
        }

    def save(self, path: str | Path) -> None:
        """Write the profile: ``.json``, a picture (``.png``, ``.svg``, ``.pdf``; needs matplotlib),
        or ``.pickle`` for torch's memory viewer. ``ValueError``: another suffix.
        """
        kind = Path(path).suffix
        if kind == ".json":
            Path(path).write_text(json.dumps(self.as_dict()))
        elif kind == ".pickle":
            write(str(path), self.snapshot())
        elif kind in (".png", ".svg", ".pdf"):
            from fsdpc.plan.picture import draw_profile

            draw_profile(
                str(path),
                f"rank {self.rank} of {self.world}, {len(self.boundaries)} steps",
                self._points,
                [s.step for s in self.samples],
                [s.resident for s in self.samples],
                {k: n for k, n in self.peak.live.items() if k[1] and k[0] not in _EVEN},
            )
        else:
            raise ValueError(f"{path}: use .json, .png, .svg, .pdf or .pickle")

    def snapshot(self) -> dict[str, Any]:
        """The profile in the format of ``torch.cuda.memory._snapshot``."""
        return snapshot(self._points, self.samples[-1].live)

    def __str__(self) -> str:
        points = tops(self._points)
        roles = list(dict.fromkeys(r for p in points for r, n in p.roles.items() if n))
        rows = [(role, *(size(p.roles.get(role, 0)) for p in points)) for role in roles]
        rows.append(("all", *(size(p.bytes) for p in points)))
        head = ("at the highest point of", *(p.phase for p in points))
        title = f"Memory of rank {self.rank} of {self.world} over {len(self.boundaries)} steps"
        lines = [plain_table(title, head, rows)]
        lines += [f"highest in {self.peak.phase} of unit {self.peak.unit or '-'}"]
        lines += [self.cache] if self.cache else []
        return "\n".join([*lines, *(f"LEAK: {growth}" for growth in self.growth())])


# Roles in which every unit has bytes all the time.
_EVEN = (*SHARDS, "optimizer states")


def _kept(live: dict[Key, int]) -> Growth:
    units = sorted(((u, n) for (r, u), n in live.items() if r == "gathered"), key=lambda i: -i[1])
    return Growth("gathered", sum(n for _, n in units), tuple(units[:NAMED]))


def _growth(role: str, ends: Sequence[dict[Key, int]]) -> Growth:
    steps = len(ends) - 1
    rises = {
        unit: ends[-1].get((role, unit), 0) - ends[0].get((role, unit), 0)
        for unit in dict.fromkeys(u for live in ends for r, u in live if r == role)
    }
    most = sorted(((u, n // steps) for u, n in rises.items() if n > 0), key=lambda item: -item[1])
    return Growth(role, sum(rises.values()) // steps, tuple(most[:NAMED]))
