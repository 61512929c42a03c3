"""Tests of checkpoints of weights and Adam's moments that go from one kind of sharding to the next,
each time on another number of ranks: values stay equal to the bit.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import build
from harness import ranks, run_ranks
from optim_runs import Run, adam, check_dict, load, named, save
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import StateDictType
from toys import Reference, loss_of, tokens, toy

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
OURS = ["fsdpc", "fsdpc-flat", "fsdpc-mesh"]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def step(model: nn.Module, optim: Any, rank: int, number: int) -> None:
    loss_of(model, tokens(rank, number)).backward()
    optim.step()
    optim.zero_grad()


def everything(model: nn.Module, optim: Any) -> dict[str, Any]:
    """Return the whole weights and moments, on every rank."""
    weights, state = get_state_dict(model, optim, options=FULL)
    return copy.deepcopy({"weights": weights, "optim": state})


def check_everything(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert torch.equal(got["weights"][name], value), name
    check_dict(got["optim"], expected["optim"])


# --- through a checkpoint on disk ----------------------------------------------------------------


def first(rank, world, kind, path):
    """Train, write a checkpoint and return its contents, which must equal those of an
    unsharded run.
    """
    plain = toy()
    reference, model = Reference(plain), build(kind, copy.deepcopy(plain))
    optims = adam(model), adam(reference.master)
    for number in range(3):
        loss_of(model, tokens(rank, number)).backward()
        reference.backward(tokens(rank, number))
        for optim in optims:
            optim.step()
            optim.zero_grad()
    write(path, model, optims[0])
    got = everything(model, optims[0])
    for name, state in named(reference.master, optims[1])["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(got["optim"]["state"][name][key], value, msg=f"{key} {name}")
    return got


def write(path, model, optim):
    weights, state = get_state_dict(model, optim)
    dcp.save({"weights": weights, "optim": state}, checkpoint_id=path)


def hop(rank, world, kind, source, path):
    """Read one checkpoint, write the next one and return its contents."""
    model = build(kind, toy(seed=9))
    optim = adam(model)
    weights, state = get_state_dict(model, optim)
    holder = {"weights": weights, "optim": state}
    dcp.load(holder, checkpoint_id=source)
    set_state_dict(
        model, optim, model_state_dict=holder["weights"], optim_state_dict=holder["optim"]
    )
    write(path, model, optim)
    return everything(model, optim)


CHAINS = [
    [("fsdp1-flat", 2), ("fsdpc", 3), ("fsdp2", 1), ("fsdpc", 2)],
    [("fsdp1-flat", 2), ("fsdpc-flat", 3), ("fsdp2", 2), ("fsdpc-flat", 1)],
    [("fsdpc-flat", 2), ("fsdp1-flat", 3), ("fsdpc", 1), ("fsdp2", 3)],
    [("fsdp2", 3), ("fsdpc-mesh", 2), ("fsdp2", 2), ("fsdpc-flat", 3)],
]


@pytest.mark.long
@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: "-".join(f"{k}.{n}" for k, n in c))
def test_from_one_kind_to_the_next_on_disk(chain, tmp_path):
    paths = [str(tmp_path / str(i)) for i in range(len(chain))]
    kind, world = chain[0]
    expected = run_ranks(first, world, kind=kind, path=paths[0])[0]
    for i, (kind, world) in enumerate(chain[1:]):
        for got in run_ranks(hop, world, kind=kind, source=paths[i], path=paths[i + 1]):
            check_everything(got, expected)


# --- through whole dicts -------------------------------------------------------------------------


def hop_whole(rank, world, kind, source):
    model = build(kind, toy(seed=9))
    optim = adam(model)
    set_state_dict(
        model,
        optim,
        model_state_dict=source["weights"],
        optim_state_dict=source["optim"],
        options=FULL,
    )
    return everything(model, optim)


@pytest.mark.long
@pytest.mark.parametrize("chain", CHAINS[:2], ids=lambda c: "-".join(f"{k}.{n}" for k, n in c))
def test_from_one_kind_to_the_next_by_whole_dicts(chain, tmp_path):
    kind, world = chain[0]
    held = expected = run_ranks(first, world, kind=kind, path=str(tmp_path))[0]
    for kind, world in chain[1:]:
        held = run_ranks(hop_whole, world, kind=kind, source=held)[-1]
        check_everything(held, expected)


# --- torch.distributed.checkpoint.state_dict -----------------------------------------------------


def trained(rank: int, kind: str, steps: int = 2, seed: int = 0) -> Run:
    model = build(kind, toy(seed=seed))
    run = Run(model, adam(model), None, None, rank)
    for number in range(steps):
        step(run.model, run.optim, rank, number)
    return run


@ranks(2)
@pytest.mark.parametrize("kind", OURS)
def test_get_and_set_optimizer_state_dict(rank, world, kind):
    run = trained(rank, kind)
    expected = save(run)
    check_dict(get_optimizer_state_dict(run.model, run.optim, options=FULL), expected)
    on_rank_0 = get_optimizer_state_dict(run.model, run.optim, options=ON_RANK_0)
    assert bool(on_rank_0) == (rank == 0)
    flattened = get_optimizer_state_dict(
        run.model,
        run.optim,
        options=StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
    )
    assert "state.head.bias.exp_avg" in flattened
    for state, options in (
        (expected, FULL),
        (on_rank_0, FROM_RANK_0),
        (flattened, FULL),
        (get_optimizer_state_dict(run.model, run.optim), None),
    ):
        again = trained(rank, kind, steps=0, seed=4)
        set_optimizer_state_dict(
            again.model, again.optim, optim_state_dict=copy.copy(state), options=options
        )
        check_dict(save(again), expected)


# --- by torch's own calls ------------------------------------------------------------------------


def by_class(rank, world, kind, form, saved=None):
    """Train and save if `saved` is None, else load `saved`, by the methods of the model's class."""
    run = trained(rank, kind, steps=0 if saved else 2, seed=6 if saved else 0)
    kinds = [type(m) for m in run.model.modules() if hasattr(type(m), "optim_state_dict")]
    with kinds[0].state_dict_type(run.model, form):
        if saved is not None:
            run.model.load_state_dict(saved["weights"])
            load(run, saved["optim"])
        weights = run.model.state_dict()
        return {"weights": dict(weights), "optim": save(run)}


@pytest.mark.parametrize("kind", ["fsdpc", "fsdpc-flat"])
def test_whole_dicts_of_torchs_class_and_back(kind):
    full = StateDictType.FULL_STATE_DICT
    theirs = run_ranks(by_class, 2, kind="fsdp1-flat", form=full)[0]
    ours = run_ranks(by_class, 3, kind=kind, form=full, saved=theirs)[0]
    check_everything(ours, theirs)
    check_everything(run_ranks(by_class, 2, kind="fsdp1-flat", form=full, saved=ours)[0], theirs)
