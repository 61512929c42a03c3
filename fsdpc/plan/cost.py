"""An estimate of a step's time, from stated assumptions: it can rank plans, but not promise times.

Compute: the FLOPs of the model and of recomputation, at the fraction of the card's peak that
published runs of FSDP reached (``Rate``). Wire: rings in the alpha-beta model, in which a
collective over n ranks sends (n-1)/n of its bytes from each rank, and takes one latency per step of
the ring. Over several hosts, the slower of two limits counts: the links inside a host, or the
network, where each rank has its own interface. Gathers and sums overlap with compute, except for
the first gather and the last sum. Packing of activations (``--compress``) adds time to compute:
activations are packed in forward and unpacked in backward. Packing is estimated to move the plain
and the packed bytes at the rate of the card's memory (``Card.bandwidth``), and so is unpacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdpc.plan.cards import Card
from fsdpc.plan.ledger import Plan
from fsdpc.plan.model import ITEM_BYTES, Setup
from fsdpc.plan.schedule import schedule

LINK_EFFICIENCY = 0.8
LATENCY_LINK = 2e-6  # seconds per ring step inside a host


@dataclass(frozen=True)
class Rate:
    """The fraction of a card's peak FLOPs that runs reach: ``most * w / (w + work) * h / (h +
    width) / (1 + length * s)``. Here w is the number of activation elements of a micro-batch in
    millions, h is the width of the activations, and s is the length of a sequence. The published
    rates are between ``low`` and ``high`` times this fraction.
    """

    most: float
    work: float
    width: float
    length: float
    low: float
    high: float
    runs: str

    def at(self, tokens: int, width: float, sequence: int) -> float:
        w = tokens * width / 1e6
        share = w / (w + self.work) * width / (width + self.width)
        return self.most * share / (1 + self.length * sequence)


# Fitted to the table of MosaicML's llm-foundry (scripts/train/benchmarking, commit 061f2c7: MPT
# models of 125 M to 70 B, bf16, FULL_SHARD on 8 to 64 GPUs); a test repeats the comparison.
RATES = {
    "h100": Rate(0.7507, 10, 1200, 3e-5, 0.83, 1.12, "34 published FSDP runs on H100"),
    "a100": Rate(0.9347, 8, 750, 3e-5, 0.80, 1.13, "29 published FSDP runs on A100"),
}
# For a card without published runs, ``low`` and ``high`` are multiplied by these assumed factors.
OTHER = (0.75, 1.2)


def rate_of(card: Card) -> Rate:
    """Return the rate of the card, or the rate of the card in ``like`` with a wider interval."""
    rate = RATES[card.like]
    if card.name.startswith(card.like):
        return rate
    low, high = rate.low * OTHER[0], rate.high * OTHER[1]
    return replace(rate, low=low, high=high, runs=f"{rate.runs}, none on {card.name}")


def assumed(card: Card) -> str:
    """Return a sentence about the assumptions behind step times."""
    return (
        f"step time: FLOPs as in {rate_of(card).runs}, {LINK_EFFICIENCY:.0%} of link bandwidth, "
        f"{LATENCY_LINK * 1e6:.0f} and {card.latency * 1e6:.0f} us per ring step inside and "
        "between hosts"
    )


@dataclass(frozen=True)
class Cost:
    """Seconds of one optimizer step (all its micro-batches), and bytes sent by each rank."""

    compute: float
    wire: float
    exposed: float
    update: float
    sent_bytes: float
    packing: float = 0.0
    efficiency: float = 0.0  # fraction of the card's peak FLOPs that compute reaches
    least: float = 1.0  # ``least * compute``: seconds at the fastest published rate
    most: float = 1.0  # ``most * compute``: seconds at the slowest published rate

    @property
    def step(self) -> float:
        return self._step(1.0)

    @property
    def between(self) -> tuple[float, float]:
        """Seconds of a step at the fastest and the slowest published rates."""
        return self._step(self.least), self._step(self.most)

    def _step(self, factor: float) -> float:
        busy = max(self.compute * factor + self.packing, self.wire)
        return busy + self.exposed + self.update

    def tokens_per_second(self, plan: Plan) -> float:
        """Tokens per second of one GPU."""
        setup = plan.setup
        tokens = plan.model.tokens * setup.accumulation
        return tokens / self.step / (setup.tensor * setup.pipeline)


def collective_seconds(size: float, ranks: int, setup: Setup, card: Card, stride: int = 1) -> float:
    """Return the seconds of an all-gather or reduce-scatter of ``size`` bytes over ``ranks`` ranks,
    whose numbers are ``stride`` apart. For the replicas of one shard, ``stride`` is the size of a
    shard group, so replicas may be on different hosts.
    """
    if ranks == 1:
        return 0.0
    here = max(setup.ranks_per_host // setup.tensor // stride, 1)
    hosts = -(-ranks // here)
    inside = size * (ranks - 1) / ranks / (card.link * LINK_EFFICIENCY)
    if hosts == 1:
        return inside + (ranks - 1) * LATENCY_LINK
    # A host receives other hosts' bytes over as many interfaces as it has ranks in the group.
    lanes = min(here, ranks)
    outside = size * (hosts - 1) / hosts / (lanes * card.network * card.reached)
    latency = (ranks - hosts) * LATENCY_LINK + (hosts - 1) * card.latency
    return max(inside, outside) + latency


def cost(plan: Plan, card: Card) -> Cost:
    """Return the cost of a plan's step on a card; ``compute`` is 0 if the model has no FLOPs."""
    setup, prints, model = plan.setup, plan.engine.by_unit, plan.model
    again = setup.checkpointing if setup.recomputed is None else setup.recomputed
    rate, n = rate_of(card), setup.shards
    part = rate.at(model.tokens, model.width, min(setup.sequence, model.tokens or 1)) or rate.most
    flops = model.flops + again * (model.forward or model.flops / 3)
    compute = setup.accumulation * flops / (card.flops * part)
    compute *= 1 + (setup.pipeline - 1) / setup.accumulation  # the pipeline's idle time
    if plan.model.away is not None:  # copies overlap with forward and with backward
        bus = setup.accumulation * plan.model.away.copied / card.host
        compute = max(compute / 3, bus) + max(2 * compute / 3, bus)
    sums = setup.accumulation if setup.sync == "every" else 1
    wire = sent = first = 0.0
    for event in schedule(plan.model.units, plan.engine, setup):
        times = setup.accumulation if event.op == "gather" else sums
        wire += times * collective_seconds(event.bytes, n, setup, card) if event.bytes else 0.0
        sent += times * event.bytes * (n - 1) / n
    for size in prints:
        one = collective_seconds(size["gathered_bytes"], n, setup, card)
        first = max(first, one + collective_seconds(size["reduced_bytes"], n, setup, card))
        if setup.replicas > 1:
            one = collective_seconds(size["grad_bytes"], setup.replicas, setup, card, n)
            wire += sums * 2 * one
            sent += sums * 2 * size["grad_bytes"] * (setup.replicas - 1) / setup.replicas
    moved = plan.engine.stats["master_bytes"] + plan.engine.stats["grad_bytes"]
    states = plan.row("optimizer states")
    update = (2 * moved + 2 * states) / (
        40e9 / setup.ranks_per_host if setup.offloads else card.bandwidth
    )
    if setup.host and not setup.offloads and setup.transport == "stream":
        away = sum(r.bytes for r in plan.rows if (r.role, r.where) == ("optimizer states", "host"))
        update = max(update, away / card.host)  # copies to the host overlap with copies from it
    if setup.offloads:
        wire = max(wire, setup.accumulation * 3 * moved / card.host)
    packing = setup.accumulation * 2 * plan.model.packing / card.bandwidth
    first += setup.accumulation * _tensor_seconds(plan, card)
    return Cost(compute, wire, first, update, sent, packing, part, 1 / rate.high, 1 / rate.low)


def _tensor_seconds(plan: Plan, card: Card) -> float:
    """Return the seconds of tensor parallelism: four all-reduces per block, not overlapped."""
    setup, model = plan.setup, plan.model
    if setup.tensor == 1:
        return 0.0
    size = model.tokens * model.width * ITEM_BYTES[setup.compute or setup.storage]
    inside = replace(setup, ranks_per_host=max(setup.ranks_per_host, setup.tensor), tensor=1)
    return model.blocks * 4 * 2 * collective_seconds(size, setup.tensor, inside, card)


def scaling(plan_at: Sequence[Plan], card: Card) -> list[dict[str, float]]:
    """Return a row for each world: bytes, padding, collectives, seconds, and the fraction of a step
    that is compute.
    """
    rows = []
    for plan in plan_at:
        found, setup = cost(plan, card), plan.setup
        events = schedule(plan.model.units, plan.engine, setup)
        calls = sum(e.bytes > 0 for e in events)
        if setup.replicas > 1:
            calls += sum(e.op == "reduce" for e in events)
        rows.append(
            {
                "world": setup.world,
                "peak_bytes": plan.peak.bytes,
                "padding_bytes": sum(p["padding_bytes"] for p in plan.engine.by_unit),
                "collectives": calls * setup.accumulation,
                "sent_bytes": found.sent_bytes,
                "compute_s": found.compute,
                "wire_s": found.wire,
                "step_s": found.step,
                "tokens_per_second": found.tokens_per_second(plan),
                "efficiency": found.compute / found.step if found.step else 0.0,
            }
        )
    return rows


def stops_scaling(rows: Sequence[dict[str, float]]) -> float | None:
    """Return the first world in which less than half of a step is compute, or None if there is no
    such world. ``rows`` are the rows of ``scaling`` for one strategy, in the order of worlds.
    """
    return next((row["world"] for row in rows if row["efficiency"] < 0.5), None)
