"""The arithmetic of five documents about memory, each figure by the planner.

`claimed` is the document's figure, `right` the planner's; where they differ, `why` is what the
document left out or got wrong. GB are 1e9 bytes, as in the documents.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest

from fsdpc.plan.cards import CARDS, GIB
from fsdpc.plan.cost import cost
from fsdpc.plan.engine import engine_memory
from fsdpc.plan.ledger import plan
from fsdpc.plan.model import ZERO, Param, Setup, Unit
from fsdpc.plan.sources import geometry
from fsdpc.plan.sources.geometry import PRESETS, block_saved, logit_bytes, saved_bytes
from fsdpc.plan.states import OPTIMIZERS

GB = 1e9
BF16 = {"compute": "bfloat16", "storage": "bfloat16"}
MIXED = {"compute": "bfloat16"}
MOE = PRESETS["gpt-oss-8e"]
LLAMA70 = PRESETS["llama-3-70b"]
S1 = Setup(world=8, micro_batch=2, sequence=1024, compute="bfloat16", attention="eager")


# The documents' recipes: bytes per parameter of values, gradients and all that the optimizer keeps.
RECIPES = {
    "fp32": (4, 4, 8),  # torch FSDP on fp32 values: 16
    "bf16": (2, 2, 4),  # everything in bf16: 8
    "bf16-fp32-moments": (2, 2, 8),  # 12
    "mixed": (2, 2, 12),  # ZeRO paper: fp32 master and moments: 16
    "bf16-8bit": (2, 2, OPTIMIZERS["adamw8bit"].state_bytes(2)),
}


def state(recipe, numel, world=1, stage=0):
    """Of each rank with a ZeRO stage (Rajbhandari et al. 2020): states are divided from stage 1 on,
    gradients from 2, values from 3.
    """
    parts = reversed(RECIPES[recipe])
    each = sum(b / (world if stage > i else 1) for i, b in enumerate(parts))
    return numel * each / GB


def deepspeed_zero3(numel, largest, gpus, offload="none"):
    """(GPU bytes, host bytes) that DeepSpeed's ZeRO-3 estimator prints for one node."""
    if offload == "all":
        return 4 * largest, numel * 18 * 1.5
    if offload == "optimizer":
        return 4 * largest + 2 * numel / gpus, numel * 16 * 1.5
    return 4 * largest + 18 * numel / gpus, largest * 4 * gpus * 1.5


def deepspeed_zero2(numel, world):
    """GPU bytes that DeepSpeed's ZeRO-2 estimator prints without offload."""
    return 2 * numel + 18 * numel / world


def optimizer(name, numel, item=4, world=1):
    return OPTIMIZERS[name].state_bytes(item) * numel / world / GB


def layer_slots(strategy, prefetch=True):
    """Gathered units at a time, of 32 equal ones."""
    units = (Unit("", 0, ()), *(Unit(f"{i}", 1, (Param("w", 1 << 20),)) for i in range(32)))
    setup = Setup(world=8, strategy=strategy, gather_slots=0 if prefetch else 1)
    made = engine_memory(units, setup)
    return (made.stats["gather_bytes"] - setup.range_grain) / made.stats["gather_slot_bytes"]


def saved(g, setup, ratio=0.0):
    """Activations of all blocks with checkpointing of a part. The block that is computed again
    counts where no block is kept whole.
    """
    c = geometry.item_of(setup)
    whole = block_saved(g, setup) * setup.micro_batch * setup.sequence
    inputs = g.hidden * c * setup.micro_batch * setup.sequence
    kept = round(ratio * g.layers)
    again = whole if kept == g.layers else 0
    return (g.layers - kept) * whole + kept * inputs + again


def freed(ratio):
    g, setup = PRESETS["llama-2-7b"], Setup(compute="bfloat16", sequence=2048)
    return 1 - saved(g, setup, ratio) / saved(g, setup)


def wire_bytes(numel, world, item=2):
    """A rank sends its part of a gathered unit to the others: (n-1)/n of the unit on a ring."""
    return numel * item * (world - 1) / world / GB


def peak(g, wrap="blocks", **options):
    return plan(partial(geometry.build, g, wrap=wrap), Setup(**options)).peak.bytes


def fits(g, card, wrap="blocks", **options):
    made = plan(partial(geometry.build, g, wrap=wrap), Setup(**options))
    return made.upper <= CARDS[card].usable


def tensor_parallel(numel, tensor, pipeline, data, value, grads=2):
    """(values + gradients + ZeRO-1 states) per GPU; states of 12 B are divided by data, too."""
    own = numel / (tensor * pipeline)
    return own * (value + grads + 12 / data) / GB


@dataclasses.dataclass(frozen=True)
class Row:
    id: str
    what: str
    planner: object
    right: float | bool
    claimed: float | str | None = None
    why: str = ""
    rel: float = 0.01


T = [
    Row(
        "T01",
        "A100 has 24 GB",
        lambda: CARDS["a100-80"].usable / GB,
        85,
        24,
        "24 GB is an A10, RTX 3090 or 4090; an A100 has 40 or 80 GB",
        0.01,
    ),
    Row(
        "T01b",
        "an H100's bandwidth is 1.5 TB/s",
        lambda: CARDS["h100"].bandwidth / 1e12,
        3.35,
        1.5,
        "that is an A100-40",
    ),
    Row(
        "T02",
        "Adam on a shard of 5 GB takes 3 GB",
        lambda: optimizer("adamw", 5e9 / 4),
        10,
        3,
        "two fp32 moments are twice the shard",
    ),
    Row(
        "T03",
        "free after gathering 3 x 5 GB more",
        lambda: 24 - (5 + 5 + optimizer("adamw", 5e9 / 4)) - 15,
        -11,
        1,
        "13 + 15 = 28 GB of 24 even by the document's own 3 GB; the real states are 10 GB",
    ),
    Row("T04", "a layer in 4 parts of 5 GB", lambda: wire_bytes(20e9 / 2, 4) + 5, 20, 20),
    Row(
        "T06",
        "Adam for 15 GB of fp32 parameters",
        lambda: optimizer("adamw", 15e9 / 4),
        30,
        10,
        "the total is 65 GB, not 45",
    ),
    Row(
        "T08",
        "checkpointing saves 70 %",
        lambda: freed(1.0),
        0.92,
        0.70,
        "of activations; the recomputed block is included",
        0.02,
    ),
    Row(
        "T08b",
        "checkpointing costs 33 % compute",
        lambda: compute_time(1.0) / compute_time(0.0) - 1,
        1 / 3,
        0.33,
    ),
    Row(
        "T09",
        "bf16 compute halves the parameters at rest",
        lambda: plan(PARTIAL7, Setup(**MIXED)).row("shards")
        / plan(PARTIAL7, Setup()).row("shards"),
        1.0,
        0.5,
        "MixedPrecision casts what is gathered; shards keep fp32",
    ),
    Row(
        "T10",
        "states with 8 instead of 4 GPUs",
        lambda: state("fp32", 1e9, 8, 3) / state("fp32", 1e9, 4, 3),
        0.5,
        0.5,
    ),
    Row("T11", "70 B in fp32", lambda: shards(70e9), 280, 280),
    Row("T11b", "over 4", lambda: shards(70e9, world=4), 70, 70),
    Row("T11c", "in bf16", lambda: shards(70e9, world=4, **BF16), 35, 35),
    Row(
        "T12",
        "largest unit of 70 B, bf16 GB",
        lambda: sum(p.numel for p in LLAMA70.block()) * 2 / GB,
        1.71,
        20,
        "10e9 parameters are 12 blocks, not one",
    ),
    Row(
        "T13",
        "70 B on 4 GPUs, GB each",
        lambda: state("fp32", 70e9, 4, 3),
        280,
        65,
        "gradients and Adam are missing; in bf16 throughout it is 140",
    ),
    Row(
        "T13b",
        "the same, all bf16",
        lambda: state("bf16", 70e9, 4, 3),
        140,
        65,
        "gradients and Adam are missing",
    ),
    Row("T14", "units gathered with prefetch", lambda: layer_slots("FULL_SHARD"), 2, "2-3"),
    Row("T14b", "without prefetch", lambda: layer_slots("FULL_SHARD", False), 1, 1),
    Row(
        "T17",
        "SHARD_GRAD_OP: units gathered at once",
        lambda: layer_slots("SHARD_GRAD_OP"),
        32,
        "replicated",
        "sharded between steps, all gathered from forward to backward",
    ),
    Row(
        "T18",
        "4x larger models on 4 GPUs",
        lambda: state("fp32", 4e9, 4, 3) / state("fp32", 1e9, 1, 0),
        1,
        1,
        "states only",
    ),
    Row(
        "T20",
        "70 B needs 840 GB",
        lambda: state("mixed", 70e9),
        1120,
        840,
        "12 B per parameter leave out the fp32 master",
    ),
    Row("T20b", "by the document's own recipe", lambda: state("bf16-fp32-moments", 70e9), 840, 840),
    Row("T21", "over 8", lambda: state("bf16-fp32-moments", 70e9, 8, 3), 105, 105),
    Row("T21b", "over 16", lambda: state("bf16-fp32-moments", 70e9, 16, 3), 52.5, 52.5),
    Row(
        "T22",
        "70 B on 16 x 80 GB fits comfortably",
        lambda: fits(LLAMA70, "h100", world=16, sequence=4096, **MIXED),
        False,
        True,
        "70 GB of states leave no room for activations",
    ),
    Row(
        "T22b",
        "16 B states over 16, GiB",
        lambda: state("fp32", 70e9, 16, 3) * GB / GIB,
        65.2,
        52.5,
        "16 B per parameter",
    ),
    Row(
        "T23",
        "memory is 1/N of DDP's",
        lambda: peak(PRESETS["llama-3-8b"], world=128, sequence=8192, **MIXED)
        / peak(PRESETS["llama-3-8b"], world=8, sequence=8192, **MIXED),
        67.0 / 82.4,
        1 / 16,
        "states are divided, activations and gathered units are not (measured by torchtitan)",
        0.04,
    ),
    Row(
        "T24",
        "blocks that a rank of 1000 has part of",
        lambda: layer_shards(1000),
        32,
        3.2,
        "each rank has 1/N of every layer",
    ),
    Row("T25", "7 B in fp32 with Adam", lambda: state("fp32", 7e9), 112, 112),
    Row("T26", "7 B in bf16", lambda: shards(7e9, **BF16), 14, 14),
    Row("T26b", "in fp32", lambda: shards(7e9), 28, 28),
    Row("T28", "checkpointing half", lambda: freed(0.5), 0.47, 0.45, "", 0.05),
    Row("T28c", "compute for half", lambda: compute_time(0.5) / compute_time(0.0) - 1, 1 / 6, 0.17),
    Row("T28b", "checkpointing all", lambda: freed(1.0), 0.92, 0.70, "conservative", 0.02),
    Row(
        "T29",
        "INT8 activations, groups of 128",
        lambda: 1 - (1 + 4 / 128) / 2,
        0.484,
        0.5,
        "the scales are not free",
    ),
    Row(
        "T32",
        "AdamW 12 B, Adam-mini 6",
        lambda: OPTIMIZERS["adam-mini"].state_bytes(4),
        4,
        6,
        "one fp32 moment; 8 with an fp32 master",
        0.06,
    ),
    Row(
        "T33",
        "8-bit Adam 8 B",
        lambda: OPTIMIZERS["adamw8bit"].state_bytes(2) + 4,
        6.03,
        8,
        "2.03 B of state and the fp32 master; without a master 2.03",
    ),
    Row("T34", "Lion 8 B", lambda: OPTIMIZERS["lion"].state_bytes(4) + 4, 8, 8),
    Row("T35", "7 B without ZeRO", lambda: state("bf16", 7e9, 8, 0), 56, 56),
    Row("T36", "ZeRO-1", lambda: state("bf16", 7e9, 8, 1), 31.5, 31.5),
    Row(
        "T36b",
        "ZeRO-1, fp32 moments",
        lambda: state("bf16-fp32-moments", 7e9, 8, 1),
        35,
        31.5,
        "fp32 moments",
    ),
    Row("T36c", "ZeRO-1, and a master", lambda: state("mixed", 7e9, 8, 1), 38.5, 31.5),
    Row("T37", "ZeRO-2", lambda: state("bf16", 7e9, 8, 2), 19.25, 19.25),
    Row(
        "T37b",
        "ZeRO-2, and a master",
        lambda: state("mixed", 7e9, 8, 2),
        26.25,
        19.25,
        "and an fp32 master",
    ),
    Row("T38", "ZeRO-3", lambda: state("bf16", 7e9, 8, 3), 7, 7),
    Row("T38b", "ZeRO-3, fp32", lambda: state("fp32", 7e9, 8, 3), 14, 7, "16 B per parameter"),
    *(
        Row(
            f"T39.{s}",
            f"ZeRO paper, 7.5 B on 64, stage {s}",
            partial(state, "mixed", 7.5e9, 64, s),
            right,
            right,
            "",
            0.01,
        )
        for s, right in enumerate((120, 31.4, 16.6, 1.88))
    ),
    Row(
        "T40",
        "DeepSpeed t5-3b ZeRO-3, GiB",
        lambda: deepspeed_zero3(2851e6, 32e6, 8)[0] / GIB,
        6.09,
        6.09,
    ),
    Row(
        "T40b",
        "optimizer on the CPU",
        lambda: deepspeed_zero3(2851e6, 32e6, 8, offload="optimizer")[0] / GIB,
        0.78,
        0.78,
    ),
    Row(
        "T40c",
        "all on the CPU: host GiB",
        lambda: deepspeed_zero3(2851e6, 32e6, 8, offload="all")[1] / GIB,
        71.69,
        71.69,
    ),
    Row(
        "T40d",
        "ZeRO-2",
        lambda: deepspeed_zero2(2851e6, 8) / GIB,
        11.28,
        15.93,
        "the documentation still shows an older formula",
    ),
    Row(
        "M7",
        "DeepSpeed 6805M on 4, ZeRO-3",
        lambda: deepspeed_zero3(6805e6, 131e6, 4)[0] / GIB,
        29.01,
        29.01,
    ),
    Row(
        "T41",
        "states that leave the GPU with offload",
        lambda: plan(PARTIAL7, Setup(offload=True, **MIXED)).host_bytes
        / (16 * PRESETS["llama-2-7b"].numel / 8),
        1.25,
        0.8,
        "all of them (16 B), and 4 B for the update's temporaries; time follows from the link",
    ),
    Row(
        "T42",
        "an 8192 x 8192 fp32 score matrix, MiB",
        lambda: attention_matrix(8192, 1, 4) / 2**20,
        256,
        256,
    ),
    Row("T42b", "32 heads, GiB", lambda: attention_matrix(8192, 32, 4) / GIB, 8, 8),
    Row(
        "T43",
        "flash attention saves 100 MB a layer",
        lambda: attention_saved(PRESETS["llama-2-7b"], Setup(compute="bfloat16", sequence=8192))
        * 8192
        / 1e6,
        269,
        100,
        "q, k, v, the output and a log-sum-exp per head",
    ),
    Row(
        "T43b",
        "with 8 kv heads",
        lambda: attention_saved(PRESETS["llama-3-8b"], Setup(compute="bfloat16", sequence=8192))
        * 8192
        / 1e6,
        169,
        100,
    ),
    Row(
        "T44",
        "7 B on 24 GB in bf16 with 8-bit Adam",
        lambda: state("bf16-8bit", 7e9),
        42.2,
        20,
        "before any activation",
    ),
    Row(
        "T44b",
        "so it does not fit",
        lambda: fits(
            PRESETS["llama-2-7b"],
            "rtx4090",
            world=1,
            strategy="NO_SHARD",
            optimizer="adamw8bit",
            checkpointing=1.0,
            **BF16,
        ),
        False,
        True,
        "42 GB of states",
    ),
    Row(
        "T45",
        "70 B on 8 x 80 GB: states with 16 B",
        lambda: state("fp32", 70e9, 8, 3),
        140,
        60,
        "16 B per parameter",
    ),
    Row("T45b", "all bf16", lambda: state("bf16", 70e9, 8, 3), 70, 60),
    Row("T45c", "bf16 with 8-bit states", lambda: state("bf16-8bit", 70e9, 8, 3), 52.8, 60),
    Row(
        "T45d",
        "fits in fp32 with everything recomputed",
        lambda: fits(
            LLAMA70, "h100", world=8, sequence=4096, checkpointing=1.0, loss="fused", **MIXED
        ),
        False,
        True,
        "140 GB of states",
    ),
    Row(
        "T46b",
        "bf16 values, GB before activations",
        lambda: tensor_parallel(405e9, 8, 4, 4, 2),
        88.6,
        "fits",
        "82.5 GiB of 79.65",
    ),
    Row(
        "T46c",
        "fp8 values",
        lambda: tensor_parallel(405e9, 8, 4, 4, 1),
        76.0,
        "fits",
        "under 9 GiB for everything else",
    ),
    Row("T48b", "part of the card", lambda: 74.7 * GIB / CARDS["h100-nvl"].usable, 0.798, 0.798),
    Row(
        "T49",
        "parameters per GPU, fp32 shards",
        lambda: MOE.numel * 4 / 8 / GB,
        3.29,
        1.64,
        "MixedPrecision keeps fp32 shards",
    ),
    Row("T50", "Adam per GPU", lambda: optimizer("adamw", MOE.numel, 4, 8), 6.57, 6.57),
    Row(
        "T51",
        "states per GPU",
        lambda: state("fp32", MOE.numel, 8, 3),
        13.15,
        9.86,
        "gradients are accumulated in fp32",
    ),
    Row(
        "T52",
        "embedding and head, GB",
        lambda: sum(p.numel for p in MOE.outside()) * 2 / GB,
        2.32,
        0.05,
        "1.16e9 parameters, gathered with the root unit",
    ),
    Row(
        "T53",
        "a block's parameters",
        lambda: sum(p.numel for p in MOE.block()) / 1e6,
        225.7,
        274,
        "the document divides embedding and head among the blocks",
    ),
    Row(
        "T54",
        "hidden states, one copy per layer",
        lambda: 2 * 1024 * 2880 * 2 * 24 / GB,
        0.283,
        0.28,
    ),
    Row(
        "T55",
        "MoE intermediates, top-4",
        lambda: experts(MOE) * 24 / GB,
        10.2,
        0.57,
        "nine tensors per token and expert",
    ),
    Row(
        "T55b",
        "all 8 experts dense",
        lambda: experts(dataclasses.replace(MOE, dense_experts=True)) * 24 / GB,
        20.4,
        0.57,
    ),
    Row(
        "T56",
        "attention probabilities, 24 layers",
        lambda: (
            attention_saved(MOE, S1)
            - attention_saved(MOE, dataclasses.replace(S1, attention="flash"))
            + 4 * MOE.heads
        )
        * 2048
        * 24
        / GB,
        6.44,
        6.44,
    ),
    Row(
        "T58",
        "two gathered blocks",
        lambda: 2 * sum(p.numel for p in MOE.block()) * 2 / GB,
        0.90,
        "1-2",
    ),
    Row(
        "T59",
        "activations that accumulation adds",
        lambda: activations(accumulation=32) - activations(),
        0,
        5,
        "each micro-batch frees its own",
    ),
    Row(
        "T59b",
        "gradients that no_sync keeps",
        lambda: plan(
            partial(geometry.build, MOE), dataclasses.replace(S1, accumulation=32, sync="last")
        ).row("no_sync gradients")
        / GB,
        26.30,
        0,
        "whole, fp32, on every rank",
    ),
    Row("T61b", "one GPU, 16 B", lambda: state("fp32", MOE.numel), 105.2, 86.4, "fp32 values"),
    Row(
        "T62",
        "flash saves",
        lambda: (
            attention_saved(MOE, S1)
            - attention_saved(MOE, dataclasses.replace(S1, attention="flash"))
        )
        * 2048
        * 24
        / GB,
        6.43,
        6.34,
    ),
    Row("T65", "without FSDP, 12 B", lambda: state("bf16-fp32-moments", MOE.numel), 78.9, 78.84),
]


def PARTIAL7(setup):
    return geometry.build(PRESETS["llama-2-7b"], setup)


def shards(numel, world=1, **more):
    units = (Unit("", 0, (Param("w", int(numel)),)),)
    return engine_memory(units, Setup(world=world, **more)).stats["master_bytes"] / GB


def compute_time(ratio):
    made = plan(PARTIAL7, Setup(checkpointing=ratio, **MIXED))
    return cost(made, CARDS["h100"]).compute


def layer_shards(world):
    units = tuple(Unit(f"{i}", 0, (Param("w", 8_000_000),)) for i in range(32))
    prints = engine_memory(units, Setup(world=world)).by_unit
    return sum(p["master_bytes"] > 0 for p in prints)


def attention_matrix(sequence, heads, item):
    g = dataclasses.replace(PRESETS["llama-2-7b"], heads=heads, kv_heads=heads)
    dtype = {"compute": "bfloat16" if item == 2 else "float32", "sequence": sequence}
    eager, flash = (attention_saved(g, Setup(attention=a, **dtype)) for a in ("eager", "flash"))
    return (eager - flash + 4 * heads) * sequence


def attention_saved(g, setup):
    return saved_bytes(geometry.attention_tensors(g, setup), setup)


def experts(g):
    return (saved_bytes(geometry.mlp_tensors(g, S1), S1) - 4 * g.experts) * 2048


def activations(**more):
    made = plan(partial(geometry.build, MOE), dataclasses.replace(S1, **more))
    return max(p.roles.get("activations", 0) for p in made.timeline)


@pytest.mark.parametrize("row", T, ids=lambda row: row.id)
def test_the_planner_gives_the_right_figure(row):
    found = row.planner()
    if isinstance(row.right, bool):
        assert found is row.right
        return
    assert found == pytest.approx(row.right, rel=row.rel, abs=1e-9), row.what


def test_rows_where_the_document_is_wrong_say_so():
    """A claim that is more than 6 % off has a reason, its own or its first row's."""
    reasons = {row.id[:3] for row in T if row.why}
    for row in T:
        if isinstance(row.claimed, float | int) and not isinstance(row.right, bool):
            if not math.isclose(row.right, row.claimed, rel_tol=0.06, abs_tol=1e-9):
                assert row.id[:3] in reasons, row.id


def test_the_6_57_b_mixture_of_experts_reaches_74_7_gib():
    """The document's 50-60 GB of fragmentation are not needed: dense experts, eager attention and
    whole fp32 gradients of no_sync make 74.7 GiB of 93.6 within 2 %, in torch's FSDP, which has
    neither reduce slots nor, before the last micro-batch, gradient shards.
    """
    g = dataclasses.replace(MOE, dense_experts=True)
    made = plan(partial(geometry.build, g), dataclasses.replace(S1, accumulation=32, sync="last"))
    others = made.row("reduce slots") + made.row("gradient shards")
    assert (made.peak.bytes - others) / GIB == pytest.approx(74.7, rel=0.02)
    assert made.row("no_sync gradients") / GB == pytest.approx(26.3, rel=0.01)
    every = plan(partial(geometry.build, g), dataclasses.replace(S1, accumulation=32))
    assert (made.peak.bytes - every.peak.bytes) / GB > 20, "syncing each time is the first cure"


def test_zero_stages_are_strategies():
    assert [ZERO[stage][0] for stage in (1, 2, 3)] == [
        "SHARD_GRAD_OP",
        "SHARD_GRAD_OP",
        "FULL_SHARD",
    ]


def test_published_drop_from_8_to_128_gpus():
    """torchtitan, Llama-3.1-8B: 82.4 GiB on 8 GPUs, 67.0 on 128. States explain 14.0 of 15.4."""
    at = {w: peak(PRESETS["llama-3-8b"], world=w, sequence=8192, **MIXED) for w in (8, 128)}
    assert (at[8] - at[128]) / GIB == pytest.approx(14.0, rel=0.05)


@pytest.mark.parametrize(
    ("optimizer_name", "gib"), [("adamw", 51.6), ("adamw8bit", 39.3), ("adamw4bit", 33.2)]
)
def test_published_state_figures(optimizer_name, gib):
    """torchao, Llama-2-7B in bf16 on one GPU: values, gradients, states and 1.4 GiB."""
    numel = PRESETS["llama-2-7b"].numel
    total = numel * (4 + OPTIMIZERS[optimizer_name].state_bytes(2)) / GIB + 1.4
    assert total == pytest.approx(gib, abs=0.2)


def test_logits_of_an_unfused_loss():
    """TRL 6858: 16,384 x 248,320 logits in bf16, 47.55 GB unfused."""
    setup = Setup(compute="bfloat16")
    assert 16384 * 248320 * logit_bytes(setup) / GB == pytest.approx(47.55, rel=0.2)
