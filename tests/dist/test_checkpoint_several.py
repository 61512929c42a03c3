"""Several models, optimizers and other objects in one checkpoint.

Any number of ranks loads all of these objects, or none of them if the load fails. Each model can
also be loaded alone.
"""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoints import whole
from harness import ranks, run_ranks
from torch import nn

import fsdpc
from fsdpc import checkpoint
from fsdpc.checkpoint import CheckpointError
from fsdpc.checkpoint.verify import describe, verify


def net(seed: int, door: str) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))  # each of 3 ranks has elements
    if door == "fully_shard":
        return fsdpc.fully_shard(model)
    return fsdpc.FSDP(model, use_orig_params=door == "orig")


class Loader:
    """A data loader that has a different position on each rank."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def trained(seed: int, door: str):
    """Return three models and their optimizers. Each optimizer has taken a step.

    The third model stands for an average of weights, and has no optimizer.
    """
    first, second = net(seed, door), net(seed + 1, door)
    params = list(first.parameters())
    half = max(1, len(params) // 2)
    optimizers = {
        "weights": torch.optim.AdamW(params[:half]),
        "second": torch.optim.SGD(second.parameters(), momentum=0.9),
    }
    if params[half:]:
        optimizers["rest"] = torch.optim.SGD(params[half:], momentum=0.5)
    for model in (first, second):
        model(torch.ones(2, 6)).sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return {"first": first, "second": second, "ema": net(seed + 2, door)}, optimizers


def values(models, optimizers):
    """Return the whole values of all models and optimizer states."""
    found = {n: whole(copy.deepcopy(m.state_dict())) for n, m in models.items()}
    for name, optimizer in optimizers.items():
        for i, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{name}.{i}.{key}"] = value.detach().clone()
    return found


def equal(one, other) -> bool:
    assert one.keys() == other.keys()
    for name, value in one.items():
        pairs = [(value, other[name])] if torch.is_tensor(value) else [
            (value[key], other[name][key]) for key in value]  # fmt: skip
        if not all(torch.equal(a, b) for a, b in pairs):
            return False
    return True


@ranks(2, 3)
@pytest.mark.parametrize("door", ["fully_shard", "orig", "flat"])
def test_several_objects(rank, world, door, tmp_path):
    models, optimizers = trained(0, door)
    expected = values(models, optimizers)
    states = {"loader": Loader(10 + rank), "scaler": Loader(5)}
    schedulers = {n: torch.optim.lr_scheduler.StepLR(o, 2) for n, o in optimizers.items()}
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    checkpoint.save(
        tmp_path / "all", models, optimizers, schedulers, states=states, rng=True, step=7
    )
    drawn = (random.random(), np.random.rand(), torch.rand(2).tolist())
    others, fresh = trained(20, door)
    assert not equal(values(others, fresh), expected)
    again = {"loader": Loader(0), "scaler": Loader(0)}
    found = checkpoint.load(tmp_path / "all", others, fresh, schedulers, states=again, rng=True)
    assert (found.step, found.verified, found.missing) == (7, True, [])
    assert equal(values(others, fresh), expected)
    assert (again["loader"].position, again["scaler"].position) == (10 + rank, 5)
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == drawn
    # Load one of the models, by its name and by its folder.
    for path, model in (
        (tmp_path / "all", lambda m: {"ema": m}),
        (tmp_path / "all/ema", lambda m: m),
    ):
        one = net(30, door)
        checkpoint.load(path, model(one))
        assert equal({"ema": whole(one.state_dict())}, {"ema": expected["ema"]})
    if rank == 0:
        report = verify(tmp_path / "all")
        assert report.damaged == [] and report.tensors >= 12
        assert sum("model-00001" in line for line in describe(tmp_path / "all")) == 3


def write(rank, world, path):
    models, optimizers = trained(0, "fully_shard")
    own, same = Loader(rank), Loader(4)
    checkpoint.save(path, models, optimizers, states={"own": own, "same": same})
    return values(models, optimizers)


def read(rank, world, path, expected):
    models, optimizers = trained(20, "fully_shard")
    same = Loader(0)
    checkpoint.load(path, models, optimizers, states={"same": same})
    assert same.position == 4
    assert equal(values(models, optimizers), expected)
    with pytest.raises(CheckpointError, match="'own' was saved by 2 ranks, .* and 3 load it"):
        checkpoint.load(path, models, optimizers, states={"own": same})


def test_other_number_of_ranks(tmp_path):
    expected = run_ranks(write, 2, path=str(tmp_path / "all"))[0]
    run_ranks(read, 3, path=str(tmp_path / "all"), expected=expected)


@ranks(2)
def test_all_or_nothing(rank, world, tmp_path):
    """A load finds damage in the last object before it changes the first object."""
    models, optimizers = trained(0, "fully_shard")
    checkpoint.save(tmp_path / "all", models, optimizers)
    if rank == 0:
        (file,) = (tmp_path / "all" / "ema").glob("*.safetensors")
        raw = bytearray(file.read_bytes())
        raw[-3] ^= 4
        file.write_bytes(raw)
    dist.barrier()
    others, fresh = trained(20, "fully_shard")
    before = values(others, fresh)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load(tmp_path / "all", others, fresh)
    assert equal(values(others, fresh), before)
    checkpoint.save(tmp_path / "all", models, optimizers, overwrite=True)
    checkpoint.save(tmp_path / "more", {"ema": net(3, "fully_shard")})
    if rank == 0:
        (tmp_path / "all" / "ema" / "fsdpc.json").unlink()
        (tmp_path / "more" / "ema" / "fsdpc.json").rename(tmp_path / "all" / "ema" / "fsdpc.json")
    dist.barrier()
    with pytest.raises(CheckpointError, match="damaged|is not the part"):
        checkpoint.load(tmp_path / "all", others, fresh)
    assert equal(values(others, fresh), before)


@ranks(2)
def test_refusals(rank, world, tmp_path):
    models, optimizers = trained(0, "fully_shard")
    path = tmp_path / "all"
    for wrong, text in (
        (({"a/b": models["ema"]}, None), "cannot be the name of a part"),
        ((models, torch.optim.SGD(models["ema"].parameters())), "a dict of optimizers"),
        (({"ema": models["ema"]}, {"weights": optimizers["weights"]}), "are in none of the models"),
        (({}, None), "or a dict of them"),
    ):
        with pytest.raises(CheckpointError, match=text):
            checkpoint.save(path, *wrong)
    with pytest.raises(CheckpointError, match="has no state_dict"):
        checkpoint.save(path, models, states={"x": nn.Module.state_dict})
    with pytest.raises(CheckpointError, match="refuses|model={...}|does not|format"):
        checkpoint.save(path, models, format="dcp")
    with pytest.raises(CheckpointError, match="are for one model"):
        checkpoint.save(path, models, only="0.*")
    assert not path.exists()
    checkpoint.save(path, models, optimizers)
    with pytest.raises(CheckpointError, match="has the parts .*give a dict"):
        checkpoint.load(path, models["ema"])
    with pytest.raises(CheckpointError, match=r"not \['student'\]"):
        checkpoint.load(path, {"student": models["ema"]})
    with pytest.raises(CheckpointError, match="not 'loader'"):
        checkpoint.load(path, models, states={"loader": Loader(0)})


@ranks(2)
def test_folders_of_steps(rank, world, tmp_path):
    """`Checkpointer` takes the arguments of `save` and `load`, also for background saves."""
    models, optimizers = trained(0, "orig")
    expected = values(models, optimizers)
    keeper = checkpoint.Checkpointer(tmp_path, keep=1, async_=True)
    for step in (1, 2):
        keeper.save(step, models, optimizers, states={"loader": Loader(rank)}, rng=True)
    keeper.wait()
    others, fresh = trained(20, "orig")
    loader = Loader(9)
    found = keeper.resume(others, fresh, states={"loader": loader}, rng=True)
    assert (found.step, loader.position, keeper.steps()) == (2, rank, [2])
    assert equal(values(others, fresh), expected)


@ranks(2)
def test_a_group_of_some_ranks(rank, world, tmp_path):
    """Ranks outside of the group get an error that says that they are not in the group.

    In an earlier version, they got "cannot create weak reference to 'int' object".
    """
    group = dist.new_group([1])
    model = nn.Linear(2, 2)
    if rank == 1:
        checkpoint.save(tmp_path / "a", model, group=group)
        checkpoint.load(tmp_path / "a", model, group=group)
        return
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises(ValueError, match="this rank is not one of the group's"):
            call(tmp_path / "a", model, group=group)
