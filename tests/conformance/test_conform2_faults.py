"""Programs with which torch's fully_shard fails, hangs, dies or is silently wrong on CPU ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from chain import inputs_of as inputs
from chain import linear
from outcome import HANGS, any_of, dies, raises, wrong
from rows_library import RowsLibrary
from suite import Cases
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from toys import Reference, loss_of, toy

case = Cases(__name__, __file__, library=RowsLibrary)


def close(got, expected, what):
    assert got is not None, f"{what}: None"
    gap = float((got - expected).abs().max())
    assert gap <= 1e-5 * (1.0 + float(expected.abs().max())), f"{what}: off by {gap:.3g}"


# --- stale weights -------------------------------------------------------------------------------


@case(
    torch=wrong("off by"),
    fsdpc_does="gathers again when weights have changed",
    over={"reshard": [None, False]},
)
def validation_between_backward_and_step(lib, reshard):
    """a validation forward between backward and optimizer.step()"""
    model, plain = lib.shard_blocks(toy(), reshard_after_forward=reshard), toy()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=1.0)
    loss_of(model, lib.batch()).backward()
    with torch.no_grad():
        model(lib.batch(1))
    optimizer.step()
    with torch.no_grad():
        after = model(lib.batch(1))
    plain.load_state_dict(lib.full(model))
    close(after, plain(lib.batch(1)), "logits after the step")


@case(torch=wrong("off by"), fsdpc_does="gathers again when weights have changed")
def a_forward_whose_graph_is_dropped(lib):
    """a forward without a backward, then training"""
    model, reference = lib.shard_blocks(toy()), Reference(toy())
    model(lib.batch())
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=1.0)) for m in (model, reference.master)]
    for step in range(2):
        loss = loss_of(model, lib.batch(step))
        loss.backward()
        close(loss.detach(), reference.backward(lib.batch(step)), f"loss of step {step}")
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()


@case(torch=wrong("off by"), fsdpc_does="gathers again when weights have changed")
def weights_written_while_the_root_is_gathered(lib):
    """weights written between two forwards without gradients"""
    model = lib.fully_shard(linear())
    params, x = list(model.parameters()), inputs(0)
    with torch.no_grad():
        before = model(x)
        for p in params:
            p.mul_(2)
        close(model(x), 2 * before, "output")


# --- what kills training -------------------------------------------------------------------------


@case(torch=raises(RuntimeError, "inference tensor"), fsdpc_does="trains")
def a_first_forward_in_inference_mode(lib):
    """the first forward under torch.inference_mode"""
    model, reference = toy(), toy()
    lib.shard_blocks(model)
    with torch.inference_mode():
        close(model(lib.batch()).clone(), reference(lib.batch()).detach(), "logits")
    loss_of(model, lib.batch()).backward()
    beside = Reference(reference)
    beside.backward(lib.batch())
    for name, grad in lib.gradients(model).items():
        close(grad, beside.gradients()[name], name)


@case(
    torch=raises(RuntimeError, "PREMUL_SUM"),
    fsdpc_does="divides by the factor",
    over={"factor": [1.0, 3.0, 8.0]},
)
def a_divide_factor(lib, factor):
    """set_gradient_divide_factor with a value that is not the world size"""
    model, plain = lib.fully_shard(linear()), linear()
    model.set_gradient_divide_factor(factor)
    model(inputs(lib.rank)).sum().backward()
    for rank in range(lib.world):
        (plain(inputs(rank)).sum() / factor).backward()
    close(lib.gradients(model)["weight"], plain.weight.grad, "gradient")


@case(world=1, torch=wrong("off by"), fsdpc_does="divides once")
def a_divide_factor_on_one_rank(lib):
    """a divide factor with forced sum reductions, on one rank"""
    model, plain = lib.fully_shard(linear()), linear()
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(2.0)
    model(inputs(0)).sum().backward()
    (plain(inputs(0)).sum() / 2).backward()
    close(lib.gradients(model)["weight"], plain.weight.grad, "gradient")


@case(world=4, torch=wrong("off by"), fsdpc_does="divides once")
def a_divide_factor_with_replicas_of_whole_models(lib):
    """a divide factor in fp16 on a mesh of (4, 1)"""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model, plain = lib.fully_shard(linear(), mesh=lib.mesh(4, 1), mp_policy=policy), linear()
    model.set_gradient_divide_factor(4.0)
    x = torch.ones(1, 3)
    model(x).sum().backward()
    plain(x).sum().backward()
    close(lib.gradients(model)["weight"], plain.weight.grad, "gradient")


# --- ranks that do different things --------------------------------------------------------------


class Choice(nn.Module):
    """A module with two layers, `a` and `b`. The caller chooses the layer that forward uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b = linear(seed=1), linear(seed=2)

    def forward(self, x, which):
        return (self.a if which == 0 else self.b)(x)


def check_choice(lib, model, steps=2):
    plain = Choice()
    for step in range(steps):
        model(inputs(lib.rank, step), lib.rank % 2).sum().backward()
        for rank in range(lib.world):
            (plain(inputs(rank, step), rank % 2).sum() / lib.world).backward()
    got = lib.gradients(model)
    for name, p in plain.named_parameters():
        close(got[name], p.grad, name)


@case(
    alone=20.0,
    torch=any_of(dies("SIGABRT"), raises(RuntimeError), HANGS, wrong()),
    fsdpc_does="reduces zeros for what a rank did not use",
)
def ranks_that_use_different_parameters(lib):
    """ranks use different parameters of one unit"""
    check_choice(lib, lib.fully_shard(Choice()))


@case(
    alone=15.0,
    torch=any_of(HANGS, wrong(), raises(RuntimeError), dies("SIGABRT")),
    fsdpc_does="lets the ranks wait for nobody",
)
def ranks_that_use_different_units(lib):
    """ranks use different units"""
    model = Choice()
    lib.fully_shard(model.a)
    lib.fully_shard(model.b)
    check_choice(lib, lib.fully_shard(model))


@case()
def ranks_that_use_different_parameters_with_zeros(lib):
    """torch needs set_reduce_scatter_unused_params for this program."""
    model = lib.fully_shard(Choice())
    model.set_reduce_scatter_unused_params(True)
    check_choice(lib, model)
    return lib.gradients(model)


# --- graphs --------------------------------------------------------------------------------------


def penalised(model, x):
    """Run the backward of a gradient penalty: the loss is computed from the input's gradient."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
    grad.square().sum().backward()


@case(torch=raises(RuntimeError, "storage of size 0"), fsdpc_does="gathers again")
def second_derivatives(lib):
    """a gradient penalty (create_graph=True) through units that are released"""
    model, plain = (nn.Sequential(linear(), nn.Tanh(), linear(seed=1)) for _ in range(2))
    lib.fully_shard(model[0])
    lib.fully_shard(model[2])
    lib.fully_shard(model)
    penalised(model, inputs(lib.rank))
    for rank in range(lib.world):
        penalised(plain, inputs(rank))
    for name, grad in lib.gradients(model).items():
        expected = plain.get_parameter(name).grad
        if expected is not None:
            close(grad, expected / lib.world, name)


# --- meta ----------------------------------------------------------------------------------------


def different(a, b):
    assert not torch.equal(a, b), "equal random rows on both ranks"


@case(
    torch=wrong("equal random rows"),
    fsdpc_does="draws different rows on each rank",
    over={"how": ["reset_parameters", "normal_"]},
)
def random_values_of_shards(lib, how):
    """random values in sharded parameters, with one seed on all ranks"""
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    lib.fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.reset_parameters() if how == "reset_parameters" else model.weight.normal_()
    full = lib.full(model)["weight"]
    different(full[:2], full[2:])


# --- different models ----------------------------------------------------------------------------


@case(
    alone=15.0,
    torch=any_of(dies("SIGABRT"), raises(RuntimeError), HANGS, wrong()),
    fsdpc=raises(RuntimeError, "weight"),
)
def ranks_with_different_shapes(lib):
    """a parameter of another shape on one rank"""
    model = lib.fully_shard(linear(4 + 4 * lib.rank))
    total = lib.full(model)["weight"].sum()
    dist.all_reduce(total)
    raise AssertionError("nothing is noticed")


@case(torch=wrong("nothing is noticed"), fsdpc=raises(RuntimeError, "reduce"))
def ranks_with_different_policies(lib):
    """one rank gives another reduce_dtype than the other ranks"""
    dtype = torch.float32 if lib.rank else torch.float64
    lib.fully_shard(linear(), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    raise AssertionError("nothing is noticed")


@case(torch=wrong("nothing is noticed"), fsdpc=raises(RuntimeError, "reshard_after_forward"))
def ranks_with_different_resharding(lib):
    """one rank gives another reshard_after_forward than the others"""
    lib.fully_shard(linear(), reshard_after_forward=lib.rank == 0)
    raise AssertionError("nothing is noticed")


@case(torch=wrong("off by"), fsdpc_does="always frees parameters: no step uses old ones")
def an_optimizer_step_without_resharding(lib):
    """an optimizer step after set_reshard_after_backward(False)"""
    model, plain = lib.shard_blocks(toy()), toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.set_reshard_after_backward(False)
    loss_of(model, lib.batch()).backward()
    optimizer.step()
    with torch.no_grad():
        after = model(lib.batch(1))
    plain.load_state_dict(lib.full(model))
    close(after, plain(lib.batch(1)).detach(), "logits after the step")


@case(torch=wrong("nothing is noticed"), fsdpc=raises(RuntimeError, "frozen"))
def ranks_with_different_frozen_parameters(lib):
    """a parameter is frozen on one rank only"""
    model = linear()
    model.weight.requires_grad_(lib.rank == 0)
    lib.fully_shard(model)
    raise AssertionError("nothing is noticed")


test_torch, test_fsdpc = case.tests()
