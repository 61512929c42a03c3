"""Tests of the cache in which a save or a stream of weights keeps what it has read from a model.

The next save or stream uses the cache if the model has not changed, and never after a change.
"""

from __future__ import annotations

import copy
import errno
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

import fsdpc
from fsdpc import checkpoint
from fsdpc.checkpoint import folders, kept, unchanged, whole


class Net(nn.Module):
    """A module with two layers that may become units, and with parameters that no unit shards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3, bias=False)
        self.outside = nn.ParameterList([nn.Parameter(torch.randn(3, 3)) for _ in range(2)])
        self.register_buffer("mask", torch.zeros(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.note = 0

    def get_extra_state(self) -> int:
        return self.note

    def set_extra_state(self, state: int) -> None:
        self.note = state


def build(kind: str) -> Net:
    torch.manual_seed(0)
    model = Net()
    for name in ("first", "second") if kind != "plain" else ():
        layer = getattr(model, name)
        if kind == "fully_shard":
            fsdpc.fully_shard(layer)
        else:
            setattr(model, name, fsdpc.FSDP(layer, use_orig_params=kind == "orig"))
    return model


@torch.no_grad()
def change(model: Net, what: str) -> None:
    """Change the model on all ranks in the same way; each rank changes its own sharded elements."""
    sharded = next(model.first.parameters())
    if what == "values":
        for param in model.parameters():
            param.copy_(param * 2 + 1)
    elif what == "data":
        sharded.data = sharded.data.clone() + 3
    elif what == "data outside":
        model.outside[0].data = model.outside[0].data + 3
    elif what == "replaced":
        model.second.extra = nn.Parameter(torch.full((2,), 5.0))
        model.outside[1] = nn.Parameter(model.outside[1] * 7)
    elif what == "transposed":
        model.outside[0].data = model.outside[0].data.t()
    elif what == "shape":
        model.outside[0].data = model.outside[0].data.reshape(9)
    elif what == "buffer":
        model.mask = torch.full((3,), 2.0)
    elif what == "persistent":
        model._non_persistent_buffers_set.discard("cache")
    elif what == "note":
        model.note += 1
    elif what == "module":
        model.more = nn.Linear(2, 2)
        nn.init.ones_(model.more.weight)
        nn.init.ones_(model.more.bias)
    elif what == "tied":
        model.outside[1] = model.outside[0]
    elif what == "frozen":
        sharded.requires_grad_(False)
    elif what == "double":
        model.outside.double()


CHANGES = ("", "values", "note", "data", "data outside", "replaced", "transposed", "shape",
           "buffer", "persistent", "module", "tied", "frozen", "double")  # fmt: skip
SAME = ("", "values", "note")


def change_and_save(rank: int, world: int, path: str, kind: str) -> dict[str, Any]:
    """Save after each change, and return for each change whether the save used the cache."""
    model, used = build(kind), {}
    read, reads = kept.read_model, []
    kept.read_model = lambda *given: reads.append(1) or read(*given)
    read_whole = whole.read_model
    checkpoint.save(f"{path}/begin", model)
    tap = checkpoint.stream(model)
    list(tap)
    for number, what in enumerate(CHANGES):
        change(model, what)
        reads.clear()
        saving = checkpoint.save(f"{path}/{number}", model, async_=number % 2 == 1)
        if saving is not None:
            saving.wait()
        used[what] = not reads
        whole.read_model = kept.read_model
        mine = dict(tap)
        assert bool(reads) == (not used[what]), what
        whole.read_model = read_whole
        fresh = dict(checkpoint.stream(model))
        assert list(mine) == list(fresh) and all(map(torch.equal, mine.values(), fresh.values()))
        kept._kept.clear()
        checkpoint.save(f"{path}/{number}-anew", model)
    reads.clear()
    checkpoint.save(f"{path}/low", model, dtype=torch.bfloat16)
    used["other dtype"] = not reads
    gone = weakref.ref(model)
    del model, tap, mine, fresh
    gc.collect()
    used["model alive"] = gone() is not None
    return used


@pytest.mark.parametrize("kind", ["plain", "fully_shard", "orig", "flat"])
def test_only_of_a_model_that_has_not_changed(tmp_path: Path, kind: str):
    found = run_ranks(change_and_save, 2, path=str(tmp_path), kind=kind)[0]
    assert {what for what in found if found[what]} == set(SAME), found
    for number, what in enumerate(CHANGES):
        now, anew = tmp_path / str(number), tmp_path / f"{number}-anew"
        files = [path.relative_to(now) for path in now.glob("*.safetensors")]
        for file in (*files, "fsdpc/state.json"):
            assert (now / file).read_bytes() == (anew / file).read_bytes(), what


STATES = ("first", "", "step", "lr", "loaded", "more", "number", "fewer", "order",
          "moved")  # fmt: skip
KEPT = ("", "step", "lr")


def train_and_save(rank: int, world: int, path: str, kind: str) -> dict[str, bool]:
    """Save after each change, and return for each change whether cached states were used."""
    model, used = build(kind), {}
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}])
    read, reads = kept.read_state, []
    kept.read_state = lambda *given: reads.append(1) or read(*given)

    def step() -> None:
        for number, param in enumerate(params):
            if param.numel():  # backward gives no gradient to a parameter without elements
                param.grad = torch.full_like(param, number + 1.0)
        optimizer.step()

    step()
    for number, what in enumerate(STATES):
        state = optimizer.state[params[-1]]
        if what == "step":
            step()
        elif what == "lr":
            optimizer.param_groups[1]["lr"] = 0.25
        elif what == "loaded":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif what == "more":
            state["note"] = torch.ones(())
        elif what == "number":
            state["count"] = 3
        elif what == "fewer":
            del state["count"]
        elif what == "order":
            optimizer.param_groups.reverse()
        elif what == "moved":  # to another group
            optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
        reads.clear()
        saving = checkpoint.save(f"{path}/{number}", model, optimizer, async_=number % 2 == 1)
        if saving is not None:
            saving.wait()
        used[what] = not reads
        kept._kept_states.clear()
        checkpoint.save(f"{path}/{number}-anew", model, optimizer)
    if rank == 1:
        optimizer.state[params[-1]]["step"] += 1
    reads.clear()
    if world > 1:
        with pytest.raises(checkpoint.CheckpointError, match="differs between ranks: 'step'"):
            checkpoint.save(f"{path}/unequal", model, optimizer)
    return used


@pytest.mark.parametrize("kind", ["plain", "fully_shard", "orig", "flat"])
def test_only_of_an_optimizer_whose_states_have_not_changed(tmp_path: Path, kind: str):
    found = run_ranks(train_and_save, 2, path=str(tmp_path), kind=kind)[0]
    assert {what for what in found if found[what]} == set(KEPT), found
    for number, what in enumerate(STATES):
        now, anew = tmp_path / str(number), tmp_path / f"{number}-anew"
        for file in ("optimizer-00001-of-00001.safetensors", "optimizer.json"):
            file = f"optimizer/{file}"
            assert (now / file).read_bytes() == (anew / file).read_bytes(), what


def freeze_and_save(rank: int, world: int, path: str) -> dict[str, list[int]]:
    """Return the inodes of each save's files. The file of frozen parameters is the last one."""
    kept.FROZEN_BYTES = 1
    model = build("fully_shard")
    sharded = list(model.first.parameters())
    for param in sharded:
        param.requires_grad_(False)

    def save(name: str, **options: Any) -> None:
        with torch.no_grad():
            for param in model.second.parameters():
                param.add_(1)
        saving = checkpoint.save(f"{path}/{name}", model, async_=name == "b", **options)
        if saving is not None:
            saving.wait()
        files = sorted(Path(path, name).glob("*.safetensors"))
        found[name] = [file.stat().st_ino for file in files]
        anew = build("fully_shard")
        assert checkpoint.load(f"{path}/{name}", anew).verified
        for one, other in zip(anew.parameters(), model.parameters(), strict=True):
            assert torch.equal(*(getattr(p, "_local_tensor", p) for p in (one, other))), name

    found: dict[str, list[int]] = {}
    save("a")
    save("b")
    if rank == 1:
        with torch.no_grad():
            sharded[0].add_(1)
    save("changed")
    save("d")
    save("d", overwrite=True)
    dist.barrier()
    if rank == 0:
        file = sorted(Path(path, "d").glob("*.safetensors"))[-1]
        file.write_bytes(file.read_bytes())
    dist.barrier()
    save("touched")
    unchanged._links.clear()
    real, os.link = os.link, refuse
    copy_of, folders.Draft.copy = folders.Draft.copy, None  # a copy would raise: all ranks write
    save("refused")
    unchanged._links.update({Path(path): True})  # as if links had worked in this folder before
    folders.Draft.copy = copy_of
    save("copied")
    folders.Draft.copy = None
    save("again")
    folders.Draft.copy, os.link = copy_of, real
    unchanged._links.clear()
    save("own", link=rank != 0)
    save("shared")
    sharded[0].requires_grad_(True)
    save("thawed")
    return found


def refuse(*given: Any, **options: Any) -> None:
    raise OSError(errno.EPERM, "no links here")


LAST = ("d", "touched", "refused", "copied", "again", "own", "shared", "thawed")


def test_files_of_frozen_parameters_are_linked_while_they_do_not_change(tmp_path: Path):
    found = run_ranks(freeze_and_save, 2, path=str(tmp_path))[0]
    frozen = {name: inodes[-1] for name, inodes in found.items()}
    assert all(len(inodes) == 2 for inodes in found.values())
    assert frozen["a"] == frozen["b"] != frozen["changed"] == frozen["d"]
    assert len({frozen[name] for name in LAST}) == len(LAST)
    assert len({inodes[0] for inodes in found.values()}) == len(found)


def groups(rank: int, world: int, path: str) -> None:
    """Save one plain model from all ranks, then from two ranks, then from all ranks."""
    model = build("plain")
    checkpoint.save(f"{path}/all", model)
    pair = dist.new_group([0, 1])
    if rank < 2:
        checkpoint.save(f"{path}/pair", model, group=pair)
        checkpoint.load(f"{path}/pair", model, group=pair)
    checkpoint.save(f"{path}/again", model)
    checkpoint.load(f"{path}/again", model)


@pytest.mark.parametrize("guards", [None, lambda *tensors: None])
def test_nothing_is_kept_where_torch_compares_no_tensors(monkeypatch, guards):
    """Nothing is kept if torch's class TensorGuards is missing or has another signature."""
    monkeypatch.setattr(kept, "TensorGuards", guards)
    tensors = [torch.zeros(2)]
    forms = kept.Forms(tensors)
    assert not forms.let_go() and not forms.let_go()
    assert forms != kept.Forms(tensors)


def test_by_other_ranks(tmp_path: Path):
    run_ranks(groups, 3, path=str(tmp_path))
