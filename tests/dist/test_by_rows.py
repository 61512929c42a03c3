"""Units that are cut between the rows of their parameters.

Each rank has its rows, and training equals training with the flat layout to the bit. With `pytest
--layout rows` other tests of several ranks use this layout.
"""

from __future__ import annotations

import pytest
import torch
from harness import laid_out, ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from toys import (
    check_equal,
    clean,
    full_gradients,
    full_parameters,
    loss_of,
    no_sync_if,
    none_gradients,
    tokens,
    toy,
    wrap_blocks,
)

import fsdpc
from fsdpc import FullyShardedDataParallel as FSDP
from fsdpc._engine.unit import Unit

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS = {
    "plain": {},
    "bf16": {"mixed_precision": BF16},
    "bf16, hybrid": {"mixed_precision": BF16, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "unsharded": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "no reshard": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
}


class Odd(nn.Module):
    """A model with a scalar, an empty, a small, an odd-sized, a frozen and an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = toy()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.few = nn.Parameter(torch.linspace(-1, 1, 3))
        self.odd = nn.Parameter(torch.linspace(-1, 1, 5 * 7).view(5, 7, 1))
        self.frozen = nn.Parameter(torch.ones(9, 5), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(10).view(5, 2), requires_grad=False)

    def forward(self, x):
        few = self.few.exp().mean() + self.empty.sum() + self.codes.sum() * 1e-3
        return self.inner(x) * (self.gain + few + self.odd.exp().mean() * self.frozen.mean())


def train(layout, rank, options, steps=3):
    """Train, and return the model and a list of records.

    The records are losses and, after each step, the gradients, the names of the parameters without
    a gradient, and the parameters.
    """
    seen = []
    with laid_out(layout):
        model = wrap_blocks("fsdpc", Odd(), use_orig_params=True, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        for micro in range(2):
            with no_sync_if(model, micro == 0 and step == 1):
                loss = loss_of(model, tokens(rank, step, micro))
                loss.backward()
            seen.append({"loss": loss.detach()})
        seen += [full_gradients(model), {n: torch.empty(0) for n in none_gradients(model)}]
        optimizer.step()
        optimizer.zero_grad()
        seen.append(full_parameters(model))
    return model, seen


def rows_of(whole, comm):
    """Return this rank's chunk of rows, flattened.

    The chunk is empty if torch.chunk makes too few chunks.
    """
    chunks = (whole.flatten(1) if whole.dim() > 1 else whole.view(-1)).chunk(comm.world)
    return chunks[comm.rank].flatten() if comm.rank < len(chunks) else whole.flatten()[:0]


def check_same(rank, options, **limits):
    """Check that training by rows equals flat training, and that ranks have torch.chunk's rows."""
    (_, flat), (model, rows) = (train(layout, rank, options) for layout in ("flat", "rows"))
    for number, (one, other) in enumerate(zip(flat, rows, strict=True)):
        check_equal(other, one, f"record {number}", **limits)
    full = full_parameters(model)
    units = [(n, m._unit) for n, m in model.named_modules() if isinstance(m, FSDP)]
    for prefix, unit in units:
        for param, _, (i,) in unit.optim_params:
            name = clean(f"{prefix}.{unit.infos[i].name}".lstrip("."))
            assert torch.equal(param.detach().flatten(), rows_of(full[name], unit.groups.shard))


@ranks(2, 3, 4)
@pytest.mark.parametrize("options", ["plain", "bf16", "unsharded"])
def test_training_equals_the_flat_layout(rank, world, options):
    check_same(rank, OPTIONS[options])


@ranks(4)
def test_hybrid_training_equals_the_flat_layout(rank, world):
    check_same(rank, OPTIONS["bf16, hybrid"])


C10D = {"FSDPC_COLLECTIVES": "wire"}


@ranks(2, env=C10D)
@pytest.mark.parametrize("options", ["no reshard", "bf16"])
def test_training_over_a_wire_equals_the_flat_layout(rank, world, options):
    check_same(rank, OPTIONS[options])


@ranks(3, env=C10D)
def test_training_over_a_wire_on_three_ranks(rank, world):
    """gloo adds three ranks' values in an order that depends on their place in the buffer."""
    check_same(rank, OPTIONS["plain"], rtol=1e-5, atol=1e-7)


@ranks(2)
def test_ranks_of_different_layouts_are_refused(rank, world):
    with laid_out("rows" if rank else "flat"), pytest.raises(fsdpc.MismatchError, match="rows"):
        wrap_blocks("fsdpc", Odd(), use_orig_params=True)


@ranks(1)
def test_flat_parameters_by_rows_are_refused(rank, world):
    options = {"param_dtype": None, "reduce_dtype": None, "reshard_after_forward": True}
    with pytest.raises(ValueError, match="unit layer: by_rows needs use_orig_params"):
        Unit("layer", [], None, use_orig_params=False, by_rows=True, **options)
