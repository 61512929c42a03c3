"""Checkpointing and compression of activations in sharded models: values, and gathers per step."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.tensor import DTensor
from toys import Block, full_gradients, loss_of, shard_blocks, tokens, toy, wrap, wrap_blocks

from fsdpc import FullyShardedDataParallel as FSDP
from fsdpc import fully_shard
from fsdpc._fsdp2.collect import state_of
from fsdpc.activations import checkpoint, compress, compression


def train_step(model, around=None):
    with around or nullcontext():
        loss = loss_of(model, tokens(0, 0))
    loss.backward()
    return full_gradients(model)


DOORS = {
    "FSDP": partial(wrap_blocks, "fsdpc", use_orig_params=True),
    "flat": partial(wrap_blocks, "fsdpc", use_orig_params=False),
    "fully_shard": shard_blocks,
}
CHOICES = ({"ratio": "1/2"}, {"every": 2}, {"ratio": 1, "policy": "matmul"})


def gathers(model):
    tree = (model if isinstance(model, FSDP) else state_of(model))._tree
    trace = Counter((e["op"], e["unit"]) for e in tree.trace())
    return [trace["gather", unit.name] for unit in tree.units]


@pytest.mark.long
@ranks(2)
def test_checkpointing_before_and_after_wrapping(rank, world):
    """Recomputation never gathers a unit for a third time in a step."""
    batch = tokens(0, 0)
    for name, door in DOORS.items():
        plain = door(toy(blocks=4))
        expected, usual = gradients(plain), gathers(plain)
        assert usual == [1 if name == "fully_shard" else 2, 2, 2, 2, 2]  # 1: root stays gathered
        choices = CHOICES[:1] if name == "flat" else CHOICES
        for options, when in product(choices, ("before", "after")):
            model = toy(blocks=4)
            if when == "before":
                checkpoint(model, **options)
            model = door(model)
            if when == "after":
                checkpoint(model, **options)
            found = gradients(model)
            assert all(map(torch.equal, found, expected)), (name, options, when)
            assert gathers(model) == usual, (name, options, when)
            with compress(model):
                loss_of(model, batch).backward()
            assert gathers(model) == [2 * count for count in usual], (name, options, when)


def gradients(model):
    """Return this rank's shards of the gradients, in the order of the parameters."""
    loss_of(model, tokens(0, 0)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [(g.to_local() if isinstance(g, DTensor) else g).clone() for g in grads]


@ranks(2)
def test_compression_leaves_gathered_parameters_alone(rank, world):
    """Compression must not keep gathered weights, as their memory is reused before backward."""
    expected = train_step(wrap_blocks("fsdpc", toy(blocks=3, width=32, vocabulary=64)))
    for ratio in (0, 1):
        for dtype, bound in (("int8", 0.02), ("bf16", 0.01)):
            model = wrap_blocks("fsdpc", toy(blocks=3, width=32, vocabulary=64))
            checkpoint(model, ratio=ratio, blocks=Block)
            found = train_step(model, compress(model, dtype, min_bytes=256))
            distance = sum((found[n] - expected[n]).norm() ** 2 for n in expected)
            error = (distance / sum(v.norm() ** 2 for v in expected.values())) ** 0.5
            assert 0 < error < bound, (ratio, dtype, error)


@ranks(2)
def test_gathered_parameters_are_not_compressed(rank, world):
    """compress() does not compress gathered parameters, whichever interface shards the model.

    The rounding errors of compressed parameters would reach every gradient.
    """
    for door in ("FSDP", "fully_shard"):
        blocks = [nn.Sequential(nn.Linear(48, 48), nn.GELU()) for _ in range(3)]
        if door == "FSDP":
            model = wrap("fsdpc", nn.Sequential(*(wrap("fsdpc", b) for b in blocks)))
        else:
            model = fully_shard(nn.Sequential(*(fully_shard(block) for block in blocks)))
        with sizes_packed() as packed:
            with compress(model, min_bytes=64):
                loss = model(torch.randn(8, 48)).square().mean()
            loss.backward()
        assert set(packed) == {8 * 48}, door


@contextmanager
def sizes_packed():
    """Yield a list that gets the number of elements of each tensor that is compressed."""
    packed = []

    def counted(whole, dtype, real=compression._Packed):
        packed.append(whole.numel())
        return real(whole, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "_Packed", counted)
        yield packed


class Compressing(nn.Module):
    """A block whose forward may call compress() itself; ``what`` names the compressed module."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.inner = nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48))

    def forward(self, x):
        known = {"self": self, "inner": self.inner, "child": self.inner[0]}.get(self.what)
        with compress(known, min_bytes=64) if known else nullcontext():
            return self.inner[0](x) if known is self.inner[0] else self.inner(x)


@pytest.mark.parametrize("door", ["FSDP", "flat", "fully_shard"])
@ranks(2)
def test_gathered_parameters_of_the_unit_around_are_not_compressed(rank, world, door):
    """compress() in a block's forward does not compress parameters of the unit around the block."""
    for what in ("self", "inner", "child", ""):
        block = Compressing(what)
        if door == "fully_shard":
            model = fully_shard(block)
        else:
            model = wrap("fsdpc", block, use_orig_params=door == "FSDP")
        with sizes_packed() as packed:
            for _ in range(2):
                with nullcontext() if what else compress(block.inner, min_bytes=64):
                    loss = model(torch.randn(8, 48)).square().mean()
                loss.backward()
        assert set(packed) == {8 * 48}, what
