"""Tests of ``torch.autocast`` around sharded models. The copies of weights that autocast makes do
not outlive a forward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import tokens, toy, wrap_blocks

BOTH = pytest.mark.parametrize("use_orig_params", [True, False])


class Casts(TorchDispatchMode):
    """Records the sizes of the tensors that are cast while this mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.sizes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


@ranks(1, 2)
@BOTH
def test_losses_and_gradients_are_the_unsharded_models(rank, world, use_orig_params):
    plain, model = toy(), wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    losses = []
    for module in (plain, model):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses.append([])
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = module(tokens(0, step)).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@ranks(2)
@BOTH
def test_no_copy_of_a_weight_is_kept(rank, world, use_orig_params):
    inner = nn.Sequential(nn.Linear(4, 4, bias=False))
    model = wrap_blocks("fsdpc", inner, nn.Linear, use_orig_params=use_orig_params)
    x = torch.ones(2, 4)
    model(x)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with Casts() as casts:
                first = model(x)
            assert torch.Size([4, 4]) in casts.sizes
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        assert torch.equal(model(x), 2 * first)
