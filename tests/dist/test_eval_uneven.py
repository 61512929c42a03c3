"""Ranks of one host that evaluate on different numbers of batches."""

from __future__ import annotations

from collections.abc import Callable

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
    evaluate(model, rank, batches)
    for param, value in zip(model.parameters(), kept, strict=True):
        param.copy_(value)


@torch.no_grad()
def evaluate(model: torch.nn.Module, rank: int, batches: int) -> None:
    for step in range(batches):
        model(tokens(rank, step))


def losses(
    door: str, rank: int, first: Callable[..., None] | None, between: Callable[..., None] | None
) -> list[float]:
    """Of six steps; `first(model, step)` runs before each, `between` between backward and step."""
    model = sharded(door)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(6):
        if first is not None:
            first(model, step)
        loss = loss_of(model, tokens(rank, step))
        loss.backward()
        found.append(loss.item())
        if between is not None and step < 5:  # ranks wait for each other's next training step
            between(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return found


@ranks(2, 3)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
def test_training_after_other_weights(rank, world, door):
    """A training forward uses the weights that were put back, not those that another rank has
    gathered for one more batch of averaged weights.
    """
    uneven = losses(
        door, rank, lambda model, _: evaluate_other_weights(model, rank, 1 + rank), None
    )
    assert uneven == losses(door, rank, None, None)


@ranks(2, 3)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
def test_training_after_batches_between_backward_and_step(rank, world, door):
    """A training forward uses the weights after the step of all ranks, also of one that was still
    evaluating with those before.
    """
    uneven = losses(
        door, rank, None, lambda model, step: evaluate(model, rank, (rank + step) % world + 1)
    )
    assert uneven == losses(door, rank, None, None)
