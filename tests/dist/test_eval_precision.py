"""Tests of FSDP_USE_FULL_PREC_IN_EVAL=1: outputs of modules in eval mode equal those of an
unsharded float32 model to the bit, and training steps between evaluations equal those without the
variable.
"""

from __future__ import annotations

import copy

import pytest
import torch
from harness import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from toys import Block, full_gradients, full_parameters, loss_of, tokens, toy, wrap_blocks

ENV = {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}
LOW = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
BOTH = pytest.mark.parametrize("use_orig_params", [True, False])


def run(function, world=2, env=ENV, **arguments):
    return run_ranks(function, world, env=env, **arguments)


def trained(rank, world, evaluates, use_orig_params, strategy):
    model = wrap_blocks(
        "fsdpc",
        toy(),
        mixed_precision=LOW,
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(3):
        if evaluates:
            plain = toy()
            plain.load_state_dict(model.state_dict())
            model.eval()
            with torch.no_grad():
                assert torch.equal(model(tokens(rank, 9)), plain(tokens(rank, 9)))
                one = torch.randn(3, 6)
                assert torch.equal(model.blocks[0](one), plain.blocks[0](one))
            model.train()
        assert model(tokens(rank, 9)).dtype == torch.bfloat16
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@pytest.mark.parametrize("world", [1, 2, 3])
@BOTH
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_evaluations_between_steps(world, use_orig_params, strategy):
    options = {"use_orig_params": use_orig_params, "strategy": strategy}
    got = run(trained, world, evaluates=True, **options)
    expected = run(trained, world, env={}, evaluates=False, **options)
    for ours, theirs in zip(got, expected, strict=True):
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((3,), 1.25))
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, self.lin.weight.dtype, self.scale.dtype))
        return self.lin(x) * self.scale


def dtypes(rank, world, use_orig_params):
    options = {"mixed_precision": LOW, "use_orig_params": use_orig_params}
    model = wrap_blocks("fsdpc", nn.Sequential(Buffered(), Buffered()), Buffered, **options)
    low, full = (torch.bfloat16,) * 3, (torch.float32,) * 3
    for training in (False, True, False):  # the first forward of all is an evaluation
        model.train(training)
        with torch.no_grad():
            model(torch.ones(2, 3))
        for inner in (model[0].module, model[1].module):
            assert inner.seen.pop() == (low if training else full)
            assert inner.scale.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in model.parameters())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(torch.ones(2, 3)), model(torch.ones(2, 3)))


@BOTH
def test_inputs_parameters_and_buffers(use_orig_params):
    run(dtypes, use_orig_params=use_orig_params)


def backward(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), mixed_precision=LOW, use_orig_params=use_orig_params)
    model.eval()
    with pytest.raises(RuntimeError, match=r"backward through parameter .*call train\(\) before"):
        loss_of(model, tokens(rank, 0)).backward()
    model.train()
    loss_of(model, tokens(rank, 0)).backward()
    trained = full_gradients(model)
    assert any(grad.any() for grad in trained.values())


@BOTH
def test_a_backward_through_an_evaluation_raises(use_orig_params):
    run(backward, use_orig_params=use_orig_params)


def frozen_part(rank, world, use_orig_params):
    """A frozen block in eval mode inside a model that trains: the block's inputs get gradients."""
    module = toy()
    module.blocks[1].requires_grad_(False)
    model = wrap_blocks(
        "fsdpc", module, Block, mixed_precision=LOW, use_orig_params=use_orig_params
    )
    for step in range(2):
        model.train()
        model.blocks[1].eval()
        loss_of(model, tokens(rank, step)).backward()
        grads = full_gradients(model)
        assert grads["blocks.0.up.weight"].any() and grads["embed.weight"].any()
        assert not grads["blocks.1.up.weight"].any()
        model.zero_grad()


@BOTH
def test_a_frozen_part_in_a_model_that_trains(use_orig_params):
    run(frozen_part, use_orig_params=use_orig_params)


def without_low_precision(rank, world):
    model = wrap_blocks("fsdpc", toy()).eval()
    loss_of(model, tokens(rank, 0)).backward()
    assert any(grad.any() for grad in full_gradients(model).values())
    gathers = [event for event in model._tree.trace() if event["op"] == "gather"]
    assert gathers


def test_models_without_low_precision_go_the_usual_way():
    run(without_low_precision)
