"""What each switch would change, and which plans fit a card, fastest first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fsdpc._plan.cards import Card
from fsdpc._plan.cost import Cost, cost
from fsdpc._plan.ledger import Build, Plan, plan
from fsdpc._plan.model import Setup
from fsdpc._plan.states import optimizer

# (label, changes); a change that is in force already is left out.
SWITCHES: tuple[tuple[str, dict[str, object]], ...] = (
    ("checkpoint every block", {"checkpointing": 1.0}),
    ("checkpoint every second block", {"checkpointing": 0.5}),
    ("flash attention", {"attention": "flash"}),
    ("chunked or fused loss", {"loss": "fused"}),
    ("reduce every micro-batch", {"sync": "every"}),
    ("FULL_SHARD", {"strategy": "FULL_SHARD", "shard": 0}),
    ("SHARD_GRAD_OP", {"strategy": "SHARD_GRAD_OP", "shard": 0}),
    ("bf16 compute", {"compute": "bfloat16"}),
    ("bf16 storage (loses the fp32 master)", {"storage": "bfloat16"}),
    ("fused update", {"optimizer": "adamw-fused"}),
    ("8-bit optimizer states", {"optimizer": "adamw8bit"}),
    ("CPU offload", {"offload": True}),
    ("states in host memory", {"host": 1.0, "disk": 0}),
    ("one reduce slot", {"reduce_slots": 1}),
    ("one gather slot per level (no prefetch)", {"gather_slots": 1}),
)


@dataclass(frozen=True)
class Effect:
    """What a switch does to the bytes at the peak; negative is less."""

    label: str
    bytes: int
    plan: Plan


@dataclass(frozen=True)
class Change(Effect):
    """With the seconds of a step."""

    seconds: float
    share: float  # of the step's seconds


def changes(build: Build, base: Plan, card: Card) -> list[Change]:
    """Every switch by itself, the one that frees most first; those without effect are left out."""
    before = cost(base, card).step
    found = []
    for effect in effects(build, base):
        seconds = cost(effect.plan, card).step - before
        if effect.bytes or seconds:
            share = seconds / before if before else 0.0
            found.append(Change(effect.label, effect.bytes, effect.plan, seconds, share))
    return found


def effects(build: Build, base: Plan) -> list[Effect]:
    """Every switch by itself, the one that frees most first."""
    found = []
    extra: list[tuple[str, dict[str, object]]] = []
    if not base.model.traced:
        extra.append(("activations in int8", {"compress": "int8", "offload_activations": False}))
    if not base.model.traced and base.setup.transport == "stream":
        extra.append(("activations in host memory", {"offload_activations": True, "compress": ""}))
    for label, values in _switches(base.setup, tuple(extra)):
        other = plan(build, replace(base.setup, **values))  # type: ignore[arg-type]
        found.append(Effect(label, other.peak.bytes - base.peak.bytes, other))
    return sorted(found, key=lambda c: c.bytes)


def _switches(
    setup: Setup, extra: tuple[tuple[str, dict[str, object]], ...]
) -> Iterator[tuple[str, dict[str, object]]]:
    offloads = optimizer(setup.optimizer).offloads
    for label, values in SWITCHES + extra:
        if values.get("host") and not offloads:
            continue
        if any(getattr(setup, name) != value for name, value in values.items()):
            yield label, values
    if setup.micro_batch > 1:
        yield (
            "half the micro-batch, twice the accumulation",
            {"micro_batch": setup.micro_batch // 2, "accumulation": setup.accumulation * 2},
        )
    yield "twice the ranks", {"world": setup.world * 2}


@dataclass(frozen=True)
class Suggestion:
    plan: Plan
    cost: Cost
    label: str

    @property
    def tokens_per_second(self) -> float:
        return self.cost.tokens_per_second(self.plan)


def suggest(
    builds: dict[str, Build],
    setup: Setup,
    card: Card,
    usable: int,
    *,
    optimizers: Iterable[str] = (),
    worlds: Iterable[int] = (),
    limit: int = 8,
) -> list[Suggestion]:
    """Plans whose upper bound fits ``usable`` bytes, most tokens per second and GPU first. Searches
    strategy, checkpointing, micro-batch, offload and slots, over the wraps in ``builds`` and the
    optimizers and worlds given.
    """
    found = []
    for wrap, world, name in itertools.product(
        builds, worlds or (setup.world,), optimizers or (setup.optimizer,)
    ):
        hybrid = ["HYBRID_SHARD"] if world > setup.ranks_per_host else []
        names = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *hybrid]
        for strategy, offload in itertools.product(names, (False, True)):
            base = replace(
                setup, world=world, optimizer=name, strategy=strategy, shard=0, offload=offload
            )
            found += list(_largest_batches(wrap, builds[wrap], base, card, usable))
    found.sort(key=lambda s: (-s.tokens_per_second, s.plan.upper))
    return found[:limit]


def _largest_batches(
    wrap: str, build: Build, setup: Setup, card: Card, usable: int
) -> Iterator[Suggestion]:
    """For each checkpointing ratio the largest micro-batch that fits, of the powers of two up to
    what a step of the setup has. With one slot each only where two do not fit.
    """
    least = replace(setup, checkpointing=1.0, micro_batch=1)
    if plan(build, least).upper > usable:
        setup = replace(setup, gather_slots=1, reduce_slots=1)
        if plan(build, replace(least, gather_slots=1, reduce_slots=1)).upper > usable:
            return
    traced = plan(build, least).model.traced  # its inputs decide the micro-batch
    total = 1 if traced else setup.micro_batch * setup.accumulation
    for ratio in (0.0, 0.5, 1.0):
        best = None
        micro = 1
        while micro <= total:
            made = plan(
                build,
                replace(
                    setup,
                    checkpointing=ratio,
                    micro_batch=micro,
                    accumulation=setup.accumulation if traced else -(-total // micro),
                ),
            )
            if made.upper > usable:
                break
            best, micro = made, micro * 2
        if best is not None:
            yield Suggestion(best, cost(best, card), f"{label_of(best.setup)}, wrap {wrap}")


def label_of(setup: Setup) -> str:
    """The switches of a plan in one line."""
    parts = [
        setup.strategy,
        f"{setup.world} ranks",
        setup.optimizer,
        f"micro-batch {setup.micro_batch} x {setup.accumulation}",
    ]
    if setup.checkpointing:
        parts.append(f"checkpointing {setup.checkpointing:.0%}")
    if setup.compress:
        parts.append(f"activations in {setup.compress}")
    if setup.offload_activations:
        parts.append("activations in host memory")
    if setup.offload:
        parts.append("CPU offload")
    if setup.host:
        parts.append(f"{setup.host:.0%} of the states in host memory")
    if setup.gather_slots == 1:
        parts.append("one slot")
    return ", ".join(parts)


def smallest_world(builds: dict[str, Build], setup: Setup, usable: int) -> int | None:
    """The smallest power of two of ranks with which something fits: FULL_SHARD, micro-batch 1, full
    checkpointing. None: not with 131,072 ranks, because activations or one unit are too large.
    """
    world = 1
    while world <= 1 << 17:
        tried = replace(
            setup,
            world=world,
            strategy="FULL_SHARD",
            shard=0,
            checkpointing=1.0,
            micro_batch=1,
            accumulation=1,
            gather_slots=1,
            reduce_slots=1,
        )
        if any(plan(build, tried).upper <= usable for build in builds.values()):
            return world
        world *= 2
    return None
