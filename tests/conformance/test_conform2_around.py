"""Cases of sharded modules inside of compilers, pipelines, functional calls and averages."""

from __future__ import annotations

import copy

import torch
from outcome import raises
from rows_library import RowsLibrary
from suite import Cases
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from toys import clean, loss_of, toy

case = Cases(__name__, __file__, library=RowsLibrary)


# --- the compiler --------------------------------------------------------------------------------


@case(
    over={
        "what": ["module.compile", "torch.compile"],
        "order": ["compile, shard", "shard, compile"],
        "checkpointed": [False, True],
    },
    rtol=1e-4,
)
def compiled_blocks(lib, what, order, checkpointed):
    """Blocks can be checkpointed, compiled and sharded in the orders that trainers use."""
    model = toy()
    for name, block in model.blocks.named_children():
        if checkpointed:
            block = checkpoint_wrapper(block)
        if order == "shard, compile":
            lib.fully_shard(block)
        if what == "module.compile":
            block.compile(backend="aot_eager")
        else:
            block = torch.compile(block, backend="aot_eager")
        if order == "compile, shard":
            lib.fully_shard(block)
        model.blocks.register_module(name, block)
    seen = lib.train(lib.fully_shard(model))
    seen["parameters"] = {n.replace("_orig_mod.", ""): p for n, p in seen["parameters"].items()}
    return seen


@case(over={"backend": ["eager", "aot_eager"]}, rtol=1e-4)
def a_whole_model_compiled(lib, backend):
    model = lib.shard_blocks(toy())
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(2):
        loss = loss_of(compiled, lib.batch(step))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, lib.full(model)


@case(raises=RuntimeError)
def export(lib):
    """A sharded module cannot be exported as a graph."""
    torch.export.export(lib.shard_blocks(toy()), (lib.batch(),))


# --- pipelines -----------------------------------------------------------------------------------


def pipeline(lib, schedule, stages_per_rank):
    """Return the gradients of this rank's stages after each of two steps.

    The gradients must equal those of the whole model. Each stage is sharded over a group of one
    rank.
    """
    torch.manual_seed(0)
    count = lib.world * stages_per_rank
    whole = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)])
    mesh = init_device_mesh("cpu", (lib.world, 1), mesh_dim_names=("pp", "dp"))
    numbers = range(lib.rank, count, lib.world)
    parts = [copy.deepcopy(whole[i]) for i in numbers]
    for part in parts:
        lib.fully_shard(part[0], mesh=mesh["dp"], reshard_after_forward=False)
        lib.fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(part, i, count, torch.device("cpu"), group=group)
        for part, i in zip(parts, numbers, strict=True)
    ]
    run = schedule(
        stages if stages_per_rank > 1 else stages[0],
        n_microbatches=4,
        loss_fn=nn.functional.mse_loss,
    )
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    seen = []
    for _ in range(2):
        run.step(x) if lib.rank == 0 else run.step(target=torch.zeros(8, 4))
        nn.functional.mse_loss(whole(x), torch.zeros(8, 4)).backward()
        for part, i in zip(parts, numbers, strict=True):
            seen.append(lib.gradients(part))
            for name, param in whole[i].named_parameters():
                torch.testing.assert_close(seen[-1][name], param.grad, rtol=1e-5, atol=1e-6)
            part.zero_grad()
        whole.zero_grad()
    return seen


@case(over={"schedule": [ScheduleGPipe, Schedule1F1B]})
def pipelines(lib, schedule):
    return pipeline(lib, schedule, 1)


@case()
def pipelines_of_interleaved_stages(lib):
    return pipeline(lib, ScheduleInterleaved1F1B, 2)


@case(fsdpc=raises(NotImplementedError, "zero bubble"), over={"part": ["input", "weight"]})
def pipelines_that_split_backward(lib, part):
    """Schedules that compute gradients of weights apart from those of inputs (zero bubble)"""
    mesh = init_device_mesh("cpu", (lib.world, 1), mesh_dim_names=("dp", "pp"))
    model = lib.fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=mesh["pp"].get_group())
    x = torch.ones(2, 4, requires_grad=True)
    given = {"param_groups": []}
    if part == "input":
        out = model(x)
        given = {"stage_output": [out], "output_grads": [out.detach()], "input_values": [x]}
    stage.backward_maybe_with_nosync(part, given)


# --- functional calls ----------------------------------------------------------------------------


@case(raises=Exception)
def functional_call_with_plain_tensors(lib):
    model = lib.shard_blocks(toy())
    values = {n: p.detach().full_tensor() * 2 for n, p in model.named_parameters()}
    torch.func.functional_call(model, values, (lib.batch(),))


@case(fsdpc=raises(NotImplementedError, "functional_call"))
def functional_call(lib):
    """torch.func.functional_call with other sharded values"""
    model = lib.shard_blocks(toy())
    values = {n: p.detach() * 2 for n, p in model.named_parameters()}
    got = torch.func.functional_call(model, values, (lib.batch(),))
    plain = toy()
    values = {n: p.detach() * 2 for n, p in plain.named_parameters()}
    expected = torch.func.functional_call(plain, values, (lib.batch(),))
    torch.testing.assert_close(got, expected)


@case()
def a_model_after_a_functional_call(lib):
    """After a failed call, the model has its old values and can train."""
    model = lib.shard_blocks(toy())
    values = {n: nn.Parameter(p.detach() * 2) for n, p in model.named_parameters()}
    if lib.package == "fsdpc":
        try:
            torch.func.functional_call(model, values, (lib.batch(),))
        except NotImplementedError:
            pass
    return lib.train(model)


# --- averages ------------------------------------------------------------------------------------


@case()
def averages_by_foreach(lib):
    """The EMA function of torch.optim.swa_utils works on lists of sharded parameters."""
    from torch.optim.swa_utils import get_ema_multi_avg_fn

    model = lib.shard_blocks(toy())
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model, lib.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        lib.resharded(model)
        get_ema_multi_avg_fn(0.9)(average, [p.detach() for p in model.parameters()], step)
    names = [clean(n) for n, _ in model.named_parameters()]
    return {n: a.full_tensor() for n, a in zip(names, average, strict=True)}


@case(raises=AssertionError, words="deepcopy")
def an_averaged_model(lib):
    """torch.optim.swa_utils.AveragedModel fails, because it copies the model."""
    torch.optim.swa_utils.AveragedModel(lib.shard_blocks(toy()))


@case()
def an_average_in_a_second_sharded_model(lib):
    model, average = lib.shard_blocks(toy()), lib.shard_blocks(toy(1))
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(2):
        with torch.no_grad():
            seen.append(average(lib.batch(step)))
        loss_of(model, lib.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        lib.resharded(model)
        lib.resharded(average)
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.5)
    return seen, lib.full(average)


test_torch, test_fsdpc = case.tests()
