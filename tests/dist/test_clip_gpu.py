"""Tests of clip_grad_norm_ on a simulated GPU: clipping by a norm needs no host synchronization."""

from __future__ import annotations

import env
import pytest
import simgpu
import torch
import torch.distributed as dist
from harness import ranks
from test_api_clip import averaged_reference, gradients
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import check_equal, full_gradients, loss_of, tokens, toy, wrap_blocks

from fsdpc._engine.unit import Unit

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
GPU = env.environment()


class Unread(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in func.name(), "a tensor was read"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("use_orig_params", [True, False])
@ranks(1, 2, env=GPU)
def test_clipping_by_the_norm_needs_no_host_sync(rank, world, engine, use_orig_params):
    def looked(*arguments):
        raise AssertionError("the norm was taken on the host")

    Unit.grad_norm_sums = looked
    model = wrap_blocks(engine, toy(), use_orig_params=use_orig_params)
    for call, norm_type in enumerate([2.0, 2.0, float("inf"), 1.5]):
        reference = averaged_reference(lambda r: tokens(r, 0))
        model.zero_grad()
        loss_of(model, tokens(rank, 0)).backward()
        with simgpu.counting() as cost, Unread():
            norm = model.clip_grad_norm_(0.1, norm_type)
        assert cost["host_syncs"] == 0 and (call == 0 or cost["allocations"] == 0)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
        check_equal(full_gradients(model), gradients(reference), "clipped", rtol=1e-5)


@ranks(2, env=GPU)
def test_ranks_without_gradients_take_part(rank, world, engine):
    model = wrap_blocks(engine, toy())
    loss_of(model, tokens(rank, 0)).backward()
    if rank == 1:
        model.zero_grad()
    norm = model.clip_grad_norm_(1e6)
    everyone = [torch.zeros(()) for _ in range(world)]
    dist.all_gather(everyone, norm)
    assert everyone[0] == everyone[1] > 0
