"""Activations traced on fake tensors against what torch's allocator hands out in a sharded step."""

from __future__ import annotations

import pytest
import torch
from harness import ranks
from plan_models import BLOCKS, MODELS
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.profiler import ProfilerActivity, profile
from toys import wrap

import fsdpc
from fsdpc._plan.ledger import plan
from fsdpc._plan.live import peak_of_allocator
from fsdpc._plan.model import CPU, Setup
from fsdpc._plan.trace import checkpointed
from fsdpc._plan.traced import build_traced

ENGINE = ("shards", "gradient shards", "gather slots", "reduce slots", "no_sync gradients")
MIXED = {"compute": "bfloat16", "reduce": "float32"}


def predicted(kind, world, checkpointing, precision):
    """(bytes that torch allocates in a step, bytes of the engine)"""
    setup = Setup(world=world, checkpointing=checkpointing, **CPU, **precision)
    made = plan(lambda s: build_traced(MODELS[kind], s, ModuleWrapPolicy(set(BLOCKS))), setup)
    step = [p for p in made.timeline if p.phase in ("forward", "backward")]
    rest = sum(r.bytes for r in made.rows if "forward" in r.lifetime and r.role in (
        *ENGINE, "optimizer states", "buffers", "inputs"))
    return max(p.bytes for p in step) - rest, sum(made.row(role) for role in ENGINE)


def measured(kind, checkpointing, precision):
    torch.manual_seed(0)
    module, inputs, loss = MODELS[kind]()
    blocks = [m for m in module.modules() if isinstance(m, BLOCKS)]
    options = {}
    if precision:
        options["mixed_precision"] = fsdpc.MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with checkpointed(blocks if checkpointing else []):
        model = wrap("fsdpc", module, auto_wrap_policy=ModuleWrapPolicy(set(BLOCKS)),
                     use_orig_params=True, **options)
        for step in range(3):
            model.zero_grad()
            if step < 2:
                loss(model(*inputs), inputs).backward()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            loss(model(*inputs), inputs).backward()
    stats = fsdpc.memory_stats(model)
    own = sum(stats[key] for key in ("master_bytes", "grad_bytes", "gather_bytes", "reduce_bytes",
                                     "local_bytes"))
    return peak_of_allocator(seen), own


@ranks(2)
@pytest.mark.parametrize("kind", MODELS)
def test_traced_activations_are_those_of_a_run(rank, world, kind):
    for checkpointing in (0.0, 1.0):
        torch_plan, own_plan = predicted(kind, world, checkpointing, {})
        torch_run, own_run = measured(kind, checkpointing, {})
        assert own_plan == own_run
        ratio = torch_plan / torch_run
        print(f"{kind:8}checkpointing {checkpointing:.0f}: {torch_plan} {torch_run} {ratio:.5f}")
