"""Tests that compare the simulator's schedule with two records of real steps: the engine's trace,
and the collectives that torch runs.
"""

from __future__ import annotations

from itertools import product

import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from toys import Block, loss_of, tokens, toy, wrap_blocks

from fsdpc._comm.collectives import Collectives
from fsdpc.plan.engine import engine_memory
from fsdpc.plan.model import CPU, Setup, check
from fsdpc.plan.schedule import schedule
from fsdpc.plan.sources.modules import units_of_tree

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PRECISIONS = {"fp32": None, "bf16": LOW}


def nested():
    model = toy(blocks=4)
    model.blocks = nn.ModuleList(
        nn.Sequential(*pair) for pair in (model.blocks[:2], model.blocks[2:])
    )
    return model


def trained(strategy, precision, build):
    kind = (Block, nn.Sequential) if build is nested else Block
    return wrap_blocks(
        "fsdpc",
        build(),
        kind,
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=PRECISIONS[precision],
        use_orig_params=True,
    )


def planned(model, strategy, precision, world, **more):
    low = precision == "bf16"
    setup = check(
        Setup(
            world=world,
            strategy=strategy,
            compute="bfloat16" if low else None,
            reduce="float32" if low else None,
            **{**CPU, **more},
        )
    )
    units = units_of_tree(model._tree)
    return schedule(units, engine_memory(units, setup), setup)


@ranks(1, 2, 3, 4)
def test_order_and_sums_equal_the_trace(rank, world):
    for strategy, precision, build in product(STRATEGIES, PRECISIONS, (toy, nested)):
        model = trained(strategy, precision, build)
        for step in range(2):
            loss_of(model, tokens(rank, step)).backward()
        expected = planned(model, strategy, precision, world)
        for step in range(2):
            trace = [e for e in model._tree.trace() if e["step"] == step]
            # Ranks that share memory sum a unit as soon as all ranks have packed it, so the order
            # of sums may differ. Each rank packs units in order.
            packs = "pack" if any(e["op"] == "pack" for e in trace) else "reduce"
            ran = [
                (e["phase"], e["op"].replace(packs, "reduce"), e["unit"])
                for e in trace
                if e["op"] in ("gather", "release", packs)
            ]
            assert ran == [(e.phase, e.op, e.unit) for e in expected]
            sums = sorted((e["unit"], e["bytes"]) for e in trace if e["op"] == "reduce")
            if packs == "pack":
                assert sums == sorted((e.unit, e.bytes) for e in expected if e.op == "reduce")
            else:
                assert not any(e.bytes for e in expected)


@ranks(2, 3, env={"FSDPC_COLLECTIVES": "c10d", "FSDPC_TRUST_ORDER": "1"})
def test_calls_and_bytes_equal_torchs_collectives(rank, world):
    calls = record_collectives()
    for strategy, precision, build in product(STRATEGIES[:2], PRECISIONS, (toy, nested)):
        model = trained(strategy, precision, build)
        loss_of(model, tokens(rank, 0)).backward()
        calls.clear()
        loss_of(model, tokens(rank, 1)).backward()
        # With blocking collectives there are only two gather slots.
        events = planned(model, strategy, precision, world, transport="wire", gather_slots=2)
        assert calls == [(e.op, e.bytes) for e in events if e.bytes], f"{calls} {events}"


def record_collectives():
    """Return a list. From now on, each gather and each reduction that runs over torch appends its
    name and its bytes to the list.
    """
    calls = []
    for name, op in (("all_gather", "gather"), ("reduce_scatter", "reduce")):
        original = getattr(Collectives, name)

        def counted(self, memory, *rest, _original=original, _op=op):
            if not rest[-1].startswith("used bits"):
                calls.append((_op, memory.nbytes))
            return _original(self, memory, *rest)

        setattr(Collectives, name, counted)
    return calls
