"""Tests of fully_shard together with torch's features: tensor parallelism, checkpoints that go
through both libraries, both interfaces and different numbers of ranks, and models that are moved or
cast after sharding.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import ranks, run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import Block, loss_of, shard_blocks, tokens, toy, wrap_blocks

import fsdpc
import fsdpc.optim
from fsdpc import checkpoint


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> float:
    loss = loss_of(model, tokens(rank, number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# --- gradients that wait -------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("collectives", ["shm", "wire"])
def test_ranks_that_differ_in_what_they_sum(rank, world, collectives):
    """Over shared memory, only the rank that keeps its gradients raises an error; over a wire and
    on a GPU, every rank raises one.
    """
    if collectives == "wire":
        os.environ["FSDPC_COLLECTIVES"] = "wire"
    model = shard_blocks(toy())
    model.blocks[0].set_requires_gradient_sync(rank == 0)
    loss = loss_of(model, tokens(rank, 0))
    compared = collectives == "wire" or {"FSDPC_LIBCUDA", "FSDPC_TEST_PLACES"} & set(os.environ)
    if rank == 0 and not compared:
        loss.backward()
    else:
        with pytest.raises(fsdpc.MismatchError, match=r"unit blocks\.0"):
            loss.backward()


# --- tensor parallelism --------------------------------------------------------------------------


def even() -> nn.Module:
    """Return a toy model whose hidden rows divide evenly over two tensor-parallel ranks,
    as torch requires.
    """
    model = toy()
    torch.manual_seed(1)
    model.blocks = nn.ModuleList(Block(6, 12) for _ in range(2))
    return model


def plain_steps(model: nn.Module, batches: list[list[torch.Tensor]]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for row in batches:
        sum(loss_of(model, batch) for batch in row).div(len(row)).backward()
        optimizer.step()
        optimizer.zero_grad()


@ranks(2, 4)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_tensor_parallel_and_sharded(rank, world, precision):
    """Tensor parallelism shards the columns of `up` and the rows of `down` over one dimension of
    the mesh; fully_shard uses the other dimension.
    """
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    data, own = world // 2, mesh["dp"].get_local_rank()
    model, reference = even(), even()
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    policy = fsdpc.MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = fsdpc.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shard_blocks(model, mesh=mesh["dp"], mp_policy=policy)
    up, down = model.blocks[0].up.weight, model.blocks[0].down.weight
    assert up.device_mesh.mesh_dim_names == down.device_mesh.mesh_dim_names == ("dp", "tp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        step(model, optimizer, own, number)
    plain_steps(reference, [[tokens(r, n) for r in range(data)] for n in range(3)])
    tolerance = 1e-5 if precision == "float32" else 3e-2
    for (name, value), want in zip(full(model).items(), reference.parameters(), strict=True):
        torch.testing.assert_close(value, want, rtol=0, atol=tolerance, msg=name)


def tensor_parallel(mesh) -> nn.Module:
    model = even()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def clipped_steps(model: nn.Module, batches: list[list[torch.Tensor]]) -> None:
    """Run a step on the mean loss of each row of batches; gradients are clipped to a small norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for row in batches:
        sum(loss_of(model, batch) for batch in row).div(len(row)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.long
@ranks(4)
def test_equal_meshes_are_one_mesh(rank, world):
    """Meshes that are made twice, copied or pickled count as equal,
    and gradients on several meshes are clipped together.
    """
    warnings.simplefilter("ignore")
    sizes = {("dp", "tp"): (2, 2), ("rep", "dp", "tp"): (2, 1, 2)}
    first, again = (
        [init_device_mesh("cpu", sizes[n], mesh_dim_names=n) for n in sizes] for _ in 2 * "x"
    )
    plane, space = first
    copied = tensor_parallel(plane["tp"])
    cases = {
        "2-D, made twice": (tensor_parallel(plane["tp"]), again[0]["dp"]),
        "3-D, made twice": (tensor_parallel(space["tp"]), again[1]["rep", "dp"]),
        "a copied model": (copy.deepcopy(copied), plane["dp"]),
        "a pickled mesh": (copied, pickle.loads(pickle.dumps(plane["dp"]))),
    }
    reference = even()
    clipped_steps(reference, [[tokens(r, n) for r in range(2)] for n in range(2)])
    wanted = dict(reference.named_parameters())
    for what, (model, mesh) in cases.items():
        shard_blocks(model, mesh=mesh)
        clipped_steps(model, [[tokens(rank // 2, n)] for n in range(2)])
        for name, value in full(model).items():
            torch.testing.assert_close(
                value, wanted[name], rtol=0, atol=1e-5, msg=f"{what}: {name}"
            )


@ranks(2)
def test_meshes_that_are_not_parts_of_one(rank, world):
    model = toy()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model.blocks[0], mesh, {"up": ColwiseParallel()})
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="parts of one mesh"):
        fsdpc.fully_shard(model.blocks[0], mesh=other)


# --- checkpoints ---------------------------------------------------------------------------------


def sharded(kind: str) -> nn.Module:
    if kind == "fsdp1":
        return wrap_blocks("fsdpc", toy(seed=7), use_orig_params=True)
    return shard_blocks(toy(seed=7), torch_fully_shard if kind == "torch" else None)


def hop(rank: int, world: int, kind: str, folder: str, number: int) -> dict[str, torch.Tensor]:
    """If `number` is 0, train one step, else load checkpoint `number`; then save the next
    checkpoint. Return every value that the new checkpoint holds, at full size.
    """
    warnings.simplefilter("ignore")
    model = sharded(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if number == 0:
        step(model, optimizer, rank, 0)
    else:
        weights, states = get_state_dict(model, optimizer)
        found = {"model": weights, "optim": states}
        dcp.load(found, checkpoint_id=f"{folder}/{number}")
        set_state_dict(
            model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"]
        )
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{folder}/{number + 1}")
    values = {f"model.{name}": value for name, value in weights.items()}
    for name, entries in states["state"].items():
        values |= {f"optim.{name}.{key}": value for key, value in entries.items()}
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards")
    }


@pytest.mark.long
def test_a_checkpoint_hops_through_both_libraries(tmp_path):
    """The checkpoint goes through torch's FSDP2 on 2 ranks, fsdpc's fully_shard on 3, fsdpc's FSDP1
    on 2 and torch's FSDP2 on 1. Weights and moments stay equal to the bit.
    """
    route = [("torch", 2), ("fsdpc", 3), ("fsdp1", 2), ("torch", 1)]
    seen = []
    for number, (kind, world) in enumerate(route):
        outcomes = run_ranks(hop, world, kind=kind, folder=str(tmp_path), number=number)
        seen.append(outcomes[0])
    assert len(seen[0]) == 4 * len(list(toy().parameters()))  # a weight, two moments and a step
    for later in seen[1:]:
        for name in later.keys() & seen[0].keys():
            assert torch.equal(later[name], seen[0][name]), name
    assert seen[-1].keys() == seen[0].keys()


# --- after sharding ------------------------------------------------------------------------------


@ranks(3)
def test_cast_after_sharding_keeps_objects_gradients_and_values(rank, world):
    model = shard_blocks(toy())
    before = list(model.parameters())
    loss_of(model, tokens(rank, 0)).backward()
    grads = [p.grad.full_tensor() for p in before]
    values = list(full(model).values())
    model.to(torch.float64)
    for p, old, grad, value in zip(model.parameters(), before, grads, values, strict=True):
        assert p is old and p.dtype == p.grad.dtype == torch.float64
        assert torch.equal(p.full_tensor(), value.double())
        assert torch.equal(p.grad.full_tensor(), grad.double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, tokens(rank, 1)).backward()
    total = model.head.weight.grad.full_tensor()
    assert not torch.equal(total, grads[-2].double())  # the second gradient was added
    optimizer.step()


@ranks(4)
def test_meta_parameters_are_named_until_they_have_values(rank, world):
    with torch.device("meta"):
        model = toy()
    shard_blocks(model)
    with pytest.raises(RuntimeError, match=r"materialized from meta device.*norm\.weight"):
        model(tokens(rank, 0))
    model.to_empty(device="cpu")
    source = toy()
    values = {
        name: distribute_tensor(
            p.detach(), model.get_parameter(name).device_mesh, model.get_parameter(name).placements
        )
        for name, p in source.named_parameters()
    }
    model.load_state_dict(values)
    with torch.no_grad():
        assert torch.equal(model(tokens(rank, 0)), source(tokens(rank, 0)))
    dist.barrier()


@ranks(1)
def test_sharding_on_the_meta_device_takes_what_it_takes_elsewhere(rank, world):
    """Sharding must not pass meta tensors to DLPack,
    which refuses them with an exception that costs 8 ms in torch.
    """

    def seconds(device: str) -> float:
        model = nn.Sequential(*(nn.Linear(4, 4, device=device) for _ in range(20)))
        begin = time.thread_time()
        fsdpc.fully_shard(model)
        return time.thread_time() - begin

    seconds("cpu")
    real = min(seconds("cpu") for _ in range(3))
    assert min(seconds("meta") for _ in range(2)) < 3 * real + 0.05


# --- the rest of fsdpc behind fully_shard --------------------------------------------------------


@ranks(2, 3)
def test_safetensors_go_between_both_interfaces(rank, world):
    """Each interface loads a checkpoint of the other one, and trains on with equal losses."""
    folder = checkpoint_folder(rank)
    losses = []
    for number, kind in enumerate(["fsdpc", "fsdp1", "fsdpc"]):
        model = sharded(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if number == 0:
            step(model, optimizer, rank, 0)
            checkpoint.save(folder, model, optimizer)
        else:
            checkpoint.load(folder, model, optimizer)
        losses.append([step(model, optimizer, rank, n) for n in (1, 2, 3)])
    assert losses[0] == losses[1] == losses[2]


@ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_a_module_is_sharded_by_one_interface(rank, world, tied):
    """With `tied`, the module of the second call is still plain, but its weight was tied to a
    weight that the first call sharded.
    """

    def pair():
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            second.weight = first.weight
        return first, second if tied else first

    first, second = pair()
    fsdpc.fully_shard(first)
    with pytest.raises(ValueError, match="by fully_shard already.* not both"):
        fsdpc.FullyShardedDataParallel(nn.Sequential(second), use_orig_params=True)
    first, second = pair()
    wrapped = fsdpc.FullyShardedDataParallel(first, use_orig_params=True)
    with pytest.raises(ValueError, match="FullyShardedDataParallel already.* not both"):
        fsdpc.fully_shard(nn.Sequential(second))
    assert wrapped.module is first  # this use keeps the wrapper, and so the sharding, alive


def checkpoint_folder(rank: int) -> str:
    """Return the path of one new folder, which is the same on all ranks."""
    paths = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(paths)
    return f"{paths[0]}/saved"


@ranks(2, 3)
@pytest.mark.parametrize("name", ["AdamW", "AdamWBF16", "AdamW8bit", "Lion", "SGD"])
def test_optimizers_step_rows_as_they_step_flat_shards(rank, world, name):
    losses = []
    for kind in ("fsdpc", "fsdp1"):
        model = sharded(kind)
        optimizer = getattr(fsdpc.optim, name)(model.parameters(), lr=1e-2)
        losses.append([step(model, optimizer, rank, n) for n in range(4)])
    assert losses[0] == losses[1]


class OnLocalTensors(TorchDispatchMode):
    """A dispatch mode that fails at any operation on a DTensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))), func
        return func(*args, **kwargs or {})


@ranks(2, 3)
@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
def test_sgd_with_momentum_steps_local_tensors(rank, world, implementation):
    """All steps use only local tensors. This includes the first step, which makes the momentum
    buffers, and a step after a buffer was deleted. torch's fused kernel rounds the last elements
    of a tensor differently.
    """
    bounds = {"rtol": 1e-5, "atol": 1e-6} if implementation == "fused" else {"rtol": 0, "atol": 0}
    same = functools.partial(torch.testing.assert_close, **bounds)
    chosen = {} if implementation == "loop" else {implementation: True}
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **chosen}
    options |= {"nesterov": True} if implementation == "foreach" else {"dampening": 0.2}
    model, whole = shard_blocks(toy()), toy()
    optimizers = [torch.optim.SGD(m.parameters(), **options) for m in (model, whole)]
    pairs = list(zip(model.parameters(), whole.parameters(), strict=True))
    for number in range(4):
        loss_of(model, tokens(rank, number)).backward()
        for param, alone in pairs:
            alone.grad = param.grad.full_tensor()
        with OnLocalTensors():
            optimizers[0].step()
        optimizers[1].step()
        optimizers[0].zero_grad()
        for param, alone in pairs:
            buffer = optimizers[0].state[param]["momentum_buffer"]
            same(param.full_tensor(), alone)
            same(buffer.full_tensor(), optimizers[1].state[alone]["momentum_buffer"])
            assert buffer.placements == param.placements
        if number == 1 and implementation != "fused":
            for optimizer, param in zip(optimizers, pairs[0], strict=True):
                del optimizer.state[param]["momentum_buffer"]
    assert optimizers[0].state.keys() == set(model.parameters())


@ranks(2, 4)
def test_the_plan_equals_what_units_of_rows_allocate(rank, world):
    policy = fsdpc.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for options in ({}, {"mp_policy": policy}, {"reshard_after_forward": False}):
        model = shard_blocks(toy(), **options)
        loss_of(model, tokens(rank, 0)).backward()
        report = fsdpc.memory_report(model)
        assert report.equal, report
        assert sum(line.actual for line in report.lines) > 0


@ranks(4)
@pytest.mark.parametrize("param_dtype, reduce_dtype", [(torch.bfloat16, None), (None, torch.half)])
def test_sums_in_low_precision(rank, world, param_dtype, reduce_dtype):
    """Over shared memory or a wire, gradients are exact means. Over torch's collectives, gloo
    rounds the sums, as in torch. torch 2.15 sums in the parameter's dtype if no reduce_dtype is
    given.
    """

    def gradients(shard, **options):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
        if shard is None:
            model = module.to(param_dtype or torch.float32)
            x = batch.to(param_dtype or torch.float32)
        else:
            policy = fsdpc.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
            model, x = shard(module, mp_policy=policy, **options), batch
        model(x).float().square().sum().backward()
        return [full_gradient(p) for p in model.parameters()]

    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    exact = []
    for grad in gradients(None):
        mean = grad.to(reduce_dtype or grad.dtype).double()
        dist.all_reduce(mean)
        exact.append(mean / world)
    own, theirs = gradients(fsdpc.fully_shard), gradients(torch_fully_shard)
    for mean, value in zip(exact, own, strict=True):
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-12)
    rounds = reduce_dtype is not None or TorchVersion(torch.__version__) < "2.15"
    far = [(value.double() - mean).abs().max() for mean, value in zip(exact, theirs, strict=True)]
    largest = torch.stack([mean.abs().max() for mean in exact]).max()
    assert (torch.stack(far).max() > 1e-4 * largest) == rounds
    for collectives, expected in (("wire", own), ("c10d", theirs)):
        os.environ["FSDPC_COLLECTIVES"] = collectives  # applies only to the new group of the mesh
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        for value, other in zip(gradients(fsdpc.fully_shard, mesh=mesh), expected, strict=True):
            assert torch.equal(value, other) == (rounds or collectives == "wire")
            torch.testing.assert_close(value, other, rtol=0.03, atol=0.03 * float(largest))


@ranks(2)
def test_waiting_gradients_are_summed_by_finalize_backward(rank, world):
    """A pipeline of torch 2.15 calls finalize_backward() after its micro-batches."""
    model = shard_blocks(toy())
    model.set_manual_backward_finalization(True)
    model.finalize_backward()  # does nothing before the first forward
    model.set_requires_gradient_sync(False)
    whole = toy()
    for micro in range(2):
        loss_of(model, tokens(rank, micro)).backward()
        for each in range(world):
            loss_of(whole, tokens(each, micro)).backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full_gradient(param), expected.grad / world)
    if not hasattr(torch.distributed.fsdp, "GradientReductionHandle"):
        with pytest.raises(NotImplementedError, match="leave async_op out"):
            model.finalize_backward(async_op=True)
    else:
        model.finalize_backward(async_op=True).wait()


def full_gradient(param):
    return param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad


RANGES = """root_pre_forward|pre_forward (0)|all_gather (0)|post_forward (0)|pre_backward (0)
    |post_backward_reduce (0)|root_post_backward_callback"""


def shard_each(shard=fsdpc.fully_shard) -> nn.Module:
    return shard(nn.Sequential(shard(Block()), shard(Block())))


@ranks(2)
def test_ranges_in_a_profile(rank, world):
    wanted = {f"FSDP::{name.strip()}" for name in RANGES.split("|")}
    found = []
    for shard in (fsdpc.fully_shard, torch_fully_shard):
        model = shard_each(shard)
        model(torch.ones(2, 6)).sum().backward()  # this step is not in the profile
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(torch.ones(2, 6)).sum().backward()
        found.append({event.name for event in profile.events()})
    assert wanted <= found[0] and wanted <= found[1], [wanted - names for names in found]
    model = wrap_blocks("fsdpc", nn.Sequential(Block(), Block()))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(2, 6)).sum().backward()
    assert wanted <= {event.name for event in profile.events()}


@ranks(2)
@pytest.mark.parametrize("annotate", ["emit_nvtx", "emit_itt"])
def test_ranges_reach_the_observers_of_other_profilers(rank, world, annotate):
    """emit_nvtx installs an observer of torch's record functions. This observer needs a GPU, so
    the test uses another observer in its place.
    """
    profiler = torch.autograd.profiler
    model = shard_each()
    model(torch.ones(2, 6)).sum().backward()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (profiler, "_enable_profiler"),
            (profiler, "_disable_profiler"),
            (torch.cuda, "synchronize"),
        ):
            patch.setattr(owner, name, lambda *args: None)
        observer = torch.profiler.ExecutionTraceObserver().register_callback(f"{folder}/x.json")
        observer.start()
        with getattr(profiler, annotate)():
            model(torch.ones(2, 6)).sum().backward()
        observer.stop()
        observer.unregister_callback()
        found = Path(f"{folder}/x.json").read_text()
    wanted = {f"FSDP::{name.strip()}" for name in RANGES.split("|")}
    assert {name for name in wanted if f'"{name}"' not in found} == set()
