"""Tests of CPUOffload(offload_params=True) on a simulated GPU: results match those without
offload.
"""

from __future__ import annotations

from contextlib import nullcontext

import env
import pytest
import simgpu
import torch
from harness import ranks
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from toys import (
    check_equal,
    full_gradients,
    full_parameters,
    loss_of,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)

from fsdpc import _C, CPUOffloadPolicy, fully_shard, optim
from fsdpc.optim._device import gpu_of

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
GPU = env.environment()
OFFLOAD = CPUOffload(offload_params=True)
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def pair(engine, **options):
    """Return two equal models, of which the second is offloaded, and their optimizers."""
    models = [
        wrap_blocks(engine, toy(), cpu_offload=offload, **options) for offload in (None, OFFLOAD)
    ]
    return models, [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]


def step(models, optimizers, rank, number, how="plain"):
    losses = []
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        for micro in range(1 if how == "plain" else 3):
            held = how == "no_sync" and micro < 2
            with model.no_sync() if held else nullcontext():
                loss = loss_of(model, tokens(rank, number, micro))
                loss.backward()
            losses.append(loss.detach().clone())
        losses.append(model.clip_grad_norm_(0.5))
        optimizer.step()
    half = len(losses) // 2
    for plain, offloaded in zip(losses[:half], losses[half:], strict=True):
        torch.testing.assert_close(offloaded, plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mixed", [None, LOW], ids=["fp32", "bf16"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@ranks(1, 2, env=GPU)
def test_trains_as_without(rank, world, engine, use_orig_params, mixed):
    models, optimizers = pair(engine, use_orig_params=use_orig_params, mixed_precision=mixed)
    for number, how in enumerate(["plain", "accumulate", "no_sync", "plain"]):
        step(models, optimizers, rank, number, how)
        check_equal(full_gradients(models[1]), full_gradients(models[0]), how, rtol=1e-5)
        check_equal(full_parameters(models[1]), full_parameters(models[0]), how, rtol=1e-5)
    for param in models[1].parameters():
        assert param.device.type == "cpu"
        assert param.grad is None or param.grad.device.type == "cpu"
    unit = models[1]._unit
    assert unit.flat.offloaded and not models[0]._unit.flat.offloaded


@ranks(2, env=GPU)
def test_offloaded_shards_are_pinned_and_a_step_allocates_none(rank, world, engine):
    models, optimizers = pair(engine)
    for number in range(2):
        step(models, optimizers, rank, number)
    offloaded, optimizer = models[1], optimizers[1]
    with simgpu.counting() as cost:
        loss_of(offloaded, tokens(rank, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert cost["host_syncs"] == cost["allocations"] == cost["host_allocations"] == 0
    assert simgpu.count()["host_bytes"] > 0


@ranks(2, env=GPU)
def test_evaluation_and_loading(rank, world, engine):
    models, optimizers = pair(engine)
    step(models, optimizers, rank, 0)
    with torch.no_grad():
        before = [loss_of(model, tokens(rank, 1)) for model in models]
    torch.testing.assert_close(before[1], before[0], rtol=1e-6, atol=0)
    saved = models[0].state_dict()
    check_equal(dict(models[1].state_dict()), dict(saved), "state dict", rtol=1e-5)
    changed = {k: v + 1 if v.is_floating_point() else v for k, v in saved.items()}
    with torch.no_grad():
        loss_of(models[1], tokens(rank, 1))  # loading begins after these gathers
    models[1].load_state_dict(changed)
    check_equal(dict(models[1].state_dict()), changed, "loaded")
    models[0].load_state_dict(changed)
    with torch.no_grad():
        after = [loss_of(model, tokens(rank, 1)) for model in models]
    torch.testing.assert_close(after[1], after[0], rtol=1e-6, atol=0)


@ranks(2, env=GPU)
def test_optimizers_of_whole_matrices(rank, world):
    """The optimizers step offloaded shards in host memory, and results equal those of one process
    to the bit. They raise an error if only their states are to be offloaded.
    """
    from test_optim_muon import OPTIONS, STEPS, Model, train
    from test_optim_whole import EVERY, alone, equal, make

    EVERY["Muon"] = OPTIONS
    for kind in EVERY:
        expected, _ = alone(kind)
        for model in (
            wrap("fsdpc", Model(), cpu_offload=OFFLOAD),
            fully_shard(Model(), offload_policy=CPUOffloadPolicy()),
        ):
            train(model, make(kind, model), range(STEPS))
            equal(model, expected)
        with pytest.raises(NotImplementedError, match=r"CPUOffload\(offload_params=True\)"):
            make(kind, wrap("fsdpc", Model()), offload=optim.Host())


@ranks(2, env=GPU)
def test_part_of_the_units_stays_on_the_device(rank, world, engine):
    """One optimizer steps offloaded units and units on the device; which units are offloaded
    decides how much optimizer state is on the GPU.
    """
    models = []
    for offloaded in ((), (0, 1)):
        model = toy(blocks=4)
        for i, block in enumerate(model.blocks):
            offload = OFFLOAD if i in offloaded else None
            model.blocks[i] = wrap(engine, block, use_orig_params=True, cpu_offload=offload)
        models.append(wrap(engine, model, use_orig_params=True))
    optimizers = [optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for number, how in enumerate(["plain", "accumulate", "no_sync"]):
        step(models, optimizers, rank, number, how)
        check_equal(full_parameters(models[1]), full_parameters(models[0]), how, rtol=1e-5)
    here = [unit.flat.offloaded for unit in models[1]._tree.units]
    assert here == [False, True, True, False, False]
    for unit in models[1]._tree.units:
        places = {gpu_of(param) for param, _, _ in unit.optim_params}
        assert places == {None if unit.flat.offloaded else 0}


@pytest.mark.long
@ranks(4, env=GPU)
def test_replicas(rank, world, engine):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    models, optimizers = pair(
        engine, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh
    )
    for number, how in enumerate(["plain", "accumulate", "no_sync"]):
        step(models, optimizers, rank, number, how)
        check_equal(full_gradients(models[1]), full_gradients(models[0]), how, rtol=1e-5)
    check_equal(full_parameters(models[1]), full_parameters(models[0]), "replicas", rtol=1e-5)


class Watched(optim.AdamW):
    """An AdamW that tells the simulator which memory the CPU reads and writes in each step, and
    records how many bytes the GPU had written before each step.
    """

    done: list[int]

    def _step_members(self, members, scaling):
        self.done.append(simgpu.count()["bytes_written"])
        for found in members:
            for value, grad in zip(found.values, found.grads, strict=True):
                library, nbytes = simgpu.cuda(), grad.numel() * grad.element_size()
                library.simgpu_cpu_read(grad.data_ptr(), nbytes, b"the optimizer")
                library.simgpu_cpu_write(value.data_ptr(), nbytes, b"the optimizer")
        super()._step_members(members, scaling)


def train_in_backward(rank, policy, planted=False):
    simgpu.policy(policy)
    plain = wrap_blocks("fsdpc", toy(), use_orig_params=True, cpu_offload=OFFLOAD)
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True, cpu_offload=OFFLOAD)
    after = optim.AdamW(plain.parameters(), lr=1e-2)
    inside = optim.in_backward(model, lambda named: Watched([p for _, p in named], lr=1e-2))
    waits = []
    for number in range(3):
        inside.done = []
        loss_of(plain, tokens(rank, number)).backward()
        after.step()
        after.zero_grad()
        loss = loss_of(model, tokens(rank, number))
        before = _C.cuda_waits(0)
        if number == 2 and planted:
            simgpu.take_reports()
            simgpu.options().quiet = True
            wait_no_more()
        loss.backward()
        waits.append(_C.cuda_waits(0) - before)
        inside.step()
    return plain, model, inside, waits


def wait_no_more():
    """Make the host believe from now on that all GPU work is done."""
    for k in range(1, 64):
        simgpu.skip("cuEventQuery", k)


@ranks(1, 2, env=GPU | {"FSDPC_POISON": "0"})
def test_steps_in_backward_unit_by_unit(rank, world):
    """The step of a unit waits only for the sum of that unit;
    meanwhile the GPU goes on with the sums of other units.
    """
    for policy in ("lazy", "eager", "random:1"):
        plain, model, inside, waits = train_in_backward(rank, policy)
        check_equal(full_parameters(model), full_parameters(plain), policy, rtol=0)
        assert all(p.grad is None for p in model.parameters())
        units = len(model._tree.units)
        assert len(inside.done) == units
        # The host waits once or twice for each unit: for the gradient, and perhaps for the master.
        assert units <= waits[-1] <= 2 * units, waits
        if policy == "lazy" and world > 1:
            assert len(set(inside.done)) > 1  # the GPU works between the steps of units
    assert simgpu.take_reports() == []


@ranks(1, env=GPU | {"FSDPC_POISON": "0"})
def test_a_step_that_does_not_wait_is_found(rank, world):
    train_in_backward(rank, "lazy", planted=True)
    assert simgpu.drain()
    assert any("the optimizer" in report for report in simgpu.take_reports())
