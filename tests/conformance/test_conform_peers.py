"""What a rank sees when another rank is absent, dies, raises, or does something different."""

from __future__ import annotations

import os
import signal

import torch
from outcome import HANGS, WORKS, any_of, dies, raises, wrong
from suite import Cases
from torch import nn
from toys import Block, loss_of, toy

case = Cases(__name__, __file__)

SECONDS = 5  # torch's ranks count as hanging after this time; fsdpc's FSDPC_TIMEOUT is 4
BROKEN = any_of(HANGS, wrong(), raises(RuntimeError), dies("SIGABRT"))


def names_the_rank(call):
    """Check that a call, which rank 1 does not make, raises an error that names rank 1."""
    try:
        call()
    except Exception as error:
        assert "rank 1" in str(error), f"names no rank: {type(error).__name__}: {error}"
        return
    raise AssertionError("returned as if all were well")


@case(torch=HANGS, fsdpc_does="names the rank that did not come", alone=SECONDS)
def a_state_dict_on_one_rank(lib):
    """state_dict() called by one rank only"""
    model = lib.wrap_blocks(toy())
    model.check_is_root()
    if lib.rank == 0:
        names_the_rank(model.state_dict)


@case(torch=HANGS, fsdpc_does="names the rank that did not come", alone=SECONDS)
def summon_on_one_rank(lib):
    """summon_full_params called by one rank only"""
    model = lib.wrap_blocks(toy())
    model.check_is_root()
    if lib.rank == 0:
        names_the_rank(lambda: lib.full(model))


@case(torch=HANGS, fsdpc_does="names the rank that did not come", alone=SECONDS)
def a_backward_on_one_rank(lib):
    """backward() called by one rank only"""
    model = lib.wrap_blocks(toy())
    loss = loss_of(model, lib.batch())
    if lib.rank == 0:
        names_the_rank(loss.backward)


@case(
    torch=wrong("names no rank"),
    fsdpc=any_of(WORKS, dies("SIGKILL")),
    alone=30,
    fsdpc_does="names the dead rank",
)
def a_rank_that_dies_in_a_step(lib):
    """A rank is killed between forward and backward"""
    model = lib.wrap_blocks(toy())
    loss = loss_of(model, lib.batch())
    if lib.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    names_the_rank(loss.backward)


@case(torch=BROKEN, alone=SECONDS, fsdpc=raises(ValueError), fsdpc_does="names what differs")
def models_that_differ(lib):
    """Ranks construct models with different shapes"""
    model = lib.wrap(nn.Linear(4, 4 if lib.rank == 0 else 5))
    model(torch.ones(1, 4)).sum().backward()
    assert lib.full(model)["weight"].shape == (4, 4), "goes on with different models"


@case(torch=BROKEN, alone=SECONDS, fsdpc=raises(ValueError))
def options_that_differ(lib):
    """Ranks give different options"""
    from torch.distributed.fsdp import MixedPrecision

    mixed = MixedPrecision(param_dtype=torch.bfloat16) if lib.rank == 0 else None
    model = lib.wrap(nn.Linear(4, 4), mixed_precision=mixed)
    model(torch.ones(1, 4)).float().sum().backward()
    raise AssertionError("goes on with different options")


class Swapped(nn.Module):
    """A module that runs two blocks, in reverse order if `swapped`."""

    def __init__(self, swapped):
        super().__init__()
        self.first, self.second = Block(6), Block(6)
        self.swapped = swapped

    def forward(self, x):
        blocks = (self.first, self.second)
        for block in reversed(blocks) if self.swapped else blocks:
            x = block(x)
        return x


@case(torch=BROKEN, alone=SECONDS, fsdpc_does="each rank computes with its own blocks")
def units_in_different_orders(lib):
    """Ranks run their units in different orders"""
    torch.manual_seed(0)
    reference = Swapped(lib.rank == 1)
    x = torch.full((2, 6), 0.5)
    expected = reference(x).detach()
    model = lib.wrap_blocks(reference)
    got = model(x)
    got.sum().backward()
    assert torch.allclose(got, expected), "another unit's weights were used"


@case(torch=HANGS, fsdpc_does="names the rank that did not come", alone=SECONDS)
def a_rank_that_raises_in_a_forward(lib):
    """One rank's forward raises, and the rank goes on with something else"""
    model = lib.wrap_blocks(toy())
    if lib.rank == 1:
        lib.refuses(IndexError, model, torch.full((1, 2), 99))
        return
    names_the_rank(lambda: loss_of(model, lib.batch()).backward())


test_torch, test_fsdpc = case.tests()
