"""Tests of fully_shard on several meshes: hooks that sum over replicas, replicated modules, and
units and parameters that have different meshes.
"""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from toys import loss_of, shard_blocks, tokens, toy

import fsdpc
import fsdpc.checkpoint
from fsdpc._fsdp2.args import default_mesh

RING = "torch.distributed.tensor.experimental._context_parallel._attention"


def whole(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if hasattr(param, "full_tensor") else param


def unsharded(world: int, steps: int, factor: float = 1.0) -> nn.Module:
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        for rank in range(world):
            (loss_of(model, tokens(rank, number)) * (factor / world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_equal(model: nn.Module, reference: nn.Module, what: str = "") -> None:
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(got), want, rtol=0, atol=1e-5, msg=f"{what} {name}")


# --- all-reduce hooks ----------------------------------------------------------------------------


@ranks(4)
@pytest.mark.parametrize("kind", ["flat", "replicas", "waiting"])
def test_an_all_reduce_hook_sums_over_replicas(rank, world, kind):
    """As in torchft, parameters are sharded inside each of two groups of two ranks, and a hook
    averages gradients over the two groups. If the mesh has replicas, the hook runs after
    the engine's own sum over the replicas.
    """
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = shard_blocks(toy(), mesh=mesh if kind == "replicas" else mesh["shard"])
    seen = []

    def hook(grads: torch.Tensor) -> None:
        seen.append(grads)
        if kind == "replicas":
            grads.mul_(2)
        else:
            dist.all_reduce(grads, group=mesh.get_group("replica"))
            grads.div_(2)

    model.apply(lambda m: isinstance(m, fsdpc.FSDPModule) and m.set_all_reduce_hook(hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        batch = tokens(rank, number)
        if kind == "waiting":
            model.set_requires_gradient_sync(False)
            loss_of(model, batch).div(2).backward()
            assert len(seen) == 3 * number  # no call in a backward that does not sum
            model.set_requires_gradient_sync(True)
            loss_of(model, batch).div(2).backward()
        else:
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == 6 and all(one.dim() == 1 and one.is_contiguous() for one in seen)
    assert_equal(model, unsharded(world, 2, 2.0 if kind == "replicas" else 1.0))
    model.apply(lambda m: isinstance(m, fsdpc.FSDPModule) and m.set_all_reduce_hook(None))
    loss_of(model, tokens(rank, 0)).backward()
    assert len(seen) == 6 and all(p.grad is not None for p in model.parameters())
    with pytest.raises((AssertionError, ValueError), match="hook itself is missing|native HSDP"):
        model.set_all_reduce_hook(None, stream=object())


@ranks(2)
def test_units_that_wait_for_their_sum_beside_all_reduce_hooks(rank, world):
    """A hook that does nothing changes no gradient, even if some units sum in the first backward
    and the others in the second.
    """
    grads = []
    for hook in (None, lambda grads: None):
        model = shard_blocks(toy())
        model.apply(lambda m, h=hook: h and hasattr(m, "unshard") and m.set_all_reduce_hook(h))
        for unit in (model.blocks[0], model):
            unit.set_requires_gradient_sync(False, recurse=False)
            loss_of(model, tokens(rank, 0)).backward()
            model.set_requires_gradient_sync(True)
            loss_of(model, tokens(rank, 1)).backward()
        grads.append([param.grad.full_tensor() for param in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-6)


# --- replicated modules --------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("home", ["replicate", "replicate_with_fsdp"])
def test_torchs_replicate_around_units_and_inside_one(rank, world, outer, home):
    replicate = importlib.import_module(f"torch.distributed._composable.{home}").replicate
    model = toy()
    for block in model.blocks:
        if outer:
            fsdpc.fully_shard(block, reshard_after_forward=False)
        else:
            replicate(block)
    (replicate if outer else fsdpc.fully_shard)(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        for block in model.blocks if outer else ():
            block.unshard(async_op=True)  # unshard() also works right after an optimizer's step
        loss_of(model, tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(model, unsharded(world, 2))


# --- several meshes in one model -----------------------------------------------------------------


class Experts(nn.Module):
    """Four experts that all compute every token; their outputs are weighted. ``ep`` is the mesh
    over which the experts are distributed; its ranks exchange tokens and results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 8) / 3)
        self.down = nn.Parameter(torch.randn(4, 8, 6) / 3)
        self.ep: DeviceMesh | None = None

    def distribute(self, ep: DeviceMesh) -> None:
        self.ep = ep
        for name in ("up", "down"):
            whole = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(distribute_tensor(whole, ep, [Shard(0)])))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up, down = self.up, self.down
        if self.ep is not None:
            x = functional.all_gather_tensor_autograd(x, 0, self.ep)
            weights = functional.all_gather_tensor_autograd(weights, 0, self.ep)
            up, down = up.to_local(), down.to_local()
            first = self.ep.get_local_rank() * len(up)
            weights = weights[:, first : first + len(up)]
        hidden = torch.relu(torch.einsum("tw,ewh->eth", x, up))
        out = torch.einsum("eth,ehw,te->tw", hidden, down, weights)
        if self.ep is not None:
            out = functional.reduce_scatter_tensor_autograd(out, "sum", 0, self.ep)
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.router = nn.Linear(6, 4)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.experts(normed, self.router(normed).softmax(-1))


def mixtures() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), Mixture(), Mixture(), nn.Linear(6, 2))


def clipped_steps(model: nn.Module, optimizer: Any, ranks: list[int], numbers: Any) -> float:
    """Run steps on the mean loss of the batches of `ranks`, with clipping.

    Returns the norm of the gradients in the last step.
    """
    for number in numbers:
        for rank in ranks:
            torch.manual_seed(10 * number + rank)
            model(torch.randn(5, 6)).pow(2).mean().div(len(ranks)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return float(norm)


def one_mesh_per_parameter() -> nn.Module:
    """Return a model with units whose parameters are on two meshes: experts on two replicas of two
    shards, the other parameters on four shards.
    """
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("torch 2.13 has ShardPlacementResult")
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    small = common.HSDPMeshInfo(mesh=grid, shard_mesh_dim=1, replicate_mesh_dim=0)

    def place(param):
        return common.ShardPlacementResult(Shard(1), small) if param.dim() == 3 else None

    model = mixtures()
    for block in model[1:3]:
        fsdpc.fully_shard(block, mesh=line, shard_placement_fn=place)
    fsdpc.fully_shard(model, mesh=line)
    assert model[1].experts.up.device_mesh == grid and model[1].router.weight.device_mesh == line
    return model


def expert_parallel() -> nn.Module:
    """Return a model whose experts are distributed over two ranks and sharded over two; the other
    parameters are sharded over four ranks.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "ep"))
    model = mixtures()
    for block in model[1:3]:
        block.experts.distribute(grid["ep"])
        fsdpc.fully_shard(block.experts, mesh=grid["shard"])
        block.experts.set_gradient_divide_factor(4)  # each expert sees tokens of four ranks
        fsdpc.fully_shard(block)
    return fsdpc.fully_shard(model)


@ranks(4)
@pytest.mark.parametrize("make", [one_mesh_per_parameter, expert_parallel])
def test_train_clip_save_and_load_on_several_meshes(rank, world, make):
    warnings.simplefilter("ignore")
    reference = mixtures()
    stepper = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norm = clipped_steps(model, optimizer, [rank], range(2))
    assert norm == pytest.approx(clipped_steps(reference, stepper, list(range(4)), range(2)))
    assert_equal(model, reference)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(5, 6)), reference(torch.ones(5, 6)))
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    fsdpc.checkpoint.save(folder[0] + "/saved", model, optimizer)
    again = make()
    resumed = torch.optim.AdamW(again.parameters(), lr=1e-2)
    fsdpc.checkpoint.load(folder[0] + "/saved", again, resumed)
    clipped_steps(again, resumed, [rank], range(2, 3))
    clipped_steps(reference, stepper, list(range(4)), range(2, 3))
    assert_equal(again, reference, "resumed")


def beside_tensor_parallelism(shape: tuple[int, ...]) -> nn.Module:
    """Return a model whose experts are split by tensor parallelism. All ranks of the mesh's last
    dimension hold the same shards of the other parameters.
    """
    names = ("replica", "shard", "tp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = mixtures()
    for block in model[1:3]:
        for name in ("up", "down"):
            cut = distribute_tensor(getattr(block.experts, name).detach(), mesh["tp"], [Shard(2)])
            setattr(block.experts, name, nn.Parameter(cut))
    data = mesh[names[:-1]] if len(shape) == 3 else mesh["shard"]
    for module in (*model[1:3], model):
        fsdpc.fully_shard(module, mesh=data)
    return model


def groups_of_two() -> nn.Module:
    """Return a model that is sharded over each of two groups of two ranks,
    so that each group holds the whole model.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "same"))
    return fsdpc.FullyShardedDataParallel(mixtures(), process_group=mesh.get_group("shard"))


@pytest.mark.long
@ranks(4)
def test_save_and_load_what_groups_of_ranks_hold_alike(rank, world):
    """All groups hold equal values. A checkpoint contains these values once, and all groups read
    them. This holds for any number of replicas, in both interfaces, and for a model without tensor
    parallelism.
    """
    warnings.simplefilter("ignore")
    makers = [
        lambda: beside_tensor_parallelism((2, 2)),
        lambda: beside_tensor_parallelism((2, 1, 2)),
        groups_of_two,
    ]
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    plain = mixtures()
    stepper = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for param in plain.parameters():
        param.grad = torch.ones_like(param)
    stepper.step()
    for number, make in enumerate(makers):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for param in model.parameters():
            param.grad = torch.zeros_like(param) + 1
        optimizer.step()
        path = f"{folder[0]}/{number}"
        fsdpc.checkpoint.save(path, model, optimizer)
        again = make()
        resumed = torch.optim.AdamW(again.parameters(), lr=1e-2)
        with torch.no_grad():
            for param in again.parameters():
                param.zero_()
        assert fsdpc.checkpoint.load(path, again, resumed).verified
        fsdpc.checkpoint.save(f"{path}-again", again, resumed)
        alone = mixtures()
        last = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        fsdpc.checkpoint.load(f"{path}-again", alone, last)
        assert_equal(alone, plain, str(number))
        for one, two in zip(alone.parameters(), plain.parameters(), strict=True):
            assert torch.equal(last.state[one]["exp_avg"], stepper.state[two]["exp_avg"])


@pytest.mark.long
@ranks(4)
@pytest.mark.parametrize("names", ["a b tp", "r a b", "r q s"])
def test_several_dimensions_in_dp_mesh_dims(rank, world, names):
    warnings.simplefilter("ignore")
    dims = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
    if dims is None:
        pytest.skip("torch 2.13 has DataParallelMeshDims")
    names = names.split()
    sizes = {"a b tp": (2, 1, 2), "r a b": (2, 2, 1), "r q s": (2, 1, 2)}
    mesh = init_device_mesh("cpu", sizes[" ".join(names)], mesh_dim_names=names)
    tp = 2 if "tp" in names else 1
    model, reference = (nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)) for _ in range(2))
    torch.manual_seed(1)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        other.data.copy_(torch.randn(mine.shape).div(3))
    for name, param in list(reference.named_parameters()):
        cut = Shard({"0": 0, "1": 1}[name[0]]) if tp == 2 and name != "1.bias" else Replicate()
        placements = [cut if each == "tp" else Replicate() for each in names]
        value = distribute_tensor(param.detach().clone(), mesh, placements)
        model[int(name[0])]._parameters[name[2:]] = nn.Parameter(value)
    shards, replicas = ("a", "b") if "a" in names else "s", tuple(n for n in names if n in "rq")
    for module in (*model, model):
        chosen = dims(shard=shards, replicate=replicas or None)
        fsdpc.fully_shard(module, mesh=mesh, dp_mesh_dims=chosen)
    if "a" in names:
        assert "a_b" in model[0].weight.device_mesh.mesh_dim_names
    batches = [Shard(0) if name != "tp" else Replicate() for name in names]
    for number in range(2):
        for data in range(4 // tp):
            torch.manual_seed(10 * number + data)
            x = torch.randn(3, 6)
            reference(x).pow(2).mean().div(4 // tp).backward()
            if data == rank // tp:
                out = model(DTensor.from_local(x, mesh, batches, run_check=False))
        out = out.redistribute(placements=batches).to_local()
        out.pow(2).mean().backward()
        for net in (model, reference):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            torch.optim.SGD(net.parameters(), lr=0.5).step()
            net.zero_grad()
    assert_equal(model, reference)


class Ring(torch.autograd.Function):
    """torch's ring attention over the ranks of a group, with the kernel for CPUs."""

    @staticmethod
    def forward(ctx, query, key, value, group):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = sys.modules[RING]._templated_ring_attention(
            group, 2, kernel, query, key, value, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = sys.modules[RING]._templated_ring_attention_backward(
            ctx.group, 2, kernel, grad, "grad_out", *ctx.saved_tensors, True, dropout_p=0.0
        )
        return *grads[:3], None


class Attention(nn.Module):
    group: Any = None  # the ranks of the group hold parts of each sequence

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        if self.group is None:
            out = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        else:
            out = Ring.apply(*heads, self.group)
        return x + self.out(out.transpose(1, 2).flatten(2))


@ranks(4)
def test_ring_attention_on_a_flattened_mesh(rank, world):
    """Each of the two ranks of a pair has one half of every sequence of the pair. Units are sharded
    over all four ranks.
    """
    warnings.simplefilter("ignore")
    pytest.importorskip(RING)._cp_options.enable_load_balance = False
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(3)
    reference = nn.Sequential(nn.Linear(8, 8), Attention(), Attention(), nn.Linear(8, 2))
    model = copy.deepcopy(reference)
    for layer in model[1:3]:
        layer.group = mesh.get_group("cp")
        fsdpc.fully_shard(layer, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    fsdpc.fully_shard(model, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (model, reference)]
    for number in range(2):
        for data in range(2):
            torch.manual_seed(10 * number + data)
            x = torch.randn(2, 8, 8)
            reference(x).pow(2).mean().div(2).backward()
            if data == rank // 2:
                model(x.chunk(2, 1)[rank % 2]).pow(2).mean().backward()
        for net, optimizer in zip((model, reference), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(model, reference)


# --- the default mesh ----------------------------------------------------------------------------


def destroy_group() -> str:
    """Destroy the process group; return the path of a file for the next group."""
    path = [tempfile.mktemp()]
    dist.broadcast_object_list(path)
    dist.destroy_process_group()
    return path[0]


@ranks(2, alone=True)
@pytest.mark.parametrize("beside_gpus", [False, True])
def test_units_share_a_mesh_that_keeps_no_group(rank, world, beside_gpus, monkeypatch):
    """On a machine with GPUs, a mesh of CPUs has its own process group, which is made only once.

    torch's caches of DTensor operations keep meshes alive, so no such operation runs before the
    group is destroyed.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: beside_gpus)
    mesh = default_mesh()
    assert default_mesh() is mesh
    assert (mesh.get_group() is dist.group.WORLD) is not beside_gpus
    group, seen = weakref.ref(dist.group.WORLD), weakref.ref(mesh)
    del mesh
    assert (seen() is not None) is beside_gpus  # a mesh that all ranks made together is kept
    path = destroy_group()
    assert group() is None and seen() is None
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=world)
    for model in shard_blocks(toy()), shard_blocks(toy()):
        assert {id(param.device_mesh) for param in model.parameters()} == {id(default_mesh())}
        loss_of(model, tokens(rank, 0)).backward()


@ranks(2, alone=True)
def test_a_destroyed_group_does_not_count(rank, world):
    """fsdpc ignores a destroyed group even if the program still keeps the group and its models.
    torch's caches keep groups too.
    """
    kept = dist.group.WORLD, shard_blocks(toy())
    path = destroy_group()
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=world)
    fsdpc.set_collectives("wire")
    model = shard_blocks(toy())
    assert nn.utils.clip_grad_norm_([], 1.0) == 0
    with pytest.raises(RuntimeError, match="uses 'wire' already"):
        fsdpc.set_collectives("shm")
    assert kept[0] is not dist.group.WORLD and kept[1] is not model
