"""FSDPModule's methods."""

from __future__ import annotations

import torch
from outcome import raises, wrong
from rows_library import RowsLibrary, linear, shown
from suite import BOTH, Cases
from torch import nn
from toys import loss_of, toy

case = Cases(__name__, __file__, library=RowsLibrary)


# --- unshard and reshard -------------------------------------------------------------------------


@case()
def unsharding_before_the_first_forward(lib):
    model = lib.fully_shard(linear())
    model.unshard()
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    full = shown(model)
    model.reshard()
    return full, values, shown(model), lib.full(model)


@case()
def unsharding_one_unit_of_a_model(lib):
    model = lib.shard_blocks(toy())
    model(lib.batch())
    model.reshard()
    model.blocks[0].unshard()
    return shown(model)


@case(over={"times": [1, 2, 3]})
def unsharding_again(lib, times):
    model = lib.fully_shard(linear())
    for _ in range(times):
        model.unshard()
    before = shown(model)
    for _ in range(times):
        model.reshard()
    return before, shown(model), lib.full(model)


@case()
def unsharding_asynchronously(lib):
    model = lib.shard_blocks(toy())
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    handle.wait()
    assert isinstance(handle, torch.distributed.fsdp.UnshardHandle)
    return model.blocks[0].unshard(), shown(model.blocks[0])


@case()
def unsharding_without_waiting(lib):
    model = lib.fully_shard(linear())
    model.unshard(async_op=True)
    model(torch.ones(1, 3)).sum().backward()
    return lib.gradients(model)


@case(over={"times": [1, 2]})
def unsharding_ahead_of_forward(lib, times):
    model = lib.shard_blocks(toy())

    def loss(step):
        for _ in range(times):
            for block in model.blocks:
                block.unshard(async_op=True)
        return loss_of(model, lib.batch(step))

    return lib.full_after(model, loss)


@case()
def unsharding_a_unit_without_parameters(lib):
    model = lib.fully_shard(nn.Tanh())
    handle = model.unshard(async_op=True)
    handle.wait()
    model.reshard()
    return model(torch.ones(1))


@case(fsdpc=raises(RuntimeError, "were changed in place"))
def writes_to_full_parameters_are_lost(lib):
    """a write to full parameters between unshard and reshard"""
    model = lib.fully_shard(linear())
    model.unshard()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    model.reshard()
    return lib.full(model)


@case()
def unsharding_after_a_write_to_the_shard(lib):
    model = lib.fully_shard(linear())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    model.unshard()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@case()
def resharding_between_forward_and_backward(lib):
    model = lib.shard_blocks(toy(), reshard_after_forward=False)
    loss = loss_of(model, lib.batch())
    for block in model.blocks:
        block.reshard()
    model.reshard()
    between = shown(model)
    loss.backward()
    return between, lib.gradients(model)


@case()
def resharding_what_is_sharded(lib):
    model = lib.fully_shard(linear())
    model.reshard()
    model.reshard()
    return shown(model)


@case()
def forward_in_an_unsharded_model(lib):
    """Two forwards without gradients use parameters that unshard() has gathered once."""
    model = lib.shard_blocks(toy())
    with torch.no_grad():
        model.unshard()
        for block in model.blocks:
            block.unshard()
        return [model(lib.batch(step)) for step in range(2)]


# --- when gradients are reduced ------------------------------------------------------------------


@case(over={"strategy": [None, True, False]})
def training_with_accumulation(lib, strategy):
    model = lib.shard_blocks(toy(), reshard_after_forward=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(2):
        for micro in range(3):
            lib.backward(model, step, micro, micro == 2)
        optimizer.step()
        optimizer.zero_grad()
    return lib.full(model)


def shows_values(lib, model):
    """Return, for each parameter, whether its gradient on this rank has a value other than zero."""
    lib.resharded(model)
    return [p.grad is not None and bool(p.grad.to_local().any()) for p in model.parameters()]


@case()
def gradients_without_sync_are_hidden(lib):
    """The gradient that a parameter shows is None or zero until the gradient is reduced."""
    model = lib.shard_blocks(toy())
    lib.backward(model, sync=False)
    return shows_values(lib, model)


@case(torch=wrong("differ"), fsdpc_does="zero_grad discards them")
def gradients_without_sync_that_are_cleared(lib):
    """zero_grad while gradients wait for a reduction"""
    model = lib.shard_blocks(toy())
    lib.backward(model, 0, 0, sync=False)
    model.zero_grad()
    lib.backward(model, 0, 1)
    other = lib.shard_blocks(toy())
    lib.backward(other, 0, 1)
    expected = lib.gradients(other)
    for name, grad in lib.gradients(model).items():
        assert torch.equal(grad, expected[name]), f"gradients of {name} differ"


@case()
def one_unit_without_sync(lib):
    """One block keeps its gradients for the next backward, and the other units reduce theirs."""
    model = lib.shard_blocks(toy())
    model.blocks[0].set_requires_gradient_sync(False)
    loss_of(model, lib.batch(0, 0)).backward()
    model.blocks[0].set_requires_gradient_sync(True)
    loss_of(model, lib.batch(0, 1)).backward()
    return lib.gradients(model)


@case()
def sync_of_the_root_alone(lib):
    """recurse=False"""
    model = lib.shard_blocks(toy())
    model.set_requires_gradient_sync(False, recurse=False)
    loss_of(model, lib.batch(0, 0)).backward()
    model.set_requires_gradient_sync(True, recurse=False)
    loss_of(model, lib.batch(0, 1)).backward()
    return lib.gradients(model)


def sum_by_turns(lib, model, pattern):
    """Run a backward for each character of `pattern`, and return the results of shows_values.

    The character says which units reduce their gradients: a digit is the index of one block, "*"
    means all units, and "-" means no unit. shows_values is called after each backward.
    """
    seen = []
    for micro, unit in enumerate(pattern):
        model.set_requires_gradient_sync(unit == "*")
        if unit in "01":
            model.blocks[int(unit)].set_requires_gradient_sync(True)
        loss_of(model, lib.batch(0, micro)).backward()
        seen.append(shows_values(lib, model))
    return seen


@case(over={"pattern": ["0*", "1-*", "01*", "0-01*", "*0*"]})
def units_that_are_summed_by_turns(lib, pattern):
    """Only the units whose flag is set reduce their gradients, and only these gradients show."""
    model = lib.shard_blocks(toy())
    return sum_by_turns(lib, model, pattern), lib.gradients(model)


@case(env={"FSDPC_COLLECTIVES": "c10d"})
def units_that_are_summed_by_turns_over_a_wire(lib):
    model = lib.shard_blocks(toy())
    return sum_by_turns(lib, model, "01-*"), lib.gradients(model)


@case(world=4)
def units_that_are_summed_by_turns_over_replicas(lib):
    model = lib.shard_blocks(toy(), mesh=lib.mesh(2, 2))
    return sum_by_turns(lib, model, "01-*"), lib.gradients(model)


@case(over={"unit": ["0", "1"]})
def a_step_of_the_units_that_are_summed(lib, unit):
    """An optimizer's step changes only the unit whose gradients were reduced."""
    model = lib.shard_blocks(toy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sum_by_turns(lib, model, unit)
    optimizer.step()
    summed = model.blocks[int(unit)]
    for p in summed.parameters():
        p.grad = None
    sum_by_turns(lib, model, "*")
    optimizer.step()
    return lib.full(model)


@case(world=4)
def both_flags_must_be_set(lib):
    """set_requires_all_reduce(True) has no effect while set_requires_gradient_sync is False."""
    model = lib.shard_blocks(toy(), mesh=lib.mesh(2, 2))
    model.set_requires_gradient_sync(False)
    model.set_requires_all_reduce(True)
    loss_of(model, lib.batch(0, 0)).backward()
    seen = shows_values(lib, model)
    model.set_requires_gradient_sync(True)
    loss_of(model, lib.batch(0, 1)).backward()
    return seen, lib.gradients(model)


@case()
def sync_set_after_forward(lib):
    """set_requires_gradient_sync takes effect in backward, even if the forward has run before."""
    model = lib.shard_blocks(toy())
    loss = loss_of(model, lib.batch(0, 0))
    model.set_requires_gradient_sync(False)
    loss.backward()
    loss = loss_of(model, lib.batch(0, 1))
    model.set_requires_gradient_sync(True)
    loss.backward()
    return lib.gradients(model)


@case()
def a_synchronised_pass_that_skips_a_unit(lib):
    """A synchronised pass reduces a unit's kept gradients, even if the pass skips the unit."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(3, 3), linear(3, 3)

        def forward(self, x, both):
            return self.b(self.a(x)) if both else self.a(x)

    model = Two()
    lib.fully_shard(model.a)
    lib.fully_shard(model.b)
    lib.fully_shard(model)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 3) + lib.rank, True).sum().backward()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 3) + lib.rank, False).sum().backward()
    return lib.gradients(model)


@case(over={"last": BOTH})
def is_last_backward(lib, last):
    model = lib.shard_blocks(toy())
    model.set_is_last_backward(last)
    loss_of(model, lib.batch(0, 0)).backward()
    model.set_is_last_backward(True)
    loss_of(model, lib.batch(0, 1)).backward()
    return lib.gradients(model)


@case()
def a_pipelines_three_setters(lib):
    """A pipeline schedule calls these three setters around its micro-batches."""
    model = lib.shard_blocks(toy())
    for micro in range(3):
        last = micro == 2
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        model.set_requires_gradient_sync(last)
        loss_of(model, lib.batch(0, micro)).backward()
    return lib.gradients(model), shown(model) == [n for n, _ in model.named_parameters()]


@case(world=4, over={"pattern": ["01", "001", "0101"]})
def reduction_over_replicas_later(lib, pattern):
    """set_requires_all_reduce"""
    model = lib.shard_blocks(toy(), mesh=lib.mesh(2, 2))
    for micro, sync in enumerate(pattern):
        model.set_requires_all_reduce(sync == "1")
        loss_of(model, lib.batch(0, micro)).backward()
    return lib.gradients(model)


@case(world=4)
def reduction_over_replicas_never_shows_partial_sums(lib):
    model = lib.shard_blocks(toy(), mesh=lib.mesh(2, 2))
    model.set_requires_all_reduce(False)
    loss_of(model, lib.batch()).backward()
    return shows_values(lib, model)


@case(world=4)
def accumulation_with_replicas(lib):
    return lib.gradients_after(lib.shard_blocks(toy(), mesh=lib.mesh(2, 2)), "001")


@case()
def requires_all_reduce_without_replicas(lib):
    """set_requires_all_reduce(False) has no effect on a 1-D mesh."""
    model = lib.shard_blocks(toy())
    model.set_requires_all_reduce(False)
    return lib.gradients_after(model)


# --- what stays gathered -------------------------------------------------------------------------


@case(over={"value": BOTH, "recurse": BOTH, "when": ["before", "between"]})
def reshard_after_forward_set_later(lib, value, recurse, when):
    model = lib.shard_blocks(toy())
    if when == "between":
        loss_of(model, lib.batch()).backward()
        model.zero_grad()
    model.set_reshard_after_forward(value, recurse=recurse)
    loss_of(model, lib.batch(1)).backward()
    return lib.gradients(model)


@case(raises=ValueError, words="should be a bool", over={"value": [2, None, "yes"]})
def reshard_after_forward_set_to_no_bool(lib, value):
    lib.fully_shard(linear()).set_reshard_after_forward(value)


@case(over={"value": BOTH, "recurse": BOTH})
def reshard_after_backward(lib, value, recurse):
    """set_reshard_after_backward(value) takes effect between the micro-batches of a step."""
    model = lib.shard_blocks(toy())
    model.set_reshard_after_backward(value, recurse=recurse)
    return lib.gradients_after(model, "01")


@case(over={"value": BOTH})
def unshard_in_backward(lib, value):
    """The unit is an embedding, because the backward of an embedding does not read the weight."""
    model = toy()
    lib.fully_shard(model.embed)
    model.embed.set_unshard_in_backward(value)
    return lib.train(lib.fully_shard(model))


test_torch, test_fsdpc = case.tests()
