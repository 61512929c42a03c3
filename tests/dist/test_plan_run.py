"""Tests that the engine's memory as planned before wrapping equals a run's memory to the byte."""

from __future__ import annotations

import contextlib
import mmap
from itertools import product

import pytest
from combinations import subset
from harness import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from toys import PRECISIONS, Block, loss_of, tokens, toy, wrap

import fsdpc
from fsdpc import _C
from fsdpc.plan import engine
from fsdpc.plan.model import CPU, Setup, check
from fsdpc.plan.sources.held import setup_of
from fsdpc.plan.sources.modules import units_of, units_of_calls

STRATEGIES = [s for s in ShardingStrategy if "HYBRID" not in s.name]
KEYS = (
    "gather_bytes",
    "reduce_bytes",
    "master_bytes",
    "grad_bytes",
    "gather_slots",
    "gather_slot_bytes",
    "reduce_slots",
    "local_bytes",
)


class Headless(nn.Module):
    """A model whose root has no parameters of its own, with units inside units,
    a frozen block and a frozen weight.
    """

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
    "by size": (
        lambda: toy(blocks=4),
        lambda **kw: size_based_auto_wrap_policy(min_num_params=150, **kw),
    ),
}


def on_gpu():
    return _C.stand_in()


def setup_for(world, strategy, precision, **more):
    def name(dtype):
        return None if dtype is None else str(dtype).removeprefix("torch.")

    where = CPU
    if on_gpu():
        gpu = _C.cuda_device(0)
        where = {"align_bytes": gpu["align_bytes"], "range_grain": gpu["grain_bytes"]}
        more.pop("transport", None)
    return check(
        Setup(
            world=world,
            strategy=strategy.name,
            storage=name(precision.model),
            compute=name(precision.param),
            reduce=name(precision.reduce),
            page_bytes=mmap.PAGESIZE,
            **{**where, **more},
        )
    )


def planned(module, policy, setup, precision):
    options = precision.options()
    units = units_of(module, policy, mixed_precision=options.get("mixed_precision"))
    return engine.engine_memory(units, setup).stats


def run_one(rank, kind, setup, precision, micros=1, **options):
    make, policy = MODELS[kind]
    plain = make().to(precision.model)
    before = [name for name, _ in plain.named_modules()]
    plan = planned(plain, policy, setup, precision)
    assert [name for name, _ in plain.named_modules()] == before
    model = wrap(
        "fsdpc",
        plain,
        auto_wrap_policy=policy,
        use_orig_params=True,
        **options,
        **precision.options(),
    )
    for micro in range(micros):
        with model.no_sync() if micro + 1 < micros else contextlib.nullcontext():
            loss_of(model, tokens(rank, 0, micro)).backward()
    run = fsdpc.memory_stats(model)
    keys = set(KEYS)
    if on_gpu() and precision.param is not None and precision.reduce is None:
        # Whether NCCL rounds a sum only once is known only after a communicator was made. The dtype
        # that is sent depends on it, and the plan assumes the larger dtype.
        keys -= {"reduce_bytes"}
        assert run["reduce_bytes"] <= plan["reduce_bytes"]
    found, wanted = ({key: side[key] for key in keys} for side in (run, plan))
    assert found == wanted, (kind, setup, precision)
    assert run["spare_bytes"] == 0


@pytest.mark.long
@ranks(1, 2, 3, 4)
def test_the_plan_equals_the_run(rank, world):
    """The test has 300 combinations over all numbers of ranks (fewer with --combinations)."""
    for kind, strategy, precision in subset(product(MODELS, STRATEGIES, PRECISIONS)):
        run_one(
            rank, kind, setup_for(world, strategy, precision), precision, sharding_strategy=strategy
        )


@pytest.mark.long
@ranks(2, 4)
def test_also_with_replicas_and_accumulation(rank, world):
    mesh = init_device_mesh("cpu", (2, world // 2))
    for kind, strategy, precision in subset(
        product(
            MODELS,
            (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2),
            PRECISIONS[:3],
        )
    ):
        setup = setup_for(world, strategy, precision, shard=world // 2)
        run_one(rank, kind, setup, precision, sharding_strategy=strategy, device_mesh=mesh)
    for kind, strategy, precision in subset(product(MODELS, STRATEGIES, PRECISIONS[:2])):
        setup = setup_for(world, strategy, precision, accumulation=3, sync="last")
        run_one(rank, kind, setup, precision, micros=3, sharding_strategy=strategy)


@ranks(2, env={"FSDPC_COLLECTIVES": "wire"})
def test_also_over_a_wire_which_has_more_slots(rank, world):
    for kind, strategy, precision in subset(product(MODELS, STRATEGIES, PRECISIONS[:3])):
        setup = setup_for(world, strategy, precision, transport="wire")
        run_one(rank, kind, setup, precision, sharding_strategy=strategy)


@ranks(2, env={"FSDPC_GATHER_SLOTS": "3"})
def test_also_with_more_slots(rank, world):
    for kind in MODELS:
        setup = setup_for(world, STRATEGIES[0], PRECISIONS[0], gather_slots=3)
        run_one(rank, kind, setup, PRECISIONS[0], sharding_strategy=STRATEGIES[0])


@ranks(2, env={"FSDPC_COLLECTIVES": "c10d"})
def test_a_wire_without_background_transfers_has_no_more_slots(rank, world):
    model = wrap("fsdpc", toy(blocks=6), auto_wrap_policy=MODELS["blocks"][1])
    loss_of(model, tokens(rank, 0)).backward()
    units = units_of(toy(blocks=6), MODELS["blocks"][1])
    setup = setup_of(model._unit.groups.shard, None, False)
    run, plan = fsdpc.memory_stats(model), engine.engine_memory(units, setup).stats
    assert [run[key] for key in KEYS] == [plan[key] for key in KEYS]
    assert run["gather_slots"] == 3  # one for the root and two for the blocks


@ranks(2)
def test_a_planted_error_is_noticed(rank, world):
    """The comparison fails if the plan has one slot more than the run."""
    setup = setup_for(world, STRATEGIES[0], PRECISIONS[0], gather_slots=3)
    with pytest.raises(AssertionError):
        run_one(rank, "blocks", setup, PRECISIONS[0], sharding_strategy=STRATEGIES[0])


class Headless2(Headless):
    """A ``Headless`` that is sharded by calls of ``fully_shard``."""


ROWS = {
    "blocks": (lambda: toy(blocks=4), {Block}, None),
    "whole": (lambda: toy(blocks=3), set(), None),
    "nested": (lambda: toy(blocks=3), {Block, nn.Linear}, True),
    "headless": (Headless2, {Block, type(toy())}, None),
    "kept": (lambda: toy(blocks=4), {Block}, False),
}


def shard_rows(classes, reshard, policy):
    def shard(model):
        for module in reversed(list(model.modules())):
            if type(module) in classes and module is not model:
                fsdpc.fully_shard(module, reshard_after_forward=reshard, mp_policy=policy)
        return fsdpc.fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)

    return shard


@ranks(1, 2, 3)
def test_fully_shard_equals_its_plan(rank, world):
    """A plan from the user's function, which calls fully_shard, equals the run to the byte."""
    for kind, precision in subset(product(ROWS, PRECISIONS[:3])):
        make, classes, reshard = ROWS[kind]
        plain = make().to(precision.model)
        policy = fsdpc.MixedPrecisionPolicy(precision.param, precision.reduce)
        shard = shard_rows(classes, reshard, policy)
        setup = setup_for(world, ShardingStrategy.FULL_SHARD, precision)
        plan = engine.engine_memory(units_of_calls(plain, shard), setup).stats
        assert not any("_fsdpc_state" in m.__dict__ for m in plain.modules())
        model = shard(plain)
        loss_of(model, tokens(rank, 0)).backward()
        run = fsdpc.memory_stats(model)
        assert {k: run[k] for k in KEYS} == {k: plan[k] for k in KEYS}, (kind, precision, world)
    with pytest.raises(ValueError, match="comes last"):
        units_of_calls(toy(), lambda model: fsdpc.fully_shard(model.head))


@ranks(2)
def test_a_list_of_modules_is_one_unit(rank, world):
    def shard(model):
        fsdpc.fully_shard([model.embed, model.head])
        fsdpc.fully_shard([model.blocks[0], model.blocks[1]])
        return fsdpc.fully_shard(model)

    plain = toy(blocks=3)
    setup = setup_for(world, ShardingStrategy.FULL_SHARD, PRECISIONS[0])
    units = units_of_calls(plain, shard)
    plan = engine.engine_memory(units, setup).stats
    model = shard(plain)
    loss_of(model, tokens(rank, 0)).backward()
    run = fsdpc.memory_stats(model)
    assert {k: run[k] for k in KEYS} == {k: plan[k] for k in KEYS}, units
