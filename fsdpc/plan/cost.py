"""How long a step takes, by a model with stated inputs: enough to rank plans, not to promise times.

Compute: model FLOPs, plus those of recomputation, at the part of the card's peak that published
runs of FSDP reached (``Rate``). Wire: rings (the alpha-beta model): a collective over n ranks sends
(n-1)/n of its bytes from each rank, and takes a latency per step of the ring; over several hosts
the slower of the links inside a host and of the network binds, and each rank has a network
interface of its own. Gathers and sums overlap with compute except for the first gather and the last
sum. Packing of activations (``--compress``) adds to compute: one pass in forward and one in
backward, each over the plain and the packed form, at the card's memory rate (``Card.bandwidth``);
an estimate.
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
    """Share of a card's peak FLOPs that runs reach: ``most * w / (w + work) * h / (h + width) /
    (1 + length * s)``, w: a micro-batch's activation elements in millions, h: their width, s: the
    sequence's length. ``low``, ``high``: the range of published rates, as factors of this.
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
# models of 125 M to 70 B, bf16, FULL_SHARD on 8 to 64 GPUs); the test repeats the comparison.
RATES = {
    "h100": Rate(0.7507, 10, 1200, 3e-5, 0.83, 1.12, "34 published FSDP runs on H100"),
    "a100": Rate(0.9347, 8, 750, 3e-5, 0.80, 1.13, "29 published FSDP runs on A100"),
}
OTHER = (0.75, 1.2)  # times low and high, for a card of no run; assumed


def rate_of(card: Card) -> Rate:
    """The card's own rate, or that of the card it is like, with a wider interval."""
    rate = RATES[card.like]
    if card.name.startswith(card.like):
        return rate
    low, high = rate.low * OTHER[0], rate.high * OTHER[1]
    return replace(rate, low=low, high=high, runs=f"{rate.runs}, none on {card.name}")


def assumed(card: Card) -> str:
    """A sentence on what step times rest on."""
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
    efficiency: float = 0.0  # part of the card's peak FLOPs while it computes
    least: float = 1.0  # factor of compute at the fastest published rate
    most: float = 1.0  # factor of compute at the slowest rate

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
    """Seconds of an all-gather or reduce-scatter of ``size`` bytes over ``ranks``, whose
    numbers are ``stride`` apart. Replicas of one shard are a shard group's size apart, hence on
    different hosts.
    """
    if ranks == 1:
        return 0.0
    here = max(setup.ranks_per_host // setup.tensor // stride, 1)
    hosts = -(-ranks // here)
    inside = size * (ranks - 1) / ranks / (card.link * LINK_EFFICIENCY)
    if hosts == 1:
        return inside + (ranks - 1) * LATENCY_LINK
    # A host takes in what others have, over as many interfaces as it has ranks of this group.
    lanes = min(here, ranks)
    outside = size * (hosts - 1) / hosts / (lanes * card.network * card.reached)
    latency = (ranks - hosts) * LATENCY_LINK + (hosts - 1) * card.latency
    return max(inside, outside) + latency


def cost(plan: Plan, card: Card) -> Cost:
    """What a plan's step costs on a card. ``plan.model.flops`` must be > 0 for compute."""
    setup, prints, model = plan.setup, plan.engine.by_unit, plan.model
    again = setup.checkpointing if setup.recomputed is None else setup.recomputed
    rate, n = rate_of(card), setup.shards
    part = rate.at(model.tokens, model.width, min(setup.sequence, model.tokens or 1)) or rate.most
    flops = model.flops + again * (model.forward or model.flops / 3)
    compute = setup.accumulation * flops / (card.flops * part)
    compute *= 1 + (setup.pipeline - 1) / setup.accumulation  # the pipeline's bubble
    if plan.model.away is not None:  # copies go on beside the forward (a third) and the backward
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
        update = max(update, away / card.host)  # one way: the two overlap
    if setup.offloads:
        wire = max(wire, setup.accumulation * 3 * moved / card.host)
    packing = setup.accumulation * 2 * plan.model.packing / card.bandwidth
    first += setup.accumulation * _tensor_seconds(plan, card)
    return Cost(compute, wire, first, update, sent, packing, part, 1 / rate.high, 1 / rate.low)


def _tensor_seconds(plan: Plan, card: Card) -> float:
    """Seconds of tensor parallelism: four all-reduces per block, which nothing hides."""
    setup, model = plan.setup, plan.model
    if setup.tensor == 1:
        return 0.0
    size = model.tokens * model.width * ITEM_BYTES[setup.compute or setup.storage]
    inside = replace(setup, ranks_per_host=max(setup.ranks_per_host, setup.tensor), tensor=1)
    return model.blocks * 4 * 2 * collective_seconds(size, setup.tensor, inside, card)


def scaling(plan_at: Sequence[Plan], card: Card) -> list[dict[str, float]]:
    """Rows over worlds: bytes, padding, collectives, seconds and the share of a step in compute."""
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
    """The first world in which ranks spend less than half of a step in compute, ``None``: in none.
    ``rows`` are those of ``scaling`` for one strategy, in the order of their worlds.
    """
    return next((row["world"] for row in rows if row["efficiency"] < 0.5), None)
