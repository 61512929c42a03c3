"""Training states, apply and conversions, activation wrappers, ties across units."""

from __future__ import annotations

import functools

import torch
from outcome import any_of, raises, wrong
from suite import BOTH, Cases
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp._common_utils import TrainingState
from toys import Block, clean, loss_of, toy

case = Cases(__name__, __file__)


# --- states --------------------------------------------------------------------------------------


@case()
def states_of_a_step(lib):
    states = []
    model = lib.wrap_blocks(toy())

    def note(*_):
        states.append(
            (
                model.training_state is TrainingState.IDLE,
                model.blocks[0].training_state is TrainingState.IDLE,
            )
        )

    note()
    model.blocks[0].up.register_forward_hook(note)
    loss = loss_of(model, lib.batch())
    note()
    loss.backward()
    note()
    with lib.FSDP.summon_full_params(model):
        states.append(model.training_state)
    note()
    return states[0], states[2:], states[1][1]


@case()
def an_assertion_about_the_state(lib):
    model = lib.wrap(toy())
    model._assert_state(TrainingState.IDLE)
    model._assert_state([TrainingState.IDLE, TrainingState.FORWARD_BACKWARD])
    return lib.refuses(ValueError, model._assert_state, TrainingState.SUMMON_FULL_PARAMS)


# --- apply and conversions -----------------------------------------------------------------------


@case(over={"orig": BOTH})
def apply_sees_whole_parameters_and_keeps_changes(lib, orig):
    model, seen = lib.wrap_blocks(toy(), use_orig_params=orig), []

    def fill(module):
        if isinstance(module, nn.Linear):
            seen.append(tuple(module.weight.shape))
            with torch.no_grad():
                module.weight.fill_(0.25)

    assert model.apply(fill) is model
    return seen, lib.full(model)


@case()
def apply_inside_summon(lib):
    model = lib.wrap(toy())
    with lib.FSDP.summon_full_params(model):
        return lib.refuses(ValueError, model.apply, lambda m: None)


@case()
def apply_before_and_after_a_step(lib):
    model = lib.wrap_blocks(toy())

    def double(module):
        with torch.no_grad():
            for p in module.parameters(recurse=False):
                p.mul_(2)

    model.apply(double)
    first = lib.train(model, steps=1)
    model.apply(double)
    return first, lib.train(model, steps=1)


@case()
def conversions_that_change_nothing(lib):
    model = lib.wrap_blocks(toy())
    assert model.to("cpu") is model and model.float() is model
    return lib.train(model)


@case(
    torch=raises(ValueError, "dtypes"), fsdpc_does="trains on in the new dtype", over={"orig": BOTH}
)
def conversions_between_steps(lib, orig):
    """double() after a step"""
    model = lib.wrap_blocks(toy(), use_orig_params=orig)
    lib.train(model)
    model.double()
    loss_of(model, lib.batch()).backward()
    assert {g.dtype for g in lib.gradients(model).values()} == {torch.float64}


@case(over={"orig": BOTH})
def requires_grad_of_everything(lib, orig):
    model = lib.wrap(nn.Sequential(nn.Linear(3, 3)), use_orig_params=orig).requires_grad_(False)
    x = torch.ones(1, 3, requires_grad=True)
    model(x).sum().backward()
    return [p.grad is None for p in model.parameters()], x.grad


# --- activation wrappers -------------------------------------------------------------------------


@case(over={"impl": list(CheckpointImpl)})
def checkpointed_blocks_inside_units(lib, impl):
    model = toy()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = lib.wrap(checkpoint_wrapper(block, impl))
    model = lib.wrap(model)
    assert isinstance(model.blocks[0].module, Block)
    return lib.train(model), list(model.state_dict())


@case(over={"impl": list(CheckpointImpl)})
def units_inside_checkpoints(lib, impl):
    model = lib.wrap_blocks(toy())
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, lib.FSDP)
    )
    return lib.train(model), list(model.state_dict())


@case()
def offloaded_activations(lib):
    model = toy()
    model.blocks[0] = offload_wrapper(model.blocks[0])
    model = lib.wrap_blocks(model)
    return list(model.state_dict()), [clean(n) for n, _ in model.named_modules()]


@case()
def checkpointing_in_a_forward(lib):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Block(6), Block(6)

        def forward(self, x):
            return checkpoint(
                self.b, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False
            )

    model = lib.wrap_blocks(Checkpointed())
    model(torch.full((2, 6), 0.3 * (1 + lib.rank))).sum().backward()
    return lib.gradients(model)


# --- what torch's class gets wrong ---------------------------------------------------------------


@case(torch=any_of(raises(RuntimeError), wrong()), fsdpc=raises(ValueError, "tied"))
def a_weight_tied_across_two_units(lib):
    model = toy(width=6, vocabulary=13)
    model.head.weight = model.embed.weight
    model = lib.wrap_blocks(model, nn.Embedding)
    lib.train(model)
    values = lib.full(model)
    assert torch.equal(values["embed.weight"], values["head.weight"]), "the tie broke silently"


test_torch, test_fsdpc = case.tests()
