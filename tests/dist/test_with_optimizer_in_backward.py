"""Tests of hooks and optimizers that run when a sharded parameter's gradient is ready.

An unsharded model gets the same batches. Both models must end with equal parameters.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from toys import (
    Block,
    Reference,
    check_equal,
    check_gradients,
    check_parameters,
    full_parameters,
    loss_of,
    no_sync_if,
    tokens,
    toy,
    wrap_blocks,
)

both_ways = pytest.mark.parametrize("use_orig_params", [True, False])
STEPS = 3
# A module that is imported once, before the ranks are forked, because the import compiles code.
LOADED_BY_RANKS = ["torch.distributed.optim"]


def apply_in_backward(*about):
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(*about)


@ranks(1, 2, 3)
@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
    ids=lambda s: s.name,
)
@pytest.mark.parametrize("collectives", ["shm", "wire"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_optimizer_in_backward(rank, world, strategy, collectives, when):
    """AdamW steps inside backward, whether it is applied before or after wrapping. No other
    optimizer steps."""
    from torch.distributed.optim import _get_in_backward_optimizers

    os.environ["FSDPC_COLLECTIVES"] = collectives
    settings = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
    model = toy()
    groups = [[r] for r in range(world)] if strategy is ShardingStrategy.NO_SHARD else None
    reference = Reference(model, groups=groups)
    optimizer = torch.optim.AdamW(reference.master.parameters(), **settings)
    if when == "before":
        apply_in_backward(torch.optim.AdamW, model.parameters(), settings)
    model = wrap_blocks("fsdpc", model, use_orig_params=True, sharding_strategy=strategy)
    if when == "after":
        apply_in_backward(torch.optim.AdamW, model.parameters(), settings)
    assert len(_get_in_backward_optimizers(model)) == len(list(model.parameters()))
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        assert all(p.grad is None for p in model.parameters())
        reference.backward(tokens(rank, step))
        optimizer.step()
        optimizer.zero_grad()
        # gloo adds the gradients of three ranks in its own order
        check_equal(
            full_parameters(model),
            reference.parameters(),
            f"after step {step}",
            rtol=1e-5 if collectives == "wire" else 0.0,
        )


@ranks(2)
def test_optimizer_in_backward_for_some_parameters(rank, world):
    """Parameters without an optimizer in backward keep their gradients for an optimizer outside of
    backward."""
    model = toy()
    reference = Reference(model)
    model = wrap_blocks("fsdpc", model, use_orig_params=True)
    inside = [p for n, p in model.named_parameters() if "blocks" in n]
    outside = [p for n, p in model.named_parameters() if "blocks" not in n]
    apply_in_backward(torch.optim.SGD, inside, {"lr": 0.1, "momentum": 0.9})
    optimizer = torch.optim.SGD(outside, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.master.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        assert all(p.grad is None for p in inside)
        assert all((p.grad is not None) == (p.numel() > 0) for p in outside)
        optimizer.step()
        optimizer.zero_grad()
        reference.backward(tokens(rank, step))
        plain.step()
        plain.zero_grad()
        check_parameters("fsdpc", model, reference, f"after step {step}")


@ranks(1, 2, 3)
@both_ways
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
def test_post_accumulate_grad_hooks(rank, world, use_orig_params, mixed):
    """Hooks run once per backward for each parameter, in the same order on every rank. They see the
    reduced gradient, which is the value that an optimizer would see after backward."""
    options = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)} if mixed else {}
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params, **options)
    heard: list[tuple[str, torch.Tensor]] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: heard.append((name, p.grad.clone()))
        )
    names = [name for name, _ in model.named_parameters()]
    orders: list[list[str]] = [[] for _ in range(world)]
    for step in range(STEPS):
        heard.clear()
        loss_of(model, tokens(rank, step)).backward()
        assert sorted(name for name, _ in heard) == sorted(names)
        for name, p in model.named_parameters():
            shown = torch.empty_like(p) if p.grad is None and p.numel() == 0 else p.grad
            assert torch.equal(dict(heard)[name], shown)
        dist.all_gather_object(orders, [name for name, _ in heard])
        assert orders == [orders[0]] * world


@ranks(2)
@both_ways
def test_a_step_in_a_hook_written_by_hand(rank, world, use_orig_params):
    model = toy()
    reference = Reference(model)
    model = wrap_blocks("fsdpc", model, use_orig_params=use_orig_params)
    handles = []

    def step_in_place(p):
        p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in model.parameters():
        handles.append(p.register_post_accumulate_grad_hook(step_in_place))
    plain = torch.optim.SGD(reference.master.parameters(), lr=0.1)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        plain.step()
        plain.zero_grad()
        check_parameters("fsdpc", model, reference, f"after step {step}")
    for handle in handles:
        handle.remove()
    loss_of(model, tokens(rank, STEPS)).backward()
    reference.backward(tokens(rank, STEPS))
    check_gradients("fsdpc", model, reference, "with the hooks removed")


@ranks(2)
def test_accumulation_and_no_sync(rank, world):
    """Under no_sync, no hook is called. Otherwise each backward calls the hook with the sum of the
    gradients so far."""
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    calls = []
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    for no_sync, expected in ((True, [1]), (False, [1, 2])):
        calls.clear()
        model.zero_grad()
        for micro in range(2):
            with no_sync_if(model, no_sync and micro == 0):
                loss_of(model, tokens(rank, 0, micro)).backward()
        assert len(calls) == len(expected)
        if first.numel():
            assert torch.equal(calls[-1], first.grad)
        else:
            assert calls[-1].numel() == 0 and first.grad is None


class Half(nn.Module):
    """A model whose second block runs on rank 1 only, and whose third block never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.head = nn.Linear(6, 13)

    def forward(self, batch):
        x = self.blocks[0](self.embed(batch))
        x = self.blocks[1](x) if dist.get_rank() == 1 else x
        return self.head(x)


@ranks(2)
def test_units_that_some_ranks_ran(rank, world):
    """If any rank used a parameter, the parameter's hook is called on all ranks; else the hook is
    not called."""
    torch.manual_seed(0)
    model = wrap_blocks("fsdpc", Half(), use_orig_params=True)
    heard = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: heard.append(name))
    loss_of(model, tokens(rank, 0)).backward()
    expected = [n for n, _ in model.named_parameters() if "blocks.2" not in n]
    assert sorted(heard) == sorted(expected)


@ranks(1, 2)
def test_an_exception_in_a_hook(rank, world):
    """backward() raises the error that a hook raises. The gradients are complete, and the next step
    is correct."""
    model = toy()
    reference = Reference(model)
    model = wrap_blocks("fsdpc", model, use_orig_params=True)

    def fail(p):
        raise ArithmeticError("asked to fail")

    handle = list(model.parameters())[3].register_post_accumulate_grad_hook(fail)
    with pytest.raises(ArithmeticError, match="asked to fail"):
        loss_of(model, tokens(rank, 0)).backward()
    reference.backward(tokens(rank, 0))
    check_gradients("fsdpc", model, reference, "of the failed backward")
    handle.remove()
    loss_of(model, tokens(rank, 1)).backward()
    reference.backward(tokens(rank, 1))
    check_gradients("fsdpc", model, reference, "of the next backward")


@ranks(2)
def test_hooks_that_will_not_be_called_are_reported(rank, world):
    model = toy()
    apply_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(RuntimeError, match="norm.weight.*blocks.0.*use_orig_params=True"):
        wrap_blocks("fsdpc", model)
    model = toy()
    model.head.weight.register_hook(lambda grad: None)
    with pytest.warns(UserWarning, match="head.weight.*will not be called"):
        wrap_blocks("fsdpc", model, use_orig_params=True)
    model = toy()
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.warns(UserWarning, match="head.weight.*will not be called"):
        wrap_blocks("fsdpc", model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap_blocks("fsdpc", toy(), use_orig_params=True)


@ranks(2)
def test_optimizer_in_backward_on_a_flat_parameter(rank, world):
    """torch refuses an optimizer in backward on a flat parameter. fsdpc calls the optimizer for a
    flat parameter as for any other parameter."""
    model = toy()
    reference = Reference(model)
    model = wrap_blocks("fsdpc", model)
    apply_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    plain = torch.optim.SGD(reference.master.parameters(), lr=0.1)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        plain.step()
        plain.zero_grad()
        check_parameters("fsdpc", model, reference, f"after step {step}")
