"""The effect of each switch of a plan, and the plans that fit a card, fastest first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdpc.plan.cards import Card
from fsdpc.plan.cost import Cost, cost
from fsdpc.plan.ledger import Build, Plan, plan
from fsdpc.plan.model import Setup, check
from fsdpc.plan.states import optimizer

DISK_BUFFERS = 96 << 20  # bytes

# Each switch: (label, the fields of ``Setup`` that it changes, with their new values). A switch is
# left out if the setup has all these values already.
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
    ("steps in backward", {"in_backward": True}),
    ("one reduce slot", {"reduce_slots": 1}),
    ("one gather slot per level (no prefetch)", {"gather_slots": 1}),
)
OWN_UNITS = "embedding and head as units of their own"


@dataclass(frozen=True)
class Effect:
    """The bytes that a switch adds (negative: it frees memory) to the result of the function
    ``held`` that was passed to ``effects``; by default, to the peak.
    """

    label: str
    bytes: int
    plan: Plan


@dataclass(frozen=True)
class Change(Effect):
    """An effect, with the seconds that the switch adds to a step."""

    seconds: float
    share: float  # ``seconds`` divided by the time of the step without the switch


def changes(build: Build, base: Plan, card: Card, other: Build | None = None) -> list[Change]:
    """Return the nonzero effects of single switches, largest saving first."""
    before = cost(base, card).step
    found = []
    for effect in effects(build, base, other=other):
        seconds = cost(effect.plan, card).step - before
        if effect.bytes or seconds:
            share = seconds / before if before else 0.0
            found.append(Change(effect.label, effect.bytes, effect.plan, seconds, share))
    return found


def peak_bytes(made: Plan) -> int:
    return made.peak.bytes


def effects(
    build: Build, base: Plan, held: Callable[[Plan], int] = peak_bytes, other: Build | None = None
) -> list[Effect]:
    """Return the effect of each switch by itself, largest saving first. The effect is the
    difference of ``held(plan)`` with and without the switch. ``other``: the model with embedding
    and head as separate units.
    """
    found = []
    if other is not None:
        made = plan(other, base.setup)
        found.append(Effect(OWN_UNITS, held(made) - held(base), made))
    extra: list[tuple[str, dict[str, object]]] = []
    if not base.model.traced:
        extra.append(("activations in int8", {"compress": "int8", "offload_activations": False}))
    if not base.model.traced and base.setup.transport == "stream":
        extra.append(("activations in host memory", {"offload_activations": True, "compress": ""}))
    for label, values in _switches(base.setup, tuple(extra)):
        made = plan(build, replace(base.setup, **values))  # type: ignore[arg-type]
        found.append(Effect(label, held(made) - held(base), made))
    return sorted(found, key=lambda c: c.bytes)


def _switches(
    setup: Setup, extra: tuple[tuple[str, dict[str, object]], ...]
) -> Iterator[tuple[str, dict[str, object]]]:
    stream = setup.transport == "stream"
    disk = {"disk": DISK_BUFFERS, "host": 0.0, "offload": setup.offload or stream}
    on_disk = ("CPU offload, states on a disk" if stream else "states on a disk", disk)
    for label, values in (*SWITCHES, on_disk, *extra):
        if not optimizer(setup.optimizer).takes(values):
            continue
        if values.get("in_backward") and (setup.accumulation > 1 or setup.replicas > 1):
            continue
        if any(getattr(setup, name) != value for name, value in values.items()):
            yield label, values
    if setup.micro_batch > 1 and not setup.in_backward:
        yield (
            "half the micro-batch, twice the accumulation",
            {"micro_batch": setup.micro_batch // 2, "accumulation": setup.accumulation * 2},
        )
    yield "twice the ranks", {"world": setup.world * 2}


@dataclass(frozen=True)
class Suggestion:
    """A plan that fits. ``means``: the switches that this plan has and the user's setup lacks."""

    plan: Plan
    cost: Cost
    means: tuple[str, ...]

    @property
    def label(self) -> str:
        return ", ".join(self.without())

    def without(self, known: Sequence[str] = ()) -> list[str]:
        """Return the parts of the label, except the means in ``known``."""
        setup = self.plan.setup
        batch = f"micro-batch {setup.micro_batch} x {setup.accumulation}"
        more = [each for each in self.means if each not in known]
        return [setup.strategy, f"{setup.world} ranks", batch, *more]

    @property
    def tokens_per_second(self) -> float:
        return self.cost.tokens_per_second(self.plan)

    @property
    def kind(self) -> tuple[object, ...]:
        """The key that similar plans share: they differ only in the world, in the batch, in means
        that cost no time, and in the optimizer if its states are not in the GPU's memory.
        """
        free = {"adamw-fused", FUSED_LOSS, OWN_UNITS, STEPS, ONE_SLOT}
        if any(label in self.means for label, _ in _STATES):
            free |= {"adamw8bit"}
        return (self.plan.setup.strategy, *(each for each in self.means if each not in free))

    def beats(self, other: Suggestion) -> bool:
        """Return whether ``other`` can be left out: it has all means of this plan, at least as many
        ranks, and no advantage of more than 2 % in speed or memory.
        """
        return (
            self is not other
            and set(self.means) <= set(other.means)
            and self.plan.setup.world <= other.plan.setup.world
            and self.tokens_per_second >= 0.98 * other.tokens_per_second
            and self.plan.upper <= 1.02 * other.plan.upper
            and (len(self.means) < len(other.means) or self.label <= other.label)
        )


FUSED_LOSS, STEPS, ONE_SLOT = "fused loss", "steps in backward", "one slot"
Means = tuple[tuple[str, dict[str, object]], ...]
NOTHING: tuple[str, dict[str, object]] = ("", {})
# The search tries one entry of _ACTIVATIONS and one of _STATES at a time. Means in _FREE cost no
# time.
_ACTIVATIONS: Means = (
    NOTHING,
    ("recompute 50%", {"checkpointing": 0.5}),
    ("recompute 100%", {"checkpointing": 1.0}),
    ("int8 activations", {"compress": "int8", "offload_activations": False}),
    ("activations in host memory", {"compress": "", "offload_activations": True}),
)
_STATES: Means = (
    NOTHING,
    ("states in host memory", {"host": 1.0, "disk": 0}),
    ("CPU offload", {"offload": True}),
    ("CPU offload, states on a disk", {"offload": True, "disk": DISK_BUFFERS, "host": 0.0}),
)
_FREE: Means = (NOTHING, (FUSED_LOSS, {"loss": "fused"}), (STEPS, {"in_backward": True}))


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
    """Return plans whose upper bound fits ``usable`` bytes, in descending order of tokens per
    second and GPU. There is one plan of each kind, and no plan that another plan beats. The search
    tries each of the given optimizers and worlds. It uses the function of ``builds`` (one for each
    way to wrap the model into units) whose plan for ``setup`` needs the least memory. It varies
    strategy, the place of states, activations, loss, steps in backward, micro-batch and slots.
    """
    found: list[Suggestion] = []
    wrap = min(builds, key=lambda name: plan(builds[name], setup).upper)
    own = () if wrap == next(iter(builds)) else (OWN_UNITS if wrap == "embeddings" else wrap,)
    for world, name in itertools.product(
        worlds or (setup.world,), optimizers or (setup.optimizer,)
    ):
        hybrid = ["HYBRID_SHARD"] if world > setup.ranks_per_host else []
        names = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *hybrid]
        means = (*own, *([name] if name != setup.optimizer else []))
        for strategy, (label, values) in itertools.product(names, _STATES):
            if not optimizer(name).takes(values):
                continue
            base = replace(setup, world=world, optimizer=name, strategy=strategy, shard=0)
            base = replace(base, **values)  # type: ignore[arg-type]
            found += _largest_batches(builds[wrap], base, card, usable, (*means, label))
    found.sort(key=lambda s: (-s.tokens_per_second, s.plan.upper, len(s.means)))
    shown: dict[object, Suggestion] = {}
    for each in found:
        if not any(other.beats(each) for other in found):
            shown.setdefault(each.kind, each)
    return list(shown.values())[:limit]


def _largest_batches(
    build: Build, setup: Setup, card: Card, usable: int, means: tuple[str, ...]
) -> Iterator[Suggestion]:
    """Yield, for each entry of ``_ACTIVATIONS``, the plan with the largest micro-batch that fits.
    If means of ``_FREE`` let a larger micro-batch fit, also yield the plan with these means.
    Micro-batches are powers of two, at most the number of sequences of a whole step. Plans have one
    gather slot and one reduce slot only if none fits with more slots.
    """
    least = replace(setup, checkpointing=1.0, micro_batch=1, loss="fused")
    one = {"gather_slots": 1, "reduce_slots": 1}
    model = plan(build, least).model
    if plan(build, least).upper > usable:
        setup, means = replace(setup, **one), (*means, ONE_SLOT)  # type: ignore[arg-type]
        if plan(build, replace(least, **one)).upper > usable:  # type: ignore[arg-type]
            return
    given = model.traced and not model.sized  # the inputs fix the micro-batch
    total = 1 if given else setup.micro_batch * setup.accumulation
    whole = total  # if this micro-batch fits, no more means of _FREE are tried
    for label, values in _ACTIVATIONS:
        if model.traced and ("compress" in values or "offload_activations" in values):
            continue  # a traced model cannot be planned with these
        reached = 0
        extra: dict[str, object] = {}
        said: tuple[str, ...] = ()
        for name, free in _FREE:
            if reached >= whole or (model.traced and "loss" in free):
                continue
            extra, said = {**extra, **free}, (*said, name)
            made = _largest(build, replace(setup, **values, **extra), usable, total)
            if made is not None and made.setup.micro_batch > reached:
                reached = made.setup.micro_batch
                chosen = tuple(each for each in (*means, label, *said) if each)
                yield Suggestion(made, cost(made, card), chosen)


def _largest(build: Build, setup: Setup, usable: int, total: int) -> Plan | None:
    """Return the plan with the largest micro-batch that fits, or None. With steps in backward,
    the only micro-batch that is tried is the whole batch.
    """
    best, micro = None, 1
    while micro <= total:
        accumulation = setup.accumulation if total == 1 else -(-total // micro)
        if setup.in_backward and accumulation > 1:
            micro *= 2
            continue
        if setup.in_backward and check(replace(setup, in_backward=False)).replicas > 1:
            return None
        made = plan(build, replace(setup, micro_batch=micro, accumulation=accumulation))
        if made.upper > usable:
            break
        best, micro = made, micro * 2
    return best


def smallest_world(builds: dict[str, Build], setup: Setup, usable: int) -> int | None:
    """Return the smallest number of ranks, a power of two, on which a plan with FULL_SHARD,
    micro-batch 1 and full checkpointing fits. Return None if that plan does not fit on 131,072
    ranks, because the activations or one unit are too large.
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
