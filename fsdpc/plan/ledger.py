"""A ledger of one rank's memory. Its peak is the maximum of a timeline, not a sum of maxima."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from fsdpc import _C
from fsdpc._companions.matrices import ROUND
from fsdpc._companions.state_layout import (
    ALIGN,
    BUFFERS,
    MIN_8BIT,
    PAGE,
    STAGES,
    Extent,
    Field,
    Wanted,
    chosen_for_host,
    chunk_bytes_of,
    extent_of_8bit,
    lay_out,
)
from fsdpc.plan.cards import counted, size
from fsdpc.plan.engine import EngineMemory, engine_memory, reshards, specs_of
from fsdpc.plan.model import ITEM_BYTES, Model, Setup, Unit, check
from fsdpc.plan.rows import ALWAYS, ENGINE, SHARDS, Key, Point, Row
from fsdpc.plan.states import OF_WHOLE, Optimizer, optimizer

Build = Callable[[Setup], Model]

# Sizes that are not known without a device. The plan prints each with its source.
CONTEXT_BYTES = 500_000_000
CONTEXT_WHY = "CUDA context and loaded kernels: 200 to 700 MB are reported; assumed"
COMM_BYTES = {2: 544_000_000, 3: 688_000_000}
COMM_WHY = "NCCL, two communicators per group: 544 MB (2 ranks) or 688 MB (NVIDIA/nccl issue 964)"
WORKSPACE_BYTES = 32 << 20
WORKSPACE_WHY = "cuBLAS workspace of 32 MiB, torch's default on Hopper"
SLACK = 0.05
SLACK_HIGH = 0.10
_PASSES = ("forward", "backward")
# The phases in which these roles have bytes. Other roles of the timeline have them in ``_PASSES``.
_LIVES = {
    "no_sync gradients": _PASSES,
    "recomputed": ("backward",),
    "unit gradients": ("backward",),
}
SLACK_WHY = "torch's cache: 5 % of what torch allocates in a step, 10 % in the upper bound; assumed"


@dataclass(frozen=True)
class Plan:
    model: Model
    setup: Setup
    engine: EngineMemory
    rows: tuple[Row, ...]
    timeline: tuple[Point, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def peak(self) -> Point:
        return max(self.timeline, key=lambda p: p.bytes)

    @property
    def upper(self) -> int:
        """The most bytes that a step may need, which must fit the device. The number includes
        the larger allowance for the allocator (``SLACK_HIGH``). If a formula gives the activations,
        it also includes an allowance for what real models save beyond the formula.
        """
        more = SLACK_HIGH / SLACK - 1
        return max(p.bytes + round(p.doubt + p.of("allocator") * more) for p in self.timeline)

    def fits(self, usable: int) -> bool | None:
        """Return whether the upper bound fits; None if the activations are not known."""
        if self.upper > usable:
            return False
        return None if self.model.missing else True

    @property
    def host_bytes(self) -> int:
        return sum(row.bytes for row in self.rows if row.where == "host")

    def row(self, role: str) -> int:
        return sum(row.bytes for row in self.rows if row.role == role)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON."""
        return {
            "schema": "fsdpc.plan/1",
            "model": self.model.name,
            "parameters": self.model.values,
            "units": len(self.model.units),
            "setup": asdict(self.setup),
            "engine": self.engine.stats,
            "rows": [asdict(row) for row in self.rows],
            "timeline": [point.as_dict() for point in self.timeline],
            "peak": {**self.peak.as_dict(), "upper_bytes": self.upper},
            "host_bytes": self.host_bytes,
            "notes": list(self.notes),
        }


def plan(build: Build | Model, setup: Setup) -> Plan:
    """Return the ledger of a run. The ledger is the same for every rank, because all shards are of
    equal size. Local; only arithmetic, except that ``build`` may trace a model. ``ValueError``
    names a wrong option.
    """
    setup = check(setup)
    model = build if isinstance(build, Model) else build(setup)
    engine = engine_memory(model.units, setup)
    rows = [*_engine_rows(model, engine, setup), *_state_rows(model, setup)]
    rows += _other_rows(model, setup)
    if model.guessed:
        rows = [replace(row, exact=False) for row in rows]
    timeline = _timeline(model, rows, setup)
    rows += _moment_rows(timeline, setup)
    return Plan(
        model,
        setup,
        engine,
        tuple(r for r in rows if r.bytes),
        timeline,
        model.notes + _notes(setup),
    )


def _engine_rows(model: Model, engine: EngineMemory, setup: Setup) -> list[Row]:
    def whole(key: str) -> int:
        return sum(size_of[key] for size_of in engine.by_unit)

    stats, seen, partial = engine.stats, whole("grad_out_bytes"), whole("partial_bytes")
    slots, buffers = stats["gather_slots"], stats["reduce_slots"]
    of = f"/ {setup.shards} ranks" if setup.shards > 1 else "not sharded"
    kept = sum(not reshards(u, setup) for u in model.units)
    held = f"{counted(kept, 'unit')} stay gathered" if kept else "units share slots in turn"
    parts = [f"accumulated in fp32, {of}"]
    if setup.in_backward and 0 < stats["grad_bytes"] < whole("grads_bytes"):
        largest = max(size_of["grads_bytes"] for size_of in engine.by_unit)
        turns = counted(stats["grad_bytes"] // largest, "slot")
        parts += [f"{turns} that units take in turn, as each is stepped in backward"]
    parts += [f"{size(seen)} of them in the storage dtype for the optimizer"] if seen else []
    parts += [f"{size(partial)} of them sums before replicas"] if partial else []
    whys = {
        "shards": f"{model.numel:,} elements in {setup.storage} {of}, padding included",
        "gradient shards": "; ".join(parts),
        "gather slots": (
            f"{counted(slots, 'slot')} for {size(whole('full_bytes'))} of gathered units "
            f"({held}); the largest {size(stats['gather_slot_bytes'])}; "
            f"padding {size(whole('padding_bytes'))}"
        ),
        "reduce slots": (
            f"{counted(buffers, 'buffer')} as large as the largest unit's packed gradients"
        ),
        "no_sync gradients": (
            f"gradients of {len(model.units)} units, whole, in fp32: no_sync is not divided"
        ),
    }
    return [
        Row(
            role,
            stats[ENGINE[role]],
            _LIVES.get(role, ALWAYS),
            why,
            True,
            "host" if setup.offloads and role in SHARDS else "device",
        )
        for role, why in whys.items()
    ]


@lru_cache(maxsize=4096)
def _trained(specs: tuple[Any, ...], world: int, align: int) -> tuple[tuple[str, int], ...]:
    segments = _C.layout(specs, world, align)["segments"]
    return tuple((s["storage"], s["piece_numel"]) for s in segments if s["trainable"])


def trained_pieces(unit: Unit, setup: Setup) -> tuple[tuple[str, int], ...]:
    """Return (storage dtype, elements on each rank) for each segment that an optimizer updates."""
    return _trained(specs_of(unit, setup), setup.shards, setup.align_bytes)


def _state_rows(model: Model, setup: Setup) -> list[Row]:
    kind = optimizer(setup.optimizer)
    elements: dict[str, int] = {}
    largest = 0
    for unit in model.units:
        for storage, numel in trained_pieces(unit, setup):
            elements[storage] = elements.get(storage, 0) + numel
            largest = max(largest, numel * ITEM_BYTES[storage])
    if setup.host and setup.transport == "stream" and not setup.offload:
        return _host_rows(model, setup, kind)
    if kind.name in OF_WHOLE:
        rows = (_factored_rows if kind.name == "adafactor" else _matrix_rows)(model, setup, kind)
        return _mapped_rows(rows, setup) if setup.disk else rows
    if setup.disk:
        return _disk_rows(model, setup, kind)
    each = {s: kind.state_bytes(ITEM_BYTES[s]) for s in elements}
    where = "host" if setup.offloads else "device"
    rates = ", ".join(f"{rate:.4g} B per {s} element" for s, rate in each.items())
    values = sum(n * ITEM_BYTES[s] for s, n in elements.items())
    temporary = kind.temporaries * (values if setup.foreach else min(values, largest))
    how = "one tensor list (foreach)" if setup.foreach else "one tensor at a time"
    return [
        Row(
            "optimizer states",
            round(sum(n * each[s] for s, n in elements.items())),
            ALWAYS,
            f"{rates}; {kind.source}{kind.without}",
            where=where,
        ),
        Row(
            "update's temporaries",
            round(temporary),
            ("step",),
            f"{kind.name} over {how}",
            where=where,
        ),
    ]


def _matrix_rows(model: Model, setup: Setup, kind: Optimizer) -> list[Row]:
    """Return the row of states, and the row of the exchange with the owners of matrices. A matrix
    of ``muon`` has one moment. All other matrices and parameters have two moments. A matrix of
    another optimizer also has an average, and a basis or a root, for each side. Bytes are means
    over the ranks, because one rank may own more matrices than another.
    """
    states = moved = 0.0
    muon = kind.name == "muon"
    sent = 2 if muon else 4  # bytes of an element that is sent
    most = 0 if muon else _LARGEST_SIDE[kind.name]
    sizes = {p.matrix for unit in model.units for p in unit.params if p.trainable and p.matrix[0]}
    for param in (p for unit in model.units for p in unit.params if p.trainable):
        item = ITEM_BYTES[param.dtype or setup.storage]
        if not param.matrix[0]:
            states += 2 * item * param.numel
            continue
        moved += param.numel / setup.shards
        wide = max(item, 4)
        stack = param.numel // max(param.matrix[0] * param.matrix[1], 1)
        states += param.numel * (item if muon else 2 * wide)
        states += 2 * wide * stack * sum(side**2 for side in param.matrix if side <= most)
    largest = max((rows * columns for rows, columns in sizes), default=0)
    # Newton-Schulz needs three tensors of the matrix's size and two products of its shorter side.
    # The other rules need four tensors of the matrix's size (one is the gradient), and float64
    # tensors for the decomposition.
    if muon:
        working = max((3 * m * n + 2 * min(m, n) ** 2 for m, n in sizes), default=0)
    else:
        sides = [side for size in sizes for side in size if side <= most]
        working = 4 * largest + 3 * 2 * max(sides, default=0) ** 2
    buffers = 2 if moved <= ROUND else 4  # 4: two are for the next round
    exchange = buffers * max(min(moved, ROUND), largest) if setup.shards > 1 else 0
    where = "host" if setup.offloads else "device"
    why = f"each step moves {size(round(sent * moved))} of matrices to their owners and back"
    return [
        Row("optimizer states", round(states / setup.shards), ALWAYS, kind.source, where=where),
        Row(
            "update's temporaries",
            round(sent * (exchange + working)),
            ("step",),
            f"{why}, round by round; the largest has {counted(largest, 'element')}",
            where=where,
        ),
    ]


def _factored_rows(model: Model, setup: Setup, kind: Optimizer) -> list[Row]:
    """Return the row of states (averages of rows and columns, or of the elements of a vector), and
    the row of gradients and values that are sent to the parameters' owners. Bytes are means over
    the ranks."""
    states = moved = largest = 0
    for unit in model.units:
        storage = {param: param.dtype or setup.storage for param in unit.params}
        for param in (param for param in unit.params if param.trainable):
            rows, columns = param.sides
            stack = param.numel // max(rows * columns, 1)
            item = ITEM_BYTES[storage[param]]
            states += item * (stack * (rows + columns) if rows else param.numel)
            moved += item * param.numel
            largest = max(largest, item * param.numel)
    share, most = moved / setup.shards, 4 * ROUND
    # The exchange needs buffers for gradients, values and new values of one round. If there are
    # several rounds, it also needs buffers for the gradients and values of the next round.
    exchange = 3 * max(min(share, most), largest) + (2 * most if share > most else 0)
    exchange = exchange if setup.shards > 1 else 0
    where = "host" if setup.offloads else "device"
    return [
        Row("optimizer states", round(states / setup.shards), ALWAYS, kind.source, where=where),
        Row(
            "update's temporaries",
            round(exchange + 3 * largest),
            ("step",),
            f"each step moves {size(round(3 * share))} of gradients and values to their owners and "
            f"back, round by round; the largest parameter has {size(largest)}",
            where=where,
        ),
    ]


# the default of max_precondition_dim of each optimizer
_LARGEST_SIDE = {"soap": 10000, "shampoo": 8192}


@lru_cache(maxsize=4096)
def _spans(
    specs: tuple[Any, ...], world: int, align: int
) -> tuple[tuple[tuple[int, int, int, int], ...], ...]:
    """Return, for each trained segment, the spans of whole parameters in the shard of rank 0. A
    span is (its start in the shard, its elements, the index of its first element in the whole
    parameter, the elements of the whole parameter).
    """
    layout = _C.layout(specs, world, align, True)
    pieces: list[list[tuple[int, int, int, int]]] = [[] for _ in layout["segments"]]
    for param, spans in zip(layout["params"], layout["spans"], strict=True):
        first, start, length = spans[0]
        if length:
            pieces[param["segment"]].append((start, length, first, param["numel"]))
    pairs = zip(pieces, layout["segments"], strict=True)
    return tuple(tuple(piece) for piece, segment in pairs if segment["trainable"])


def _extents(model: Model, setup: Setup, kind: Optimizer) -> list[list[Extent]]:
    """Return, for each flat parameter (``use_orig_params=False``), the ranges of elements whose
    states can be offloaded. A unit has one flat parameter for each storage dtype.
    """
    found: list[list[Extent]] = []
    for unit in model.units:
        if kind.name == "adamw8bit":
            pieces = _spans(specs_of(unit, setup), setup.shards, setup.align_bytes)
            found += [
                [extent_of_8bit(*span, whole >= MIN_8BIT) for *span, whole in piece]
                for piece in pieces
            ]
            continue
        for dtype, numel in trained_pieces(unit, setup):
            parts = enumerate(kind.parts(ITEM_BYTES[dtype]))
            found.append([Extent(0, numel, tuple(Field(str(k), item) for k, item in parts))])
    return found


@lru_cache(maxsize=256)
def _placed(wanted: tuple[Wanted, ...], chunk_bytes: int, page: int) -> tuple[int, int]:
    """Return the bytes of offloaded states, and the bytes that a step moves in each direction."""
    found = lay_out(wanted, chunk_bytes, page=page)
    return found.end, sum(part[1] for chunk in found.chunks for part in chunk.parts)


def _host_rows(model: Model, setup: Setup, kind: Optimizer) -> list[Row]:
    """Return the rows of states of which a part is in pinned host memory. The bytes are computed by
    the functions that place states in a run.
    """
    extents = _extents(model, setup, kind)
    sizes = [sum(extent.nbytes for extent in each) for each in extents]
    chosen = chosen_for_host(sizes, setup.host)
    pairs = zip(extents, chosen, strict=True)
    away = tuple(extent.wanted for each, here in pairs if here for extent in each)
    chunk_bytes = chunk_bytes_of(setup.host_buffers, STAGES)
    there, _ = _placed(away, chunk_bytes, ALIGN)
    moved = sum(count for count, here in zip(sizes, chosen, strict=True) if here)
    why = f"{setup.host:.0%} of them at most; each step moves {size(moved)} there and back"
    why += kind.without
    return [
        Row("optimizer states", there, ALWAYS, f"pinned; {why}", True, "host"),
        Row(
            "optimizer states",
            sum(sizes) - moved,
            ALWAYS,
            "those that stay on the GPU",
            not kind.rest,
        ),
        Row(
            "buffers of states",
            STAGES * chunk_bytes if away else 0,
            ALWAYS,
            f"{STAGES} buffers that states in host memory pass through",
            True,
        ),
    ]


def _disk_rows(model: Model, setup: Setup, kind: Optimizer) -> list[Row]:
    """Return the rows of states that are in files."""
    wanted = tuple(e.wanted for each in _extents(model, setup, kind) for e in each)
    end, written = _placed(wanted, chunk_bytes_of(setup.disk), PAGE)
    return [
        Row(
            "optimizer states",
            end,
            ALWAYS,
            f"a file of each rank; each step reads and writes {size(written)} of it{kind.without}",
            True,
            "disk",
        ),
        _buffers_row(setup),
    ]


def _mapped_rows(rows: list[Row], setup: Setup) -> list[Row]:
    """Return the rows of an optimizer of whole matrices whose states are in files. A step
    updates the states of matrices in a memory mapping of the file, in whole pages.
    """
    states, *others = rows
    why = f"a file of each rank, all of which each step reads and writes; {states.why}"
    return [replace(states, why=why, where="disk"), _buffers_row(setup), *others]


def _buffers_row(setup: Setup) -> Row:
    return Row(
        "buffers of states",
        BUFFERS * chunk_bytes_of(setup.disk),
        ALWAYS,
        f"{BUFFERS} buffers between that file and the step",
        True,
        "host" if setup.offloads else "device",
    )


def _other_rows(model: Model, setup: Setup) -> list[Row]:
    rows = [
        Row("buffers", model.buffer_bytes, ALWAYS, "whole on every rank"),
        Row("inputs", model.input_bytes, _PASSES, "the micro-batch"),
    ]
    if model.away is not None:
        why = f"{size(model.away.copied)} of saved activations, pinned; a step moves them both ways"
        rows.append(Row("activations", model.away.pinned, _PASSES, why, where="host"))
    if setup.transport == "stream":
        comms = 2 if setup.shards > 1 else 0
        comms += 2 if setup.replicas > 1 else 0
        per = COMM_BYTES[2 if min(setup.world, 3) == 2 else 3]
        rows += [
            Row("device context", CONTEXT_BYTES, ALWAYS, CONTEXT_WHY),
            Row("communicators", comms // 2 * per, ALWAYS, COMM_WHY),
            Row("workspace", WORKSPACE_BYTES, _PASSES, WORKSPACE_WHY),
        ]
    return rows


def _timeline(model: Model, rows: list[Row], setup: Setup) -> tuple[Point, ...]:
    def lasting(phase: str) -> dict[Key, int]:
        return {
            (r.role, ""): r.bytes
            for r in rows
            if phase in r.lifetime and r.where == "device" and r.bytes
        }

    cached = setup.transport == "stream"
    points = [Point("rest", "", lasting("rest"))]
    base = {phase: lasting(phase) for phase in _PASSES}
    live = 0
    for moment in model.moments:
        top = live + moment.rise
        logits = min(moment.logits, top)
        grads = min(moment.grads, top - logits)
        again = min(moment.recomputed, top - logits - grads)
        saved = top - logits - grads - again
        parts = {
            "logits and loss": logits,
            "unit gradients": grads,
            "recomputed": again,
            "activations": saved,
            "allocator": round(SLACK * top) if cached else 0,
        }
        here = {(role, ""): count for role, count in parts.items() if count > 0}
        doubt = model.doubt * (saved + again)
        points.append(Point(moment.phase, moment.unit, {**base[moment.phase], **here}, doubt))
        live += moment.delta
    points.append(Point("step", "", lasting("step")))
    return tuple(points)


_WHY = {
    "activations": "saved for backward and temporary, at the highest point; not sharded",
    "recomputed": "one checkpointed unit's activations, computed again in backward",
    "unit gradients": "whole gradients that autograd made and the engine has not packed yet",
    "logits and loss": "logits, their fp32 copy, log-softmax and gradient",
    "allocator": SLACK_WHY,
}


def _moment_rows(timeline: tuple[Point, ...], setup: Setup) -> list[Row]:
    """Return a row for each role, with the role's bytes at the peak. A role without bytes at the
    peak has a row with its maximum.
    """
    peak = max(timeline, key=lambda p: p.bytes)
    rows = []
    for role, why in _WHY.items():
        most = max(p.of(role) for p in timeline)
        at_peak = peak.of(role)
        if most:
            text = why if at_peak == most else f"{why}; {size(most)} at most, at another moment"
            rows.append(
                Row(
                    role,
                    at_peak or most,
                    _LIVES.get(role, _PASSES),
                    text if at_peak else f"{why}; not at the peak",
                )
            )
    return rows


def _notes(setup: Setup) -> tuple[str, ...]:
    notes = []
    if setup.transport != "stream" and setup.strategy != "NO_SHARD":
        notes.append("gather slots on shared memory are paid for once per host, not per rank")
    if setup.offloads:
        notes.append("offloaded: shards, gradient shards and optimizer states in host memory")
    if setup.host and (setup.offload or setup.transport != "stream"):
        notes.append("host has no effect: parameters and states are in host memory already")
    if setup.optimizer == "adamw8bit" and (setup.host or setup.disk):
        notes.append("states of 8 bits are those of rank 0; others differ by parts of blocks")
    if setup.compress:
        notes.append(
            f"saved activations in {setup.compress} (fsdpc.activations.compress), but for what "
            "attention, softmax and the loss save, and checkpointed blocks; the time of packing is "
            "an estimate from the rate of the card's memory"
        )
    return tuple(notes)
