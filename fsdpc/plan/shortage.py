"""The report of a failed allocation: who asked for how many bytes, what is in use, what helps.

The report is made while memory is short. It reads counters of the engine and of the process,
repeats the planner's arithmetic, and allocates some hundred kilobytes.
"""

from __future__ import annotations

import os
import re
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fsdpc._comm.channel import this_rank
from fsdpc._engine.tree import TREES
from fsdpc._engine.unit import UNITS
from fsdpc._engine.writeback import owner_of
from fsdpc.plan.advise import effects
from fsdpc.plan.cards import bytes_of
from fsdpc.plan.engine import OWN
from fsdpc.plan.ledger import Plan, plan
from fsdpc.plan.model import Model, Moment, Setup, Unit
from fsdpc.plan.noticed import HEAD, PROGRAM_BYTES, STEP, process_bytes
from fsdpc.plan.rows import SLOTS, Line, Point
from fsdpc.plan.show import beside, size
from fsdpc.plan.sources.held import (
    cache_line,
    engine_lines,
    gpu_of,
    optimizers_of,
    plans_of,
    states_of,
)
from fsdpc.plan.states import BY_CLASS

CHANGES = 3
# What the program did -> the planner's phase. For anything else the report uses all phases.
_MOMENTS = {
    "wrapping": "rest",
    "forward": "forward",
    "backward": "backward",
    STEP: "step",
}
_SAID = re.compile(r"allocate (\d+) bytes|allocate ([\d.]+ ?[KMGT]i?B)|of (\d+) bytes|(\d+) bytes")


def report(
    error: BaseException,
    phase: str,
    name: str,
    placed: Sequence[tuple[int, Any]],
    optimizer: Any,
) -> str:
    """The report; the arguments are those of ``fsdpc.plan.noticed.explain``. Local."""
    if optimizer is not None:
        units = {owner_of(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(units):
            raise LookupError("no parameter of this optimizer is sharded")
    tree = _tree(placed, optimizer)
    if tree is None:
        return "\n".join([_head(phase, name, None), *_asked(error)])
    if phase == "backward" and not name:
        name = _unit_of_backward(tree)
    lines = [_head(phase, name, tree), *_asked(error)]
    held = [line for line in engine_lines([tree]) if line.planned or line.actual]
    states = sum(states_of(each) for each in optimizers_of(tree.units))
    program = 0 if gpu_of(tree) or tree.core is None else PROGRAM_BYTES.get(tree, 0)
    known = sum(line.actual for line in held) + states + program
    rest = max(_process(tree, held) - known, 0)
    model, base = _planned(tree, rest + asked_bytes(error))
    held.append(Line("optimizer states", base.row("optimizer states") or None, states))
    if program:
        held.append(Line("the program, before its first step", None, program))
    held.append(Line("activations and temporaries, about", None, rest))
    lines += [beside("memory of this rank at that moment", held, verdicts=False)]
    lines += [*_gathered(tree), *_limits(tree)]
    exist = states > 0 or phase == STEP
    return "\n".join([*lines, *_advice(model, base, _MOMENTS.get(phase), exist)])


def _head(phase: str, name: str, tree: Any) -> str:
    who = ""
    if tree is not None and tree.units:
        who = f" on rank {this_rank(tree.units[0].groups.shard)} of {dist.get_world_size()}"
    return f"{HEAD}{who} in {phase}{f' of unit {name}' if name else ''}"


def _asked(error: BaseException) -> Iterator[str]:
    found = asked_bytes(error)
    by = "torch" if "llocat" in str(error) and "fsdpc" not in type(error).__module__ else "fsdpc"
    if isinstance(error, MemoryError) and not isinstance(error, torch.OutOfMemoryError):
        by = "fsdpc's engine, or Python"
    yield f"asked for: {size(found) if found else 'an unknown number of bytes'}, by {by}"


def asked_bytes(error: BaseException) -> int:
    """Return the number of requested bytes in the error's text, or 0 if the text has none."""
    match = _SAID.search(str(error))
    if match is None:
        return 0
    text = next(part for part in match.groups() if part)
    return bytes_of(text.replace(" ", ""), least=0)


def _tree(placed: Sequence[tuple[int, Any]], optimizer: Any) -> Any:
    """Return the tree that ran last; if ``optimizer`` is given, the last tree with its parameters.
    If no tree has slots yet, return a stand-in that has the units. If there are no units, return
    None.
    """
    if placed:
        return SimpleNamespace(
            units=[u for _, u in placed], depths=[d for d, _ in placed], core=None
        )
    trees = [tree for tree in TREES if tree.units]
    if optimizer is not None:
        owners = {id(owner_of(p)) for group in optimizer.param_groups for p in group["params"]}
        trees = [tree for tree in trees if any(id(u) in owners for u in tree.units)] or trees
    if trees:
        return max(trees, key=_last_event)
    units = [unit for unit in UNITS if hasattr(unit, "post_forward_hook")]  # complete
    return SimpleNamespace(units=units, depths=[0] * len(units), core=None) if units else None


def _last_event(tree: Any) -> int:
    return max((entry["time_ns"] for entry in tree.trace(1)), default=0)


def _unit_of_backward(tree: Any) -> str:
    """Return the name of the unit that backward entered last. If that unit has finished, return
    "(root), after unit" and the unit's name.
    """
    if tree.core is None or tree.core.entered is None:
        return "(root)"
    index, done = tree.core.entered
    name = tree.units[index].name or "(root)"
    return f"(root), after unit {name}" if done else name


# --- what is there --------------------------------------------------------------------------------


def _process(tree: Any, held: Sequence[Line]) -> int:
    """Return the bytes in use by the process: on a GPU those of torch's allocator and of slots,
    otherwise those of host memory.
    """
    if device := gpu_of(tree):
        coded = 0 if tree.core is None else tree.memory_stats()["coded_bytes"]
        slots = sum(h.actual for h in held if h.role in SLOTS)
        return torch.cuda.memory_allocated(device) + slots - coded
    return sum(process_bytes().values())


def _gathered(tree: Any) -> Iterator[str]:
    if tree.core is None:
        return
    names = [
        unit.name or "(root)"
        for unit, count in zip(tree.units, tree.core.references(), strict=True)
        if count
    ]
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        yield f"gathered now: {', '.join(names[:4])}{more}"


def _limits(tree: Any) -> Iterator[str]:
    if device := gpu_of(tree):
        free, total = torch.cuda.mem_get_info(device)
        yield f"device: {size(free)} of {size(total)} free"
        yield cache_line(device)
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        yield f"address space: {size(used)} of {size(limit)} used (RLIMIT_AS, ulimit -v)"
    with open("/proc/meminfo") as file:
        rows = dict(line.split(":") for line in file)
    yield f"host: {size(int(rows['MemAvailable'].split()[0]) * 1024)} available"


# --- what would help ------------------------------------------------------------------------------


def _planned(tree: Any, activations: int) -> tuple[_Measured, Plan]:
    """Return the model and the plan of this run. ``activations``: measured plus requested bytes."""
    local = tree.core is not None and tree.memory_stats()["local_bytes"] > 0
    plans = plans_of(tree, local)
    units, setup = _loosened(tree, tuple(unit for unit, _ in plans), plans[0][1])
    model = _Measured(units, activations)
    return model, plan(model, setup)


def _advice(model: _Measured, base: Plan, phase: str | None, exist: bool) -> Iterator[str]:
    """Yield lines about the switches that free memory in the phase in which the allocation failed
    (None: in any phase). The planner compares plans with and without each switch. ``exist``:
    whether optimizer states exist already.
    """

    def held(made: Plan) -> int:
        points = [p for p in made.timeline if phase in (None, p.phase)]
        return max(p.bytes - (0 if exist else _states(p)) for p in points)

    found = [effect for effect in effects(model, base, held) if effect.bytes < 0][:CHANGES]
    if not found:
        yield "no switch of the planner frees memory at this moment"
        return
    yield "what would free most, by the plan (activations: at most, from what was measured):"
    yield from (f"  {effect.label}: -{size(-effect.bytes)}" for effect in found)


def _states(point: Point) -> int:
    return point.of("optimizer states") + point.of("buffers of states")


class _Measured:
    """The planner's model of a run of which only the sum of all activations is known. With full
    checkpointing, the activations of one block remain. The inputs of blocks, which are not known,
    are left out.
    """

    def __init__(self, units: tuple[Unit, ...], activations: int) -> None:
        self.units, self.activations = units, activations
        self.blocks = max(sum(unit.depth > 0 for unit in units), 1)

    def __call__(self, setup: Setup) -> Model:
        live = self.activations * setup.micro_batch / 2
        live *= 1 - setup.checkpointing * (1 - 1 / self.blocks)
        moments = (
            Moment("forward", "", round(live), round(live)),
            Moment("backward", "", 0, -round(live)),
        )
        return Model("model", self.units, moments, blocks=self.blocks)


def _loosened(tree: Any, units: tuple[Unit, ...], setup: Setup) -> tuple[tuple[Unit, ...], Setup]:
    """Move options that most units share from the units to the setup, so that one switch of the
    setup changes all these units.
    """
    storage = _most(p.dtype for unit in units for p in unit.params if p.trainable) or "float32"
    compute = _most(unit.compute for unit in units)
    reshard = _most(unit.reshard for unit in units)
    strategy = setup.strategy
    if setup.shards > 1 and setup.replicas == 1:
        strategy = "FULL_SHARD" if reshard else "SHARD_GRAD_OP"
    setup = replace(
        setup,
        storage=storage,
        compute=None if compute in (None, OWN) else compute,
        strategy=strategy,
        optimizer=_optimizer_name(tree),
        micro_batch=2,
    )
    loose = tuple(
        replace(
            unit,
            params=tuple(replace(p, dtype=None) if p.dtype == storage else p for p in unit.params),
            compute=None if unit.compute == compute else unit.compute,
            reshard=None if unit.reshard == reshard else unit.reshard,
        )
        for unit in units
    )
    return loose, setup


def _most(values: Any) -> Any:
    counted = Counter(values).most_common(1)
    return counted[0][0] if counted else None


def _optimizer_name(tree: Any) -> str:
    """Return the planner's name of the optimizer. If no optimizer is known, return ``sgd``, which
    has no states.
    """
    for optimizer in optimizers_of(tree.units):
        name = BY_CLASS.get(type(optimizer).__name__)
        if name == "adamw" and any(group.get("fused") for group in optimizer.param_groups):
            return "adamw-fused"
        if name == "sgd" and any(group.get("momentum") for group in optimizer.param_groups):
            return "momentum"
        if name is not None:
            return name
    return "sgd"
