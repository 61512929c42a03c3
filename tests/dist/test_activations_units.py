"""Checkpointing and compression of activations in sharded models: values, and gathers per step."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import torch
from harness import ranks
from toys import Block, full_gradients, loss_of, tokens, toy, wrap_blocks

from fsdpc.activations import checkpoint, compress


def train_step(model, around=None):
    with around or nullcontext():
        loss = loss_of(model, tokens(0, 0))
    loss.backward()
    return full_gradients(model)


@ranks(2)
def test_checkpointing_before_and_after_wrapping(rank, world):
    for use_orig_params in (True, False):
        plain = wrap_blocks("fsdpc", toy(blocks=4), use_orig_params=use_orig_params)
        expected = train_step(plain)
        for when in ("before", "after"):
            model = toy(blocks=4)
            if when == "before":
                assert checkpoint(model, ratio="1/2") == ["blocks.0", "blocks.2"]
            model = wrap_blocks("fsdpc", model, use_orig_params=use_orig_params)
            if when == "after":
                assert len(checkpoint(model, ratio="1/2")) == 2
            found = train_step(model)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            trace = Counter((e["op"], e["unit"]) for e in model._tree.trace())
            units = [unit.name for unit in model._tree.units]
            assert {unit: trace["gather", unit] for unit in units} == dict.fromkeys(units, 2), when


@ranks(2)
def test_compression_leaves_gathered_parameters_alone(rank, world):
    """Gathered weights lie in slots that change hands between forward and backward."""
    expected = train_step(wrap_blocks("fsdpc", toy(blocks=3, width=32, vocabulary=64)))
    for ratio in (0, 1):
        for dtype, bound in (("int8", 0.02), ("bf16", 0.01)):
            model = wrap_blocks("fsdpc", toy(blocks=3, width=32, vocabulary=64))
            checkpoint(model, ratio=ratio, blocks=Block)
            found = train_step(model, compress(model, dtype, min_bytes=256))
            distance = sum((found[n] - expected[n]).norm() ** 2 for n in expected)
            error = (distance / sum(v.norm() ** 2 for v in expected.values())) ** 0.5
            assert 0 < error < bound, (ratio, dtype, error)
