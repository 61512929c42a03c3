"""Tests of state dicts that only some ranks ask for, or that ranks ask for with different types. An
error names the ranks and what they asked for; no rank hangs.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from checkpoints import FULL, LOCAL, SHARDED, build, same, typed
from harness import run_ranks
from torch.distributed.fsdp import FullStateDictConfig
from toys import toy, wrap, wrap_blocks

import fsdpc

SHORT = {"FSDPC_TIMEOUT": "2"}
ON_RANK_0 = FullStateDictConfig(rank0_only=True)


def alone(rank, world, kind, config, load):
    model = build("fsdpc")
    with typed(model, kind, config):
        state = model.state_dict()
        if rank == 1:
            return
        if load:
            model.load_state_dict(state)
        else:
            model.state_dict()


CASES = [
    (FULL, None, False),
    (FULL, ON_RANK_0, False),
    (SHARDED, None, False),
    (FULL, None, True),
    (SHARDED, None, True),
]


@pytest.mark.parametrize(("kind", "config", "load"), CASES)
@pytest.mark.parametrize("wire", ["shm", "wire"])
def test_one_rank_does_not_come(kind, config, load, wire):
    env = {**SHORT, "FSDPC_COLLECTIVES": wire}
    outcomes = run_ranks(alone, 3, env=env, faults=True, kind=kind, config=config, load=load)
    assert outcomes[1].returned
    for outcome in (outcomes[0], outcomes[2]):
        assert {"CommTimeout", "PeerError"} & set(outcome.error_types), outcome.error
        assert "rank 1" in outcome.error or "rank 1" in outcome.log, outcome.error
        assert "state dict of unit" in outcome.error, outcome.error
    if wire == "wire":
        for outcome in (outcomes[0], outcomes[2]):
            assert "for rank 1 (FSDPC_TIMEOUT" in outcome.error, outcome.error
    first = next(o for o in outcomes if "CommTimeout" in o.error_types)
    assert "rank 1" in first.error and "unit" in first.error, first.error


def different(rank, world, kinds, load):
    model = build("fsdpc")
    state = model.state_dict()
    with typed(model, kinds[rank]):
        if load[rank]:
            model.load_state_dict(state)
        else:
            model.state_dict()


@pytest.mark.parametrize("wire", ["shm", "wire"])
def test_different_types(wire):
    arguments = {"kinds": [FULL, SHARDED], "load": [False, False]}
    env = {"FSDPC_COLLECTIVES": wire}
    outcomes = run_ranks(different, 2, env=env, faults=True, **arguments)
    for outcome in outcomes:
        assert "MismatchError" in outcome.error_types
        assert "saving of a FULL_STATE_DICT" in outcome.error, outcome.error
        assert "saving of a SHARDED_STATE_DICT" in outcome.error, outcome.error


def test_one_saves_and_one_loads():
    outcomes = run_ranks(different, 2, faults=True, kinds=[FULL, FULL], load=[False, True])
    for outcome in outcomes:
        assert "MismatchError" in outcome.error_types
        assert "saving of" in outcome.error and "loading of" in outcome.error, outcome.error


def local_alone(rank, world):
    model = wrap_blocks("fsdpc", toy())
    with typed(model, LOCAL):
        if rank == 0:
            model.load_state_dict(model.state_dict())
    with typed(model, FULL):
        same(model.state_dict(), toy().state_dict())


def test_a_local_state_dict_needs_nobody():
    run_ranks(local_alone, 2)


def late_again(rank, world):
    """One rank comes too late, and the other gives up. Later, both can make a state dict
    together."""
    model = build("fsdpc")
    for _ in range(3):
        model.state_dict()
    if rank == 0:
        for _ in range(2):
            with pytest.raises(fsdpc.CommTimeout, match="for rank 1 .FSDPC_TIMEOUT"):
                model.state_dict()
    dist.barrier()
    if rank == 1:
        with pytest.raises(fsdpc.CommTimeout, match="for rank 0 .FSDPC_TIMEOUT"):
            model.state_dict()
    dist.barrier()
    with typed(model, SHARDED):
        same(model.state_dict(), toy().state_dict())


@pytest.mark.long
def test_after_a_rank_gave_up_over_a_wire():
    run_ranks(late_again, 2, env={**SHORT, "FSDPC_COLLECTIVES": "wire"})


def named_differently(rank, world, kind):
    """Wrap two units of equal shapes in turn. Rank 0 wraps "left" first, and other ranks wrap
    "right" first."""
    model = torch.nn.ModuleDict()
    for name in ("left", "right")[:: -1 if rank else 1]:
        model[name] = wrap("fsdpc", torch.nn.Linear(4, 4))
    with type(model["left"]).state_dict_type(model, kind):
        model.state_dict()


@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_units_at_different_places(kind):
    for outcome in run_ranks(named_differently, 2, faults=True, kind=kind):
        assert outcome.error and "MismatchError" in outcome.error_types, outcome
        assert "module at left" in outcome.error and "module at right" in outcome.error
