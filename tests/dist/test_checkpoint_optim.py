"""Checkpoints of every optimizer of fsdpc.optim, loaded by other numbers of ranks.

A checkpoint that is loaded and saved again has the digests of the first one. The parameters and the
loss of the next step are those of a run that was never saved.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_checkpoint_elastic import digests, tensors_of
from test_optim_steps import OPTIONS, SHAPES, STEPS, Model, make, same, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from toys import full_parameters, wrap

import fsdpc
from fsdpc import checkpoint, optim

HOPS = [(2, "units"), (3, "flat"), (1, "plain"), (4, "rows"), (2, "fsdpc rows")]


def sharded(kind: str) -> nn.Module:
    model = Model(torch.float32)
    if kind in ("units", "flat"):
        return wrap("fsdpc", model, use_orig_params=kind == "units")
    if kind == "plain":
        return model
    shard = fully_shard if kind == "rows" else fsdpc.fully_shard
    return shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))


def full(model: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    if kind in ("units", "flat"):
        return full_parameters(model)
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in model.named_parameters()
    }


def write(rank: int, world: int, paths: dict[str, str], kind: str) -> None:
    for name, path in paths.items():
        model = sharded(kind)
        optimizer = make(name, model)
        train(model, optimizer, range(STEPS), False)
        checkpoint.save(path, model, optimizer)


def hop(
    rank: int, world: int, paths: dict[str, str], to: dict[str, str], kind: str
) -> dict[str, Any]:
    found = {}
    for name, path in paths.items():
        model = sharded(kind)
        optimizer = make(name, model, **({"lr": 7.0} if "lr" not in OPTIONS[name] else {}))
        verify = "during" if world in (2, 3) else "before"
        assert checkpoint.load(path, model, optimizer, verify=verify).verified
        checkpoint.save(to[name], model, optimizer)
        train(model, optimizer, range(STEPS, STEPS + 1), False)
        found[name] = full(model, kind) | {"loss": model(0).detach()}
    return found


def never_saved(name: str) -> dict[str, torch.Tensor]:
    model, threads = Model(torch.float32), torch.get_num_threads()
    torch.set_num_threads(1)  # as in a rank, because the number of threads changes the rounding
    train(model, make(name, model), range(STEPS + 1), False)
    torch.set_num_threads(threads)
    return full(model, "plain") | {"loss": model(0).detach()}


@pytest.mark.long
def test_optimizers_at_other_numbers_of_ranks(tmp_path: Path):
    paths = [{name: str(tmp_path / f"{name}{i}") for name in OPTIONS} for i in range(len(HOPS))]
    run_ranks(write, HOPS[0][0], paths=paths[0], kind=HOPS[0][1])
    expected = {name: never_saved(name) for name in OPTIONS}
    for i, (world, kind) in list(enumerate(HOPS))[1:]:
        found = run_ranks(hop, world, paths=paths[i - 1], to=paths[i], kind=kind)
        for name in OPTIONS:
            assert digests(paths[i][name]) == digests(paths[0][name]), (name, kind)
            for key, value in expected[name].items():
                if name == "AdamWBF16" and kind == "flat":
                    continue  # random bits depend on the parameter's position, which differs
                for each in found:
                    same(name, each[name][key], value)


def save_low(rank: int, world: int, path: str) -> None:
    for name in ("AdamW8bit", "AdamMini", "AdamW"):
        model = sharded("flat")
        optimizer = make(name, model, **({"amsgrad": False} if name == "AdamW" else {}))
        train(model, optimizer, range(1), False)
        checkpoint.save(f"{path}/{name}", model, optimizer)


def load_low(rank: int, world: int, path: str) -> None:
    for saved, other, text in (
        (
            "AdamW8bit",
            "AdamW",
            r"'a' .* does not fit AdamW: it lacks exp_avg, .* has exp_avg.codes",
        ),
        ("AdamW", "AdamW8bit", r"state of 'a' is exp_avg torch.float32.*but exp_avg.codes"),
        ("AdamW8bit", "AdamMini", r"state of 'a' is exp_avg.codes.*scales .* per 256 elements"),
    ):
        model = sharded("units")
        before = {name: value.clone() for name, value in full_parameters(model).items()}
        with pytest.raises(checkpoint.CheckpointError, match=text):
            checkpoint.load(f"{path}/{saved}", model, make(other, model))
        for name, value in full_parameters(model).items():
            assert torch.equal(value, before[name])
    model = sharded("units")
    mini = optim.AdamMini(model.named_parameters(), block=lambda name, shape: 7)
    with pytest.raises(checkpoint.CheckpointError, match="per 131 elements in the checkpoint.* 7 "):
        checkpoint.load(f"{path}/AdamMini", model, mini)


def test_states_of_another_form_are_refused(tmp_path: Path):
    run_ranks(save_low, 3, path=str(tmp_path))
    run_ranks(load_low, 2, path=str(tmp_path))
    stored = tensors_of(str(tmp_path / "AdamW8bit"))
    size = math.prod(SHAPES["a"])
    assert stored["state.a.exp_avg.codes"].shape == SHAPES["a"]
    assert stored["state.a.exp_avg_sq.scales"].shape == (-(-size // 256),)
    assert stored["state.b.exp_avg"].dtype == torch.float32  # too small for 8 bits


class WithIntegers(nn.Module):
    """A module with integer parameters, for which an optimizer makes states, too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(200), requires_grad=False)
        self.small = nn.Parameter(torch.arange(3, dtype=torch.int16), requires_grad=False)
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return x @ self.weight + self.table[0] + self.small[0]


def with_states(door: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = WithIntegers()
    if door == "fully_shard":
        fsdpc.fully_shard(model)
    else:
        model = wrap("fsdpc", model, use_orig_params=door == "units")
    optimizer = torch.optim.Adagrad(model.parameters())
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def sums(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = (optimizer.state.get(p, {}).get("sum", torch.empty(0)) for p in model.parameters())
    return [each.to_local() if hasattr(each, "to_local") else each for each in found]


def integers(rank: int, world: int, path: str, door: str) -> None:
    model, optimizer = with_states(door)
    for each in sums(model, optimizer):
        each.add_(torch.arange(each.numel()).view(each.shape) + 100 * rank)
    expected = [each.clone() for each in sums(model, optimizer)]
    ways = [
        (checkpoint.save, lambda _, *other: checkpoint.load(path, *other)),
        (lambda _, *own: fsdpc.FullyShardedDataParallel.optim_state_dict(*own), give),
    ]
    for save, load in ways[: 1 if door == "fully_shard" else 2]:
        other = with_states(door)
        if door == "flat":
            with pytest.raises((NotImplementedError, RuntimeError), match="'sum' of table.*bytes"):
                save(path, model, optimizer)
            continue
        load(save(path, model, optimizer), *other)
        assert all(map(torch.equal, sums(*other), expected))


def give(state: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    cls = fsdpc.FullyShardedDataParallel
    optimizer.load_state_dict(cls.optim_state_dict_to_load(model, optimizer, state))


@pytest.mark.parametrize("door", ["units", "flat", "fully_shard"])
def test_states_of_integers(tmp_path: Path, door: str):
    """States of integer parameters can be saved, although units keep integers as bytes.

    A flat parameter contains integers as bytes. States of these bytes cannot be saved by parameter
    names, so a save refuses them.
    """
    run_ranks(integers, 2, path=str(tmp_path / "made"), door=door)
