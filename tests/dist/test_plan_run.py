"""The plan of the engine's memory, made before wrapping, equals a run to the byte."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from toys import PRECISIONS, Block, loss_of, tokens, toy, wrap

import fsdpc
from fsdpc import _C
from fsdpc._comm.wire import default_dtype
from fsdpc._plan import engine
from fsdpc._plan.model import CPU, Setup, check
from fsdpc._plan.modules import units_of

STRATEGIES = [s for s in ShardingStrategy if "HYBRID" not in s.name]
KEYS = ("gather_bytes", "reduce_bytes", "master_bytes", "grad_bytes", "gather_slots",
        "gather_slot_bytes", "reduce_slots", "local_bytes")


class Headless(nn.Module):
    """The root has no parameters; blocks stand in blocks; one of them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = toy(blocks=5)
        self.inner.blocks[1].requires_grad_(False)
        self.inner.blocks[2].down.weight.requires_grad_(False)

    def forward(self, tokens):
        return self.inner(tokens)


MODELS = {
    "blocks": (lambda: toy(blocks=4), ModuleWrapPolicy({Block})),
    "whole": (lambda: toy(blocks=3), None),
    "nested": (lambda: toy(blocks=3), ModuleWrapPolicy({Block, nn.Linear})),
    "headless": (Headless, ModuleWrapPolicy({Block, type(toy())})),
    "by size": (lambda: toy(blocks=4),
                lambda **kw: size_based_auto_wrap_policy(min_num_params=150, **kw)),
}


def setup_for(world, strategy, precision, **more):
    name = lambda dtype: None if dtype is None else str(dtype).removeprefix("torch.")  # noqa: E731
    where = CPU
    if torch.cuda.is_available() or _C.stand_in():
        where = {"transport": "stream", "align_bytes": 128, "range_grain": 2 << 20}
    return check(Setup(world=world, strategy=strategy.name, storage=name(precision.model),
                       compute=name(precision.param), reduce=name(precision.reduce),
                       page_bytes=mmap.PAGESIZE, **{**where, **more}))


def planned(module, policy, setup, precision):
    options = precision.options()
    units = units_of(module, policy, mixed_precision=options.get("mixed_precision"))
    return engine.engine_memory(units, setup).stats


def compare(planned, model):
    run = fsdpc.memory_stats(model)
    assert {key: run[key] for key in KEYS} == {key: planned[key] for key in KEYS}
    assert run["spare_bytes"] == 0


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: p.name)
@pytest.mark.parametrize("kind", MODELS)
def test_the_plan_equals_the_run(rank, world, kind, precision):
    make, policy = MODELS[kind]
    for strategy in STRATEGIES:
        setup = setup_for(world, strategy, precision)
        plain = make().to(precision.model)
        before = [name for name, _ in plain.named_modules()]
        plan = planned(plain, policy, setup, precision)
        assert [name for name, _ in plain.named_modules()] == before
        model = wrap("fsdpc", plain, auto_wrap_policy=policy, sharding_strategy=strategy,
                     use_orig_params=True, **precision.options())
        loss_of(model, tokens(rank, 0)).backward()
        compare(plan, model)
