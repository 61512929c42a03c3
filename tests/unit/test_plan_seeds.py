"""Tests of figures about memory from five documents against the planner's. GB are 1e9 bytes, as in
the documents.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from fsdpc.plan.cards import CARDS, GIB
from fsdpc.plan.cost import cost
from fsdpc.plan.engine import engine_memory
from fsdpc.plan.ledger import plan
from fsdpc.plan.model import Param, Setup, Unit
from fsdpc.plan.sources import geometry
from fsdpc.plan.sources.geometry import PRESETS, block_saved, logit_bytes, saved_bytes
from fsdpc.plan.states import OPTIMIZERS

GB = 1e9
BF16 = {"compute": "bfloat16", "storage": "bfloat16"}
MIXED = {"compute": "bfloat16"}
MOE = PRESETS["gpt-oss-8e"]
LLAMA7, LLAMA8, LLAMA70 = (PRESETS[f"llama-{name}"] for name in ("2-7b", "3-8b", "3-70b"))
S1 = Setup(world=8, micro_batch=2, sequence=1024, compute="bfloat16", attention="eager")
LONG = Setup(compute="bfloat16", sequence=8192)


def planned(g, setup):
    return plan(partial(geometry.build, g), setup)


def optimizer(name, numel, item=4, world=1):
    return OPTIMIZERS[name].state_bytes(item) * numel / world / GB


def layer_slots(strategy, prefetch=True):
    """Return how many of 32 equal units are gathered at a time."""
    units = (Unit("", 0, ()), *(Unit(f"{i}", 1, (Param("w", 1 << 20),)) for i in range(32)))
    setup = Setup(world=8, strategy=strategy, gather_slots=0 if prefetch else 1)
    made = engine_memory(units, setup)
    return (made.stats["gather_bytes"] - setup.range_grain) / made.stats["gather_slot_bytes"]


def saved(g, setup, ratio=0.0):
    """Return the activations of all blocks if the share ``ratio`` of the blocks is checkpointed.
    The block that is computed again counts only if no block is kept whole.
    """
    c = geometry.item_of(setup)
    whole = block_saved(g, setup) * setup.micro_batch * setup.sequence
    inputs = g.hidden * c * setup.micro_batch * setup.sequence
    kept = round(ratio * g.layers)
    again = whole if kept == g.layers else 0
    return (g.layers - kept) * whole + kept * inputs + again


def freed(ratio):
    setup = Setup(compute="bfloat16", sequence=2048)
    return 1 - saved(LLAMA7, setup, ratio) / saved(LLAMA7, setup)


def peak(g, **options):
    return planned(g, Setup(**options)).peak.bytes


def fits(g, card, **options):
    return planned(g, Setup(**options)).upper <= CARDS[card].usable


def shards(numel, world=1, **more):
    units = (Unit("", 0, (Param("w", int(numel)),)),)
    return engine_memory(units, Setup(world=world, **more)).stats["master_bytes"] / GB


def compute_time(ratio):
    return cost(planned(LLAMA7, Setup(checkpointing=ratio, **MIXED)), CARDS["h100"]).compute


def layer_shards(world):
    units = tuple(Unit(f"{i}", 0, (Param("w", 8_000_000),)) for i in range(32))
    prints = engine_memory(units, Setup(world=world)).by_unit
    return sum(p["master_bytes"] > 0 for p in prints)


def attention_saved(g, setup):
    return saved_bytes(geometry.attention_tensors(g, setup), setup)


def flash_saves(g, setup):
    eager = replace(setup, attention="eager")
    return attention_saved(g, eager) - attention_saved(g, replace(setup, attention="flash"))


def attention_matrix(sequence, heads):
    g = replace(LLAMA7, heads=heads, kv_heads=heads)
    return (flash_saves(g, Setup(compute="float32", sequence=sequence)) + 4 * heads) * sequence


def experts(g):
    return (saved_bytes(geometry.mlp_tensors(g, S1), S1) - 4 * g.experts) * 2048


def activations(**more):
    return max(p.roles.get("activations", 0) for p in planned(MOE, replace(S1, **more)).timeline)


def gigabytes(params):
    return sum(p.numel for p in params) * 2 / GB


def offloaded(g):
    return planned(g, Setup(offload=True, **MIXED)).host_bytes / (16 * g.numel / 8)


# Columns: number, what a document says, the planner's figure, the right figure, and optionally the
# relative tolerance, which is 0.01 by default.
ROWS = [
    ("T01", "an A100", lambda: CARDS["a100-80"].usable / GB, 85),
    ("T01b", "an H100's bandwidth", lambda: CARDS["h100"].bandwidth / 1e12, 3.35),
    ("T02", "Adam on a shard of 5 GB", lambda: optimizer("adamw", 5e9 / 4), 10),
    ("T08", "checkpointing frees activations", lambda: freed(1.0), 0.92, 0.02),
    ("T08b", "and costs compute", lambda: compute_time(1.0) / compute_time(0.0) - 1, 1 / 3),
    ("T09", "bf16 compute leaves shards as they are", lambda: (
        planned(LLAMA7, Setup(**MIXED)).row("shards") / planned(LLAMA7, Setup()).row("shards")), 1),
    ("T11", "70 B in fp32", lambda: shards(70e9), 280),
    ("T11b", "over 4", lambda: shards(70e9, world=4), 70),
    ("T11c", "in bf16", lambda: shards(70e9, world=4, **BF16), 35),
    ("T12", "the largest unit of 70 B in bf16", lambda: gigabytes(LLAMA70.block()), 1.71),
    ("T14", "units gathered with prefetch", lambda: layer_slots("FULL_SHARD"), 2),
    ("T14b", "without", lambda: layer_slots("FULL_SHARD", False), 1),
    ("T17", "of SHARD_GRAD_OP", lambda: layer_slots("SHARD_GRAD_OP"), 32),
    ("T22", "70 B fits 16 cards", lambda: fits(
        LLAMA70, "h100", world=16, sequence=4096, **MIXED), False),
    ("T23", "128 GPUs for 8, as torchtitan measured", lambda: (
        peak(LLAMA8, world=128, sequence=8192, **MIXED)
        / peak(LLAMA8, world=8, sequence=8192, **MIXED)), 67.0 / 82.4, 0.04),
    ("T24", "blocks that a rank of 1000 has part of", lambda: layer_shards(1000), 32),
    ("T28", "checkpointing half", lambda: freed(0.5), 0.47, 0.05),
    ("T28c", "its compute", lambda: compute_time(0.5) / compute_time(0.0) - 1, 1 / 6),
    ("T32", "Adam-mini", lambda: OPTIMIZERS["adam-mini"].state_bytes(4), 4, 0.06),
    ("T33", "8-bit Adam", lambda: OPTIMIZERS["adamw8bit"].state_bytes(2), 2.03),
    ("T34", "Lion", lambda: OPTIMIZERS["lion"].state_bytes(4), 4),
    ("T41", "states in host memory, and 4 B for the update", lambda: offloaded(LLAMA7), 1.25),
    ("T42", "an 8192 x 8192 fp32 score matrix", lambda: attention_matrix(8192, 1) / GIB, 0.25),
    ("T42b", "32 heads", lambda: attention_matrix(8192, 32) / GIB, 8),
    ("T43", "flash attention saves MB", lambda: attention_saved(LLAMA7, LONG) * 8192 / 1e6, 269),
    ("T43b", "with 8 kv heads", lambda: attention_saved(LLAMA8, LONG) * 8192 / 1e6, 169),
    ("T44b", "7 B in bf16 with 8-bit Adam fits 24 GB", lambda: fits(
        LLAMA7, "rtx4090", world=1, strategy="NO_SHARD", optimizer="adamw8bit", checkpointing=1.0,
        **BF16), False),
    ("T45d", "70 B in fp32, all computed again, fits 8 cards", lambda: fits(
        LLAMA70, "h100", world=8, sequence=4096, checkpointing=1.0, loss="fused", **MIXED), False),
    ("T48b", "part of the card", lambda: 74.7 * GIB / CARDS["h100-nvl"].usable, 0.798),
    ("T49", "parameters per GPU in fp32 shards", lambda: MOE.numel * 4 / 8 / GB, 3.29),
    ("T50", "Adam per GPU", lambda: optimizer("adamw", MOE.numel, 4, 8), 6.57),
    ("T52", "embedding and head", lambda: gigabytes(MOE.outside()), 2.32),
    ("T53", "a block", lambda: gigabytes(MOE.block()), 0.4514),
    ("T55", "top-4 of experts", lambda: experts(MOE) * 24 / GB, 10.2),
    ("T55b", "all 8", lambda: experts(replace(MOE, dense_experts=True)) * 24 / GB, 20.4),
    ("T59", "activations that accumulation adds", lambda: (
        activations(accumulation=32) - activations()), 0),
    ("T59b", "gradients that no_sync keeps", lambda: planned(
        MOE, replace(S1, accumulation=32, sync="last")).row("no_sync gradients") / GB, 26.30),
    ("T62", "flash saves", lambda: flash_saves(MOE, S1) * 2048 * 24 / GB, 6.43),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_planner_gives_the_right_figure(row):
    _, what, planner, right, near = (*row, 0.01)[:5]
    assert planner() == pytest.approx(right, rel=near, abs=1e-9), what


def test_the_6_57_b_mixture_of_experts_reaches_74_7_gib():
    """A run with torch's FSDP is reported to take 74.7 of the card's 93.6 GiB. Dense experts, eager
    attention and the whole fp32 gradients of no_sync explain this figure within 2 %, without the
    document's 50-60 GB of fragmentation. torch's FSDP has no reduce slots. Before the last
    micro-batch, torch's FSDP has no gradient shards.
    """
    g = replace(MOE, dense_experts=True)
    made = planned(g, replace(S1, accumulation=32, sync="last"))
    others = made.row("reduce slots") + made.row("gradient shards")
    assert (made.peak.bytes - others) / GIB == pytest.approx(74.7, rel=0.02)
    every = planned(g, replace(S1, accumulation=32))
    assert (made.peak.bytes - every.peak.bytes) / GB > 20, "syncing each time is the first cure"


def test_published_drop_from_8_to_128_gpus():
    """torchtitan published 82.4 GiB on 8 GPUs and 67.0 GiB on 128 for Llama-3.1-8B. States explain
    14.0 GiB of the difference of 15.4 GiB.
    """
    at = {w: peak(LLAMA8, world=w, sequence=8192, **MIXED) for w in (8, 128)}
    assert (at[8] - at[128]) / GIB == pytest.approx(14.0, rel=0.05)


@pytest.mark.parametrize(
    ("name", "gib"), [("adamw", 51.6), ("adamw8bit", 39.3), ("adamw4bit", 33.2)]
)
def test_published_state_figures(name, gib):
    """torchao published these figures for Llama-2-7B in bf16 on one GPU. They consist of values,
    gradients, states and 1.4 GiB.
    """
    total = LLAMA7.numel * (4 + OPTIMIZERS[name].state_bytes(2)) / GIB + 1.4
    assert total == pytest.approx(gib, abs=0.2)


def test_logits_of_an_unfused_loss():
    """TRL 6858 reports 47.55 GB for 16,384 x 248,320 logits in bf16 with an unfused loss."""
    setup = Setup(compute="bfloat16")
    assert 16384 * 248320 * logit_bytes(setup) / GB == pytest.approx(47.55, rel=0.2)
