"""Tests of other wrappers in the same program: DDP beside and around fsdpc, torch's fully_shard,
and tensor-parallel parameters. Each wrapper works as it does without fsdpc, or an error says in one
sentence why the wrapper cannot work, and what to do.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import (
    Block,
    Reference,
    check_equal,
    check_gradients,
    loss_of,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)

import fsdpc

STEPS = 3
both_ways = pytest.mark.parametrize("use_orig_params", [True, False])
both_collectives = pytest.mark.parametrize("collectives", ["auto", "wire"])


def sgd(*modules):
    params = {id(p): p for m in modules for p in m.parameters()}  # modules may share parameters
    return torch.optim.SGD(params.values(), lr=0.1)


def turn(*optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@ranks(2)
@both_ways
@both_collectives
def test_ddp_beside(rank, world, use_orig_params, collectives):
    """A generator under fsdpc and a critic under DDP train by one loss and one backward."""
    fsdpc.set_collectives(collectives)
    generator, critic = toy(seed=0), nn.Linear(13, 1)
    references = Reference(generator), Reference(critic)
    sharded = wrap_blocks("fsdpc", generator, use_orig_params=use_orig_params)
    critic = DDP(critic)
    optimizers = [sgd(sharded), sgd(critic), *(sgd(r.master) for r in references)]
    for step in range(STEPS):
        batch = tokens(rank, step)
        critic(sharded(batch)).square().mean().backward()
        for reference in references:
            refresh(reference)
        plain_generator, plain_critic = (r.compute for r in references)
        plain_critic(plain_generator(batch)).square().mean().backward()
        for reference in references:
            reference.take_gradients()
            reference.reduce()
        check_gradients("fsdpc", sharded, references[0], f"of step {step}")
        check_equal(
            {n: p.grad for n, p in critic.module.named_parameters()},
            references[1].gradients(),
            f"critic, step {step}",
            rtol=1e-6,
        )
        turn(*optimizers)
        check_equal(
            dict(critic.module.named_parameters()),
            references[1].parameters(),
            f"critic after step {step}",
            rtol=1e-5,
        )
        with torch.no_grad():  # DDP's mean may round once more, so both go on from DDP's values
            for p, q in zip(critic.parameters(), references[1].master.parameters(), strict=True):
                q.copy_(p)


def refresh(reference):
    with torch.no_grad():
        pairs = zip(reference.compute.parameters(), reference.master.parameters(), strict=True)
        for low, high in pairs:
            low.copy_(high)


class Mixed(nn.Module):
    """An unsharded root module. Its block is sharded, and DDP replicates its other layers
    (`ends`)."""

    def __init__(self, ends: nn.Module, block: nn.Module) -> None:
        super().__init__()
        self.ends, self.block = ends, block

    def forward(self, batch):
        return self.ends(batch, self.block)


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 6), nn.Linear(6, 13)

    def forward(self, batch, block):
        return self.head(block(self.embed(batch)))


@ranks(2)
@both_ways
def test_fsdp_and_ddp_inside_a_plain_root(rank, world, use_orig_params):
    torch.manual_seed(0)
    plain = Mixed(Ends(), nn.Sequential(Block(6), Block(6)))
    reference = Reference(plain)
    block = wrap_blocks("fsdpc", plain.block, use_orig_params=use_orig_params)
    model = Mixed(DDP(plain.ends), block)
    optimizers = sgd(model), sgd(reference.master)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        ends = {n: p for n, p in reference.gradients().items() if n.startswith("ends.")}
        check_equal(
            {f"ends.{n}": p.grad for n, p in model.ends.module.named_parameters()},
            ends,
            f"ends, step {step}",
            rtol=1e-6,
        )
        whole = {f"block.{n}": p for n, p in full(block).items()}
        inside = {n: p for n, p in reference.parameters().items() if n.startswith("block.")}
        check_equal(whole, inside, f"block before step {step}", rtol=1e-5)
        turn(*optimizers)


def full(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@ranks(2)
@both_ways
def test_ddp_of_what_fsdpc_ignores(rank, world, use_orig_params):
    """fsdpc ignores the embedding, and a separate DDP module replicates it."""
    model = toy()
    reference = Reference(model)
    model.embed = DDP(model.embed)
    sharded = wrap_blocks(
        "fsdpc", model, use_orig_params=use_orig_params, ignored_modules=[model.embed]
    )
    optimizers = sgd(sharded), sgd(reference.master)
    for step in range(STEPS):
        loss_of(sharded, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        turn(*optimizers)
        got = {n.replace("embed.module.", "embed."): v for n, v in full(sharded).items()}
        check_equal(got, reference.parameters(), f"after step {step}", rtol=1e-5)


@ranks(2)
@both_ways
def test_ddp_around_an_fsdpc_model(rank, world, use_orig_params):
    """DDP gets only the parameters that fsdpc ignores. If fsdpc ignores none, DDP raises an error:
    the model has no parameters for DDP."""
    model = toy()
    reference = Reference(model)
    sharded = wrap_blocks(
        "fsdpc", model, use_orig_params=use_orig_params, ignored_modules=[model.embed]
    )
    model = DDP(sharded)
    optimizers = sgd(model), sgd(reference.master)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        turn(*optimizers)
        check_equal(full(sharded), reference.parameters(), f"after step {step}", rtol=1e-5)
    with pytest.raises(RuntimeError, match="doesn't have any parameter"):
        DDP(wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params))


@ranks(2)
def test_ddp_inside_a_unit_is_refused(rank, world):
    model = toy()
    model.embed = DDP(model.embed)
    with pytest.raises(ValueError, match=r"parameter 'embed.module.weight'.*ignored_modules"):
        wrap("fsdpc", model)


@ranks(2)
@both_ways
@both_collectives
def test_fully_shard_beside(rank, world, use_orig_params, collectives):
    """torch's FSDP2 and an fsdpc model train in one program, also in one backward."""
    fsdpc.set_collectives(collectives)
    first, second = toy(seed=0), nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 13))
    both = copy.deepcopy(nn.Sequential(first, second))
    reference = Reference(both)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(second[0], mesh=mesh)
    fully_shard(second, mesh=mesh)
    sharded = wrap_blocks("fsdpc", first, use_orig_params=use_orig_params)
    model = nn.Sequential(sharded, second)
    assert not isinstance(second, fsdpc.FSDP)
    assert all(isinstance(p, DTensor) for p in second.parameters())
    optimizers = sgd(sharded), sgd(second), sgd(reference.master)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        turn(*optimizers)
        got = {f"0.{n}": v for n, v in full(sharded).items()}
        got |= {f"1.{n}": p.detach().full_tensor() for n, p in second.named_parameters()}
        check_equal(got, reference.parameters(), f"after step {step}", rtol=1e-5)


@ranks(2)
def test_units_of_two_kinds_in_one_tree_are_refused(rank, world):
    """The error names a parameter that fully_shard made inside a unit, and says how to go on."""
    model = toy()
    fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(ValueError, match=r"parameter 'blocks.0.norm.weight'.*DTensor.*fully_shard"):
        wrap("fsdpc", model)


class Parallel(nn.Module):
    """A block whose linear layers are split over a mesh dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 13)

    def forward(self, batch):
        x = self.embed(batch)
        return self.head(x + self.down(torch.tanh(self.up(x))))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


@ranks(4)
def test_tensor_parallel_parameters_are_refused(rank, world):
    """The error names the mesh dimension. The error is raised before any parameter is sharded and
    before any rank waits."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = parallelize_module(Parallel(), mesh["model"], PLAN)
    with pytest.raises(
        ValueError,
        match=r"parameter 'up.weight' of unit 'Parallel' is a DTensor.*'model'"
        r".*ignored_states",
    ):
        wrap("fsdpc", model, device_mesh=mesh["data"], use_orig_params=True)
    dist.barrier()


@ranks(4)
@both_ways
def test_tensor_parallel_beside(rank, world, use_orig_params):
    """Tensor parallelism is supported in this way: fsdpc ignores the tensor-parallel layers, and
    shards the other parameters over the data dimension. The program itself averages the gradients
    of the tensor-parallel layers over the data-parallel ranks."""
    torch.manual_seed(0)
    model = Parallel()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    data = mesh["data"].get_local_rank()
    # The ranks of one tensor-parallel group get the same batch.
    reference = Reference(model)
    parallelize_module(model, mesh["model"], PLAN)
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    sharded = wrap(
        "fsdpc",
        model,
        device_mesh=mesh["data"],
        ignored_states=split,
        use_orig_params=use_orig_params,
    )
    optimizers = sgd(sharded), sgd(reference.master)
    for step in range(STEPS):
        loss_of(sharded, tokens(data, step)).backward()
        for p in split:
            dist.all_reduce(p.grad._local_tensor, group=mesh["data"].get_group())
            p.grad._local_tensor.div_(2)
        reference.backward(tokens(data, step))
        turn(*optimizers)
        got = {
            n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in full(sharded).items()
        }
        check_equal(got, reference.parameters(), f"after step {step}", rtol=1e-5)


def by_kind(kind, module):
    """Shard `module`, with one unit for each block and one unit for the other parameters."""
    if kind != "fully_shard":
        return wrap_blocks("fsdpc", module, use_orig_params=kind == "original")
    for block in module.children():
        fsdpc.fully_shard(block)
    return fsdpc.fully_shard(module)


class ByTransforms(nn.Module):
    """A model that calls one of its blocks by torch.func.vjp inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        y, back = torch.func.vjp(self.second, self.first(x))
        return y + back(torch.ones_like(y))[0]


@ranks(2)
@pytest.mark.parametrize("kind", ["original", "flat", "fully_shard"])
def test_transforms_of_torch_func(rank, world, kind):
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    nested = ByTransforms()
    x = torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(1))
    tangent = torch.ones_like(x[0])
    programs = {
        "vmap": lambda m: torch.func.vmap(m)(x).pow(2).sum(),
        "jvp": lambda m: sum(out.pow(2).sum() for out in torch.func.jvp(m, (x[0],), (tangent,))),
        "forward": lambda m: m(x[0]).pow(2).sum(),
    }
    for module, names in ((plain, ("jvp", "vmap")), (nested, ("forward",))):
        expected = copy.deepcopy(module)
        model = by_kind(kind, module)
        for name in names:
            loss, other = programs[name](model), programs[name](expected)
            loss.backward()
            other.backward()
            torch.testing.assert_close(loss, other)
            got = [sum_of(p.grad) for p in model.parameters()]
            if kind == "fully_shard":
                wanted = [p.grad.double().pow(2).sum() for p in expected.parameters()]
                torch.testing.assert_close(got, wanted)
            squares = sum(got)
            if kind != "fully_shard":
                dist.all_reduce(squares)
            wanted = sum(p.grad.double().pow(2).sum() for p in expected.parameters())
            torch.testing.assert_close(squares, wanted)
            model.zero_grad()
            expected.zero_grad()


class ReturnsWeight(Block):
    """A module that returns a view of its weight. The view is used after the unit has been
    released."""

    def forward(self, x):
        return self.up.weight[: x.shape[0]]


class UsesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = ReturnsWeight(), Block()

    def forward(self, x):
        rows = self.table(x)
        return self.block(x) + rows


@ranks(2)
@pytest.mark.parametrize("kind", ["original", "flat", "fully_shard"])
def test_views_of_weights_that_units_return_inside_transforms(rank, world, kind, monkeypatch):
    monkeypatch.setenv("FSDPC_POISON", "1")
    torch.manual_seed(0)
    module = UsesWeight()
    expected = copy.deepcopy(module)
    model = by_kind(kind, module)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    programs = {
        "jvp": lambda m: torch.func.jvp(m, (x,), (torch.ones_like(x),)),
        "vjp": lambda m: torch.func.vjp(m, x)[0],
        "grad": lambda m: torch.func.grad(lambda y: m(y).square().sum())(x),
        "vmap of jvp": lambda m: torch.func.vmap(
            lambda y: torch.func.jvp(m, (y,), (torch.ones_like(y),))[1]
        )(torch.stack([x, 2 * x])),
    }
    with torch.no_grad():
        for run in programs.values():
            for each in (model, expected):  # change the parameters before each transform
                for p in each.parameters():
                    p.data = p.data * 0.5
            torch.testing.assert_close(run(model), run(expected))


def sum_of(grad):
    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return torch.zeros((), dtype=torch.double) if whole is None else whole.double().pow(2).sum()


@ranks(2)
@pytest.mark.parametrize("kind", ["original", "flat", "fully_shard"])
def test_a_failed_export_leaves_the_model_as_it_was(rank, world, kind):
    model = by_kind(kind, nn.Sequential(Block(), Block()))
    x = torch.ones(3, 6)
    for _ in range(2):  # before the first forward, and after one
        with pytest.raises(NotImplementedError, match="export the unsharded module"):
            torch.export.export(model, (x,), strict=False)
        model(x).sum().backward()
    assert torch.equal(model(x), copy_of(model)(x))


def copy_of(model):
    plain = nn.Sequential(Block(), Block())
    options = StateDictOptions(full_state_dict=True)
    plain.load_state_dict(get_model_state_dict(model, options=options))
    return plain
