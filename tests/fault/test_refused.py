"""Tests of what cannot work: too little memory, too many ranks, and ranks that were started with
different models or options. Every rank raises an error that says why.
"""

from __future__ import annotations

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from toys import Block, loss_of, tokens, toy, wrap, wrap_blocks

import fsdpc
from fsdpc import _C

# --- memory --------------------------------------------------------------------------------------


def test_a_unit_that_no_memory_holds():
    spec = [("huge.weight", 1 << 44, "float32", "float32", "float32", True)]
    with pytest.raises(MemoryError, match=r"huge unit.*[0-9]"):
        _C.FlatParameter("huge unit", _C.Comm.self_(), spec)


@ranks(2)
def test_a_sharded_unit_that_no_memory_holds(rank, world):
    """Every rank raises an error before the operating system kills a rank for lack of memory, and
    the ranks can go on."""
    comm = fsdpc._comm.bootstrap.comm_for_group(torch.distributed.group.WORLD)
    spec = [("huge.weight", 1 << 45, "bfloat16", "float32", "float32", False)]
    with pytest.raises(MemoryError, match=r"huge unit.*[0-9]"):
        _C.FlatParameter("huge unit", comm, spec)
    comm.barrier()


# --- ranks ---------------------------------------------------------------------------------------


def test_more_ranks_than_shared_memory_holds():
    with pytest.raises(ValueError, match="256"):
        _C.Comm.shm(0, 257, "fsdpc-test-too-many", 5.0)


# --- differences ---------------------------------------------------------------------------------


class Other(Block):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(3))


def one_more_parameter(rank, model, options):
    if rank:
        model.blocks[1] = Other()


def another_shape(rank, model, options):
    if rank:
        model.head = nn.Linear(6, 14)


def another_dtype(rank, model, options):
    if rank:
        model.blocks[0].up.bfloat16()


def frozen(rank, model, options):
    model.blocks[0].up.weight.requires_grad = rank == 0


def one_block_more(rank, model, options):
    if rank:
        model.blocks.append(Block())


def strategy(rank, model, options):
    options["sharding_strategy"] = list(ShardingStrategy)[rank]


def use_orig_params(rank, model, options):
    options["use_orig_params"] = rank == 0


def compute_dtype(rank, model, options):
    options["mixed_precision"] = MixedPrecision(
        param_dtype=[torch.bfloat16, torch.float16][rank], reduce_dtype=torch.float32
    )


def reduce_dtype(rank, model, options):
    options["mixed_precision"] = MixedPrecision(reduce_dtype=[torch.bfloat16, torch.float16][rank])


def prefetch(rank, model, options):
    options["backward_prefetch"] = list(BackwardPrefetch)[rank]


DIFFERENCES = [  # functions that make the ranks differ, and what every rank's error must contain
    (one_more_parameter, ["extra"]),
    (another_shape, ["(13, 6)", "(14, 6)"]),
    (another_dtype, ["up.weight", "float32", "bfloat16"]),
    (frozen, ["frozen", "trainable"]),
    (one_block_more, ["blocks.2"]),
    (strategy, ["reshard_after_forward True", "reshard_after_forward False"]),
    (use_orig_params, ["use_orig_params True", "use_orig_params False"]),
    (compute_dtype, ["bfloat16", "float16"]),
    (reduce_dtype, ["bfloat16", "float16"]),
    (prefetch, ["backward_prefetch"]),
]


@ranks(2)
@pytest.mark.parametrize(
    "change, expected", DIFFERENCES, ids=[change.__name__ for change, _ in DIFFERENCES]
)
def test_ranks_that_differ(rank, world, change, expected):
    model, options = toy(), {"use_orig_params": True}
    change(rank, model, options)
    with pytest.raises(fsdpc.MismatchError) as caught:
        loss_of(wrap_blocks("fsdpc", model, **options), tokens(rank, 0))
    text = str(caught.value)
    assert "rank 0 has" in text and "rank 1 has" in text, text
    assert all(part in text for part in expected), text


@ranks(3)
def test_one_unit_more_on_one_rank(rank, world):
    model = toy()
    with pytest.raises(fsdpc.MismatchError) as caught:
        if rank == 2:
            model.head = wrap("fsdpc", model.head, use_orig_params=True)
        wrap_blocks("fsdpc", model, use_orig_params=True)
    text = str(caught.value)
    assert "rank 2" in text and "Linear" in text and "blocks.0" in text, text
