"""Evaluation, activation checkpointing, lists of modules, outputs, and kinds of layers."""

from __future__ import annotations

import collections
import dataclasses
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from chain import Chain, chain, inputs, linear
from outcome import raises, wrong
from rows_library import RowsLibrary, whole
from suite import BOTH, Cases
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint
from toys import Block, loss_of, toy

case = Cases(__name__, __file__, library=RowsLibrary)


# --- no_grad and evaluation ----------------------------------------------------------------------


@case(over={"reshard": [None, True, False]})
def forwards_without_gradients(lib, reshard):
    model = lib.shard_blocks(toy(), reshard_after_forward=reshard)
    with torch.no_grad():
        return [model(lib.batch(step)) for step in range(3)]


@case()
def only_evaluation_in_inference_mode(lib):
    model = lib.shard_blocks(toy())
    loss_of(model, lib.batch()).backward()
    model.zero_grad()
    with torch.inference_mode():
        return model(lib.batch())


# --- activation checkpointing --------------------------------------------------------------------


@case(over={"reentrant": BOTH, "order": ["inside", "outside"]})
def activation_checkpointing(lib, reentrant, order):
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT

    def wrap(module):
        return checkpoint_wrapper(module, checkpoint_impl=impl)

    model = toy()
    if order == "inside":  # the checkpoint wrapper is the unit
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, Block)
        )
        for block in model.blocks:
            lib.fully_shard(block)
    else:
        for block in model.blocks:
            lib.fully_shard(block)
        model.blocks = nn.ModuleList(wrap(block) for block in model.blocks)
    lib.fully_shard(model)
    return lib.train(model)


class Looped(nn.Module):
    """A layer that is called and checkpointed three times.

    The checkpoint is reentrant, so that a backward runs inside of a backward.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return x


def looped_steps(lib, model, ranks=None):
    """Return the parameters after four steps on the batches of `ranks` (default: this rank)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        for rank in [lib.rank] if ranks is None else ranks:
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(4, 3, generator=generator).requires_grad_(step > 0)
            (model(x).square().sum() / (1 if ranks is None else len(ranks))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return lib.full(model)


@case(over={"first": BOTH})
def a_checkpointed_layer_that_is_called_again(lib, first):
    """The layer is in the first unit or in a later one.

    The input of the model requires no gradient in the first step.
    """
    torch.manual_seed(1)
    parts = [Looped(), nn.Linear(3, 3)] if first else [nn.Linear(3, 3), Looped(), nn.Linear(3, 3)]
    model = nn.Sequential(*parts)
    lib.fully_shard(model[len(parts) - 2])
    lib.fully_shard(model)
    return looped_steps(lib, model)


@case(torch=wrong("off by"), fsdpc_does="adds all of them")
def gradients_of_a_unit_that_reentrant_checkpoints_call_again(lib):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), Looped(), nn.Linear(3, 3))
    plain = deepcopy(model)
    for module in (model[1].layer, model[1], model):
        lib.fully_shard(module)
    got, expected = looped_steps(lib, model), looped_steps(lib, plain, ranks=range(lib.world))
    for name, value in expected.items():
        gap = (got[name] - value).abs().max().item()
        assert gap <= 1e-5, f"{name} is off by {gap}"


@case(over={"reentrant": BOTH})
def checkpoint_calls_in_forward(lib, reentrant):
    class Saving(Chain):
        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=reentrant))
            return x

    model = lib.shard_blocks(Saving(), nn.Linear)
    model(inputs(lib, requires_grad=True)).sum().backward()
    return lib.gradients(model)


# --- lists ---------------------------------------------------------------------------------------


class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = linear(), linear(seed=1), linear(seed=2)

    def forward(self, x, last=True):
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(x) if last else x


def ends(lib, **options):
    model = Ends()
    lib.fully_shard(model.middle)
    lib.fully_shard([model.first, model.last], **options)
    return lib.fully_shard(model)


@case(over={"reshard": [None, True, False]})
def a_list_of_modules(lib, reshard):
    model = ends(lib, reshard_after_forward=reshard)
    return lib.full_after(model, lambda step: model(inputs(lib, step)).sum())


@case()
def a_list_whose_last_member_is_not_called(lib):
    model = ends(lib)
    for step in range(2):
        model(inputs(lib, step), last=step == 1).square().sum().backward()
    return lib.gradients(model)


@case()
def a_members_later_call(lib):
    model = ends(lib)
    (model(inputs(lib)).sum() + model.first(inputs(lib, 1)).sum()).backward()
    return lib.gradients(model)


@case()
def a_list_under_accumulation(lib):
    model = ends(lib)
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        model(inputs(lib, micro)).sum().backward()
    return lib.gradients(model)


@case(torch=raises(RuntimeError, "single root module"), fsdpc_does="trains")
def a_list_as_root(lib):
    """fully_shard of a list of modules that have no common parent"""
    first, last = lib.fully_shard([linear(), linear(seed=1)])
    last(torch.tanh(first(inputs(lib)))).sum().backward()
    plain = nn.Sequential(linear(), nn.Tanh(), linear(seed=1))
    for rank in range(lib.world):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))
        (plain(x).sum() / lib.world).backward()
    for module, copy in ((first, plain[0]), (last, plain[2])):
        for name, grad in lib.gradients(module).items():
            torch.testing.assert_close(grad, copy.get_parameter(name).grad)


# --- outputs -------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    a: Any
    b: Any = None


class Box:
    """An object of a class in which neither library can find tensors."""

    def __init__(self, a):
        self.a = a


SHAPES = {
    "dict": (lambda y: {"a": y}, lambda o: o["a"]),
    "tuple": (lambda y: (1, y), lambda o: o[1]),
    "list": (lambda y: [y, None], lambda o: o[0]),
    "namedtuple": (lambda y: Pair(y, 2), lambda o: o.a),
    "dataclass": (lambda y: Record(y), lambda o: o.a),
    "nested": (lambda y: {"x": [(y,)]}, lambda o: o["x"][0][0]),
}


class Shaped(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.inner, self.make = linear(), make

    def forward(self, x):
        return self.make(self.inner(x))


@case(over={"shape": list(SHAPES)})
def shapes_of_outputs(lib, shape):
    make, take = SHAPES[shape]
    model = nn.Module()
    model.unit = lib.fully_shard(Shaped(make))
    model.forward = lambda x: take(model.unit(x))
    lib.fully_shard(model)
    take(model.unit(inputs(lib))).square().sum().backward()
    return lib.gradients(model.unit)


@case(torch=wrong("None"), fsdpc=raises(RuntimeError, "was not gathered"))
def an_output_in_an_object(lib):
    """an output in an object of the user's class"""
    model = lib.fully_shard(Shaped(Box))
    model(inputs(lib)).a.sum().backward()
    grads = lib.gradients(model)
    assert all(g is not None for g in grads.values()), f"None: {grads}"


@case(fsdpc=raises(RuntimeError, "was not gathered"))
def an_output_of_an_inner_unit_in_an_object(lib):
    model = nn.Sequential(Shaped(Box), Open())
    lib.fully_shard(model[0])
    lib.fully_shard(model)
    model(inputs(lib)).sum().backward()


class Open(nn.Module):
    def forward(self, box):
        return box.a


@case()
def an_output_that_is_a_view(lib):
    class Flat(nn.Linear):
        def forward(self, x):
            return super().forward(x).view(-1)

    torch.manual_seed(0)
    model = lib.fully_shard(Flat(3, 3))
    model(inputs(lib)).square().sum().backward()
    return lib.gradients(model)


@case()
def an_output_that_is_an_input(lib):
    class Same(nn.Linear):
        def forward(self, x):
            return x, super().forward(x)

    torch.manual_seed(0)
    model = lib.fully_shard(Same(3, 3))
    same, out = model(inputs(lib, requires_grad=True))
    (same * out).sum().backward()
    return lib.gradients(model)


@case()
def an_output_without_gradient(lib):
    class Mixed(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y.detach(), y.argmax(-1)

    torch.manual_seed(0)
    model = lib.fully_shard(Mixed(3, 3))
    y, plain, best = model(inputs(lib))
    y.sum().backward()
    return plain.requires_grad, best, lib.gradients(model)


# --- many steps ----------------------------------------------------------------------------------


@case(rtol=1e-4)
def ten_steps(lib):
    return lib.train(lib.shard_blocks(toy()), 10)


@case()
def two_models_in_turn(lib):
    """A generator and a discriminator train in turn."""
    g, d = chain(lib), lib.fully_shard(nn.Sequential(linear(3), nn.Tanh(), linear(1, 3)))
    og = torch.optim.SGD(g.parameters(), lr=0.1)
    od = torch.optim.SGD(d.parameters(), lr=0.1)
    for step in range(2):
        (d(g(inputs(lib, step)).detach()).mean() - d(inputs(lib, 9)).mean()).backward()
        od.step()
        od.zero_grad()
        (-d(g(inputs(lib, step))).mean()).backward()
        og.step()
        og.zero_grad()
        od.zero_grad()
    return lib.full(g), lib.full(d)


@case()
def a_teacher_and_a_student(lib):
    teacher, student = chain(lib).requires_grad_(False), chain(lib)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(0.5)

    def loss(step):
        with torch.no_grad():
            target = teacher(inputs(lib, step))
        return nn.functional.mse_loss(student(inputs(lib, step)), target)

    return lib.full_after(student, loss), lib.full(teacher)


@case()
def generation_token_by_token(lib):
    """Greedy decoding feeds each predicted token back to the model."""
    model = lib.shard_blocks(toy())
    ids = lib.batch()[:1]
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids


@case()
def batches_of_different_lengths(lib):
    """The lengths of batches differ between ranks and between steps."""
    model = lib.shard_blocks(toy())
    return lib.full_after(
        model, lambda step: loss_of(model, lib.batch(step)[:, : 2 + lib.rank + step])
    )


@case()
def a_loss_summed_over_ranks(lib):
    model = lib.shard_blocks(toy())
    loss = loss_of(model, lib.batch())
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total, whole(next(iter(model.blocks.parameters())).grad)


@case(over={"layers": BOTH})
def recurrent_networks(lib, layers):
    torch.manual_seed(0)
    model = nn.LSTM(3, 4, num_layers=2 if layers else 1, batch_first=True)
    lib.fully_shard(model)
    out, (h, _) = model(torch.ones(2, 4, 3) * (1 + lib.rank))
    (out.sum() + h.sum()).backward()
    return lib.gradients(model)


@case()
def attention(lib):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    for part in model.layers:
        lib.fully_shard(part)
    lib.fully_shard(model)
    torch.manual_seed(lib.rank)
    model(torch.randn(2, 5, 8)).square().mean().backward()
    return lib.gradients(model)


@case()
def convolutions(lib):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, 1))
    lib.fully_shard(model)
    torch.manual_seed(lib.rank)
    model(torch.randn(2, 3, 6, 6)).square().mean().backward()
    return lib.gradients(model), dict(model.named_buffers())


@case()
def dropout(lib):
    """A recomputation draws the same random numbers as the forward."""
    model = nn.Sequential(linear(), nn.Dropout(0.5), linear(seed=1))
    model = lib.fully_shard(checkpoint_wrapper(model))
    torch.manual_seed(5)
    model(inputs(lib)).sum().backward()
    return lib.gradients(model)


test_torch, test_fsdpc = case.tests()
