"""Ranks of one host that evaluate on different numbers of batches."""

from __future__ import annotations

import pytest
import torch
from harness import ranks
from toys import loss_of, tokens, toy, wrap_blocks

import fsdpc


def sharded(door: str) -> torch.nn.Module:
    model = toy()
    if door != "fully_shard":
        return wrap_blocks("fsdpc", model, use_orig_params=door == "orig")
    for block in model.blocks:
        fsdpc.fully_shard(block)
    return fsdpc.fully_shard(model)


@torch.no_grad()
def evaluate_other_weights(model: torch.nn.Module, rank: int, batches: int) -> None:
    kept = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.mul_(0.5)
    for step in range(batches):
        model(tokens(rank, step))
    for param, value in zip(model.parameters(), kept, strict=True):
        param.copy_(value)


@ranks(2, 3)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
def test_training_after_other_weights(rank, world, door):
    """A training forward uses the weights that were put back, not those that another rank has
    gathered for one more batch of averaged weights.
    """
    losses = []
    for uneven in (False, True):
        model = sharded(door)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for step in range(4):
            if uneven:
                evaluate_other_weights(model, rank, 1 + rank)
            loss = loss_of(model, tokens(rank, step))
            loss.backward()
            losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == losses[1]


@ranks(2, 3)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
def test_training_after_batches_between_backward_and_step(rank, world, door):
    """A training forward uses the weights after the step of all ranks, also of one that was still
    evaluating with those before.
    """
    losses = []
    for uneven in (False, True):
        model = sharded(door)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for step in range(6):
            loss = loss_of(model, tokens(rank, step))
            loss.backward()
            losses[-1].append(loss.item())
            with torch.no_grad():
                for batch in range((rank + step) % world + 1 if uneven and step < 5 else 0):
                    model(tokens(rank, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == losses[1]
