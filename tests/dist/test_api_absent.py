"""Parameters of which a rank has no elements.

The rank shows no gradient and keeps no optimizer state of such a parameter. Reductions, norms and
state dicts of the whole group stay right.
"""

from __future__ import annotations

import copy

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.utils import clip_grad_norm_, get_total_norm
from toys import (
    Reference,
    check_equal,
    check_gradients,
    full_gradients,
    full_parameters,
    loss_of,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)


def sharded(**options):
    return wrap_blocks("fsdpc", toy(), use_orig_params=True, **options)


def split(model):
    """Return the parameters with elements on this rank, and the parameters without."""
    here = [p for p in model.parameters() if p.numel()]
    return here, [p for p in model.parameters() if not p.numel()]


@ranks(2, 3)
@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:2], ids=lambda s: s.name)
def test_no_gradient_and_no_state(rank, world, strategy):
    model = sharded(sharding_strategy=strategy)
    here, absent = split(model)
    assert absent
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        loss_of(model, tokens(rank, step)).backward()
        assert all(p.grad is None for p in absent)
        assert all(p.grad is not None for p in here)
        assert all(float(p.grad.abs().max()) > 0.0 for p in here)
        optimizer.step()
        assert set(optimizer.state) == set(here)
        optimizer.zero_grad(set_to_none=step == 1)


@ranks(2, 3)
def test_accumulation_with_and_without_communication(rank, world):
    """A rank without elements of a parameter still contributes its accumulated gradients."""
    model, reference = sharded(), Reference(toy())
    for round_ in range(2):
        for sync in (False, True, False, False, True, True):
            batch = tokens(rank, round_, int(sync))
            if sync:
                loss_of(model, batch).backward()
            else:
                with model.no_sync():
                    loss_of(model, batch).backward()
            reference.backward(batch, sync=sync)
        assert all(p.grad is None for p in split(model)[1])
        check_gradients("fsdpc", model, reference, f"in round {round_}")
        model.zero_grad()
        reference.master.zero_grad()


@ranks(2)
def test_what_a_rank_kept_is_discarded_with_its_gradient(rank, world):
    model, reference = sharded(), Reference(toy())
    with model.no_sync():
        loss_of(model, tokens(rank, 0)).backward()
    model.zero_grad()
    loss_of(model, tokens(rank, 1)).backward()
    reference.backward(tokens(rank, 1))
    check_gradients("fsdpc", model, reference, "after zero_grad")


@ranks(2, 3)
def test_norms_and_clipping(rank, world):
    """Norms are right, even if only one rank has elements of a parameter."""
    model, plain = sharded(), toy()
    batches = [tokens(r, 0) for r in range(world)]
    sum(loss_of(plain, batch) for batch in batches).div(world).backward()
    loss_of(model, tokens(rank, 0)).backward()
    names = [name for name, _ in plain.named_parameters()]
    whole = [p.grad for p in plain.parameters()]
    for norm_type in (2.0, float("inf")):
        expected = get_total_norm(whole, norm_type)
        for got in (
            clip_grad_norm_(model.parameters(), 1e9, norm_type),
            model.clip_grad_norm_(1e9, norm_type),
        ):
            torch.testing.assert_close(got.float(), expected, rtol=1e-5, atol=0)
    for name, p, grad in zip(names, model.parameters(), whole, strict=True):
        got = clip_grad_norm_([p], 1e9)
        torch.testing.assert_close(got, grad.norm(), rtol=1e-5, atol=1e-7, msg=name)


@ranks(2)
def test_norms_where_a_rank_holds_nothing_at_all(rank, world):
    model = wrap("fsdpc", nn.Linear(2, 2, bias=False).double(), use_orig_params=True)
    assert (rank == 0) == bool(split(model)[0])
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    for norm in (clip_grad_norm_(model.parameters(), 1e9), model.clip_grad_norm_(1e9)):
        assert norm.dtype == torch.float64
        assert float(norm) == pytest.approx(2.0)


@ranks(2, 3)
def test_optimizer_states_go_out_and_in(rank, world):
    one = sharded()
    kind = type(one)
    optimizer = torch.optim.Adam(one.parameters(), lr=1e-2)
    for step in range(2):
        loss_of(one, tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = copy.deepcopy(kind.optim_state_dict(one, optimizer))
    two = sharded()
    two.load_state_dict(one.state_dict())
    other = torch.optim.Adam(two.parameters(), lr=1e-2)
    other.load_state_dict(kind.optim_state_dict_to_load(two, other, state))
    assert {p.numel() > 0 for p in other.state} <= {True}
    for model, optim in ((one, optimizer), (two, other)):
        loss_of(model, tokens(rank, 2)).backward()
        optim.step()
    check_equal(full_parameters(one), full_parameters(two), "after loading")


@ranks(2, 3)
def test_gradients_in_summon(rank, world):
    model = sharded()
    loss_of(model, tokens(rank, 0)).backward()
    before = full_gradients(model)
    with type(model).summon_full_params(model, with_grads=True):
        for p in model.parameters():
            p.grad.mul_(2.0)
    assert all(p.grad is None for p in split(model)[1])
    check_equal(full_gradients(model), {n: 2 * g for n, g in before.items()}, "doubled")


class Empties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return x + self.nothing.sum()


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Empties() for _ in range(4))
        self.first = nn.Linear(3, 3)

    def forward(self, x):
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return x


@ranks(2, 3, env={"FSDPC_REDUCE_SLOTS": "1"})
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_units_without_elements(rank, world, use_orig_params):
    """A reduction may need memory beside the slots. For a unit without elements it needs none."""
    model = wrap_blocks("fsdpc", Chain(), Empties, use_orig_params=use_orig_params)
    for step in range(6):
        if rank == step % 2:
            torch.manual_seed(step)
            sum(i * i for i in range(200000))  # delays this rank, so that the other ranks are ahead
        model(torch.ones(2, 3)).sum().backward()
        model.zero_grad()
