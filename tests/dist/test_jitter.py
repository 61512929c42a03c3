"""Tests of random delays: ranks are delayed, and models still train correctly.

In earlier versions, delays showed races in these models.
"""

from __future__ import annotations

import jitter
import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from toys import Reference, check_equal, full_gradients, tokens, toy, wrap_blocks


@ranks(2, env={"FSDPC_TEST_JITTER": "3"})
def test_ranks_are_late_at_random_places(rank, world):
    with jitter.jittered("3", rank) as delays:
        first = [model_step(delays) for _ in range(4)]
    assert first[-1] > 0.0, "no rank slept"
    again = jitter.Delays("3", rank)
    other = jitter.Delays("3", 1 - rank)
    drawn = [
        [d.random.random() for _ in range(9)] for d in (jitter.Delays("3", rank), again, other)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_files_whose_graphs_race_have_delays_always(monkeypatch):
    monkeypatch.delenv("FSDPC_TEST_JITTER", raising=False)
    for name, late in (("dist.test_late_frozen", True), ("test_memory", False)):
        with jitter.delays_of(0, name) as delays:
            assert (delays is not None) == late, name
    monkeypatch.setenv("FSDPC_TEST_JITTER", "")
    with jitter.delays_of(0, "test_late_frozen") as delays:
        assert delays is None


def model_step(delays):
    model = toy()
    model(tokens(0, 0)).sum().backward()
    return delays.slept


class LowRank(nn.Module):
    """A frozen layer beside two small trainable layers, as in peft."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def squares(model, batch):
    return (model(batch) ** 2).sum()


@ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP], ids=lambda s: s.name
)
def test_frozen_layers_beside_trained_ones(rank, world, engine, strategy, seed, use_orig_params):
    torch.manual_seed(0)
    model = nn.Sequential(*(LowRank() for _ in range(6)))
    reference = Reference(model, loss_of=squares)
    sharded = wrap_blocks(
        engine, model, LowRank, sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    with jitter.jittered(f"lora {seed}", rank):
        for step in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
            squares(sharded, mine).backward()
            reference.backward(other)
            check_equal(
                {"input": mine.grad}, {"input": other.grad}, f"input of step {step}", rtol=1e-6
            )
            check_equal(full_gradients(sharded), reference.gradients(), f"step {step}", rtol=1e-6)
