"""One iteration: which units run, how often and in which order, and what gradients result."""

from __future__ import annotations

import torch
from chain import Chain, chain, inputs, linear
from outcome import raises
from rows_library import RowsLibrary
from suite import BOTH, Cases
from torch import nn
from toys import Block, Reference, check_equal, loss_of, toy

case = Cases(__name__, __file__, library=RowsLibrary)


def check_training(lib, model, steps=3):
    """Train the sharded model beside an unsharded reference on every rank, and compare the two."""
    reference = Reference(model)
    lib.shard_blocks(model)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, reference.master)]
    for step in range(steps):
        loss_of(model, lib.batch(step)).backward()
        reference.backward(lib.batch(step))
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    check_equal(lib.full(model), reference.parameters(), "parameters", rtol=1e-5)


@case(over={"blocks": [1, 2, 5]})
def training_as_the_unsharded_model(lib, blocks):
    check_training(lib, toy(blocks=blocks))


@case(world=3)
def training_on_three_ranks(lib):
    check_training(lib, toy())


@case(world=4)
def training_on_four_ranks(lib):
    check_training(lib, toy(blocks=3))


@case(over={"reshard": [None, True, False], "classes": [(), (nn.Linear,), (Block, nn.Linear)]})
def nested_units(lib, reshard, classes):
    return lib.train(lib.shard_blocks(toy(), *classes, reshard_after_forward=reshard))


@case(over={"order": [(0, 1, 2), (2, 1, 0), (0, 0, 0), (0, 1, 0, 1), (1,), (0, 2, 2)]})
def orders_of_units(lib, order):
    model = chain(lib)
    model(inputs(lib), order).sum().backward()
    return lib.gradients(model)


@case()
def orders_that_change_between_steps(lib):
    model = chain(lib)
    orders = [(0, 1, 2), (2, 0), (1,), (0, 1, 2), (2, 1, 0, 0)]
    return lib.full_after(model, lambda step: model(inputs(lib, step), orders[step]).sum(), count=5)


@case(over={"first": [(0, 1, 2), (1, 0)], "second": [(0, 1, 2), (2,)]})
def two_forwards_before_one_backward(lib, first, second):
    model = chain(lib)
    (model(inputs(lib), first).sum() + model(inputs(lib, 1), second).sum()).backward()
    return lib.gradients(model)


@case()
def two_forwards_and_two_backwards(lib):
    model = chain(lib)
    a, b = model(inputs(lib)).sum(), model(inputs(lib, 1)).sum()
    a.backward()
    b.backward()
    return lib.gradients(model)


@case()
def two_forwards_and_two_backwards_in_reverse(lib):
    model = chain(lib)
    a, b = model(inputs(lib)).sum(), model(inputs(lib, 1)).sum()
    b.backward()
    a.backward()
    return lib.gradients(model)


@case()
def a_forward_whose_output_is_not_used(lib):
    model = chain(lib)
    model(inputs(lib, 5))
    model(inputs(lib)).sum().backward()
    return lib.gradients(model)


@case()
def a_contrastive_step(lib):
    """The loss compares the outputs of two forwards of the same model."""
    model = chain(lib)
    a, b = model(inputs(lib)), model(inputs(lib, 1))
    nn.functional.mse_loss(a, b).backward()
    return lib.gradients(model)


@case()
def a_penalty_beside_the_loss(lib):
    model = chain(lib)
    out = model(inputs(lib))
    (out.sum() + model.layers[0](inputs(lib)).square().sum()).backward()
    return lib.gradients(model)


@case(over={"first": [True, False], "none": [True, False]})
def a_penalty_on_sharded_parameters(lib, first, none):
    """The penalty is computed before the forward or after it, and added to the loss."""
    model = lib.shard_blocks(toy())
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)

    def penalty():
        return 0.1 * sum(p.square().sum() for p in params).full_tensor()

    for step in range(2):
        before = penalty() if first else 0.0
        loss = loss_of(model, lib.batch(step)) + before
        (loss if first else loss + penalty()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)
    return lib.full(model)


@case(over={"times": [2, 3], "reshard": [None, True, False]})
def backward_of_a_kept_graph(lib, times, reshard):
    model = chain(lib, reshard_after_forward=reshard)
    loss = model(inputs(lib)).square().sum()
    for i in range(times):
        loss.backward(retain_graph=i + 1 < times)
    return lib.gradients(model)


@case()
def losses_of_parts_of_one_forward(lib):
    """Two backwards go through the same graph, each from one row of the output."""
    model = chain(lib)
    out = model(inputs(lib))
    out[0].sum().backward(retain_graph=True)
    out[1].sum().backward()
    return lib.gradients(model)


@case()
def a_unit_called_after_the_root(lib):
    model = chain(lib)
    out = model(inputs(lib))
    model.layers[1](out).sum().backward()
    return lib.gradients(model)


@case()
def units_called_directly_in_later_steps(lib):
    model = chain(lib)
    model(inputs(lib)).sum().backward()
    model.zero_grad()
    model.layers[0](inputs(lib)).sum().backward()
    return lib.gradients(model.layers)


@case(
    torch=raises(RuntimeError, "already been lazily initialized"),
    fsdpc_does="joins the outer root's tree",
)
def a_unit_called_before_the_root(lib):
    """a unit called before its root"""
    model = chain(lib)
    model.layers[0](inputs(lib)).sum().backward()
    model.zero_grad()
    check_chain(lib, model)


def check_chain(lib, model, order=(0, 1, 2)):
    """Compare the gradients of one pass with those of an unsharded model.

    The latter are averages over the batches of all ranks.
    """
    model.zero_grad()
    model(inputs(lib), order).sum().backward()
    got = lib.gradients(model)
    plain = Chain()
    for rank in range(lib.world):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))
        (plain(x, order).sum() / lib.world).backward()
    for name, p in plain.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(got[name], p.grad)


@case(over={"order": [(0, 1, 2), (1, 1), (2,)]})
def gradients_as_those_of_the_unsharded_model(lib, order):
    check_chain(lib, chain(lib), order)


# --- unused, frozen ------------------------------------------------------------------------------


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = linear(), linear(seed=1)
        self.alone = nn.Parameter(torch.ones(3))

    def forward(self, x, both=False):
        return self.spare(self.used(x)) if both else self.used(x)


@case(over={"inner": BOTH})
def parameters_that_no_rank_uses(lib, inner):
    model = Optional()
    if inner:
        lib.fully_shard(model.used)
        lib.fully_shard(model.spare)
    lib.fully_shard(model)
    model(inputs(lib)).sum().backward()
    return lib.gradients(model)


@case()
def weight_decay_of_unused_parameters(lib):
    """Weight decay does not change unused parameters, because these have no gradient."""
    model = lib.fully_shard(Optional())
    return lib.full_after(
        model,
        lambda step: model(inputs(lib, step)).sum(),
        count=2,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5),
    )


@case()
def parameters_used_in_some_steps(lib):
    model = lib.fully_shard(Optional())
    return lib.full_after(
        model,
        lambda step: model(inputs(lib, step), both=step % 2 == 1).sum(),
        count=4,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3, weight_decay=0.5),
    )


@case(over={"frozen": ["blocks.0", "embed", "head", "blocks"], "reshard": [None, True]})
def frozen_parts(lib, frozen, reshard):
    model = toy()
    model.get_submodule(frozen).requires_grad_(False)
    return lib.train(lib.shard_blocks(model, reshard_after_forward=reshard))


@case()
def frozen_beside_trainable_parameters(lib):
    """As with adapters, each unit has frozen parameters beside trainable ones."""
    model = toy()
    for name, p in model.named_parameters():
        p.requires_grad_("up" in name)
    return lib.train(lib.shard_blocks(model))


@case()
def everything_frozen(lib):
    model = toy().requires_grad_(False)
    lib.shard_blocks(model)
    out = model(lib.batch())
    return out.requires_grad, out


test_torch, test_fsdpc = case.tests()
