"""Tests of checkpoints between torch's FSDP1, FSDP2, the unsharded model and fsdpc, on different
numbers of ranks: weights stay equal to the bit.
"""

from __future__ import annotations

import pytest
import torch
from checkpoints import FULL, KINDS, SHARDED, build, load, same, save, typed
from harness import run_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from toys import toy

OURS = [kind for kind in KINDS if kind.startswith("fsdpc")]
THEIRS = [*(kind for kind in KINDS if kind.startswith("fsdp1")), "fsdp2", "plain"]
WHOLE = StateDictOptions(full_state_dict=True)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def expected():
    return toy(seed=7).state_dict()


def check(model):
    same(dict(get_model_state_dict(model, options=WHOLE)), expected())


def write(rank, world, path, kind):
    model = build(kind, toy(seed=7))
    save(path, {"model": get_model_state_dict(model), "step": torch.tensor(3)})
    check(model)


def read(rank, world, path, kinds):
    for kind in kinds:
        model = build(kind)
        state = {"model": get_model_state_dict(model), "step": torch.tensor(0)}
        load(path, state)
        set_model_state_dict(model, state["model"])
        check(model)
        assert state["step"] == 3


@pytest.mark.parametrize("kind", THEIRS)
def test_theirs_into_ours(tmp_path, kind):
    run_ranks(write, 1 if kind == "plain" else 2, path=str(tmp_path), kind=kind)
    run_ranks(read, 3, path=str(tmp_path), kinds=OURS)


@pytest.mark.long
@pytest.mark.parametrize("kind", OURS)
def test_ours_into_theirs(tmp_path, kind):
    run_ranks(write, 2, path=str(tmp_path), kind=kind)
    run_ranks(read, 3, path=str(tmp_path), kinds=[k for k in THEIRS if k != "plain"])
    run_ranks(read, 1, path=str(tmp_path), kinds=["plain"])


def read_and_write(rank, world, source, target, kind):
    read(rank, world, source, [kind])
    model = build(kind)
    state = {"model": get_model_state_dict(model), "step": torch.tensor(0)}
    load(source, state)
    set_model_state_dict(model, state["model"])
    save(target, {"model": get_model_state_dict(model), "step": state["step"]})


@pytest.mark.long
@pytest.mark.parametrize("ours", OURS)
def test_a_journey(tmp_path, ours):
    """A checkpoint goes from FSDP1 on 2 ranks to fsdpc on 3, to FSDP2 on 1,
    to fsdpc on 2 and to the unsharded model.
    """
    paths = [str(tmp_path / str(i)) for i in range(4)]
    run_ranks(write, 2, path=paths[0], kind="fsdp1")
    for i, (world, kind) in enumerate([(3, ours), (1, "fsdp2"), (2, ours)]):
        run_ranks(read_and_write, world, source=paths[i], target=paths[i + 1], kind=kind)
    run_ranks(read, 1, path=paths[3], kinds=["plain"])


# --- by the classes' own methods ---


def write_typed(rank, world, path, kind, form):
    model = build(kind, toy(seed=7))
    with typed(model, form):
        save(path, {"model": model.state_dict()})


def read_typed(rank, world, path, kinds, form):
    for kind in kinds:
        model = build(kind)
        with typed(model, form):
            state = {"model": model.state_dict()}
            load(path, state)
            model.load_state_dict(state["model"])
        check(model)


@pytest.mark.parametrize("form", [FULL, SHARDED])
@pytest.mark.parametrize(("kind", "others"), [("fsdp1", OURS), ("fsdpc", ["fsdp1", "fsdp1-mesh"])])
def test_state_dict_type(tmp_path, kind, others, form):
    run_ranks(write_typed, 2, path=str(tmp_path), kind=kind, form=form)
    run_ranks(read_typed, 3, path=str(tmp_path), kinds=others, form=form)


def write_file(rank, world, path):
    model = build("fsdpc", toy(seed=7))
    state = model.state_dict()
    if rank == 0:
        torch.save(state, path)


def test_a_file_that_plain_torch_reads(tmp_path):
    path = str(tmp_path / "model.pt")
    run_ranks(write_file, 2, path=path)
    model = toy()
    model.load_state_dict(torch.load(path, weights_only=True))
    same(model.state_dict(), expected())
