"""Training runs whose optimizer state is known.

An unsharded model trains on the same gradients beside the sharded model. A FULL state dict must
equal the `state_dict()` of the unsharded model's optimizer.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from toys import Block, Reference, Toy, loss_of, tokens, wrap_blocks

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Mixed(Toy):
    """A Toy with parameters of two dtypes, and with a 0-dim, a frozen and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(13), requires_grad=False)
        self.fine = nn.Parameter(torch.randn(13, dtype=torch.float64))

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch) * self.scale + self.fine.float() + self.frozen


def mixed(seed: int = 0) -> Mixed:
    torch.manual_seed(seed)
    return Mixed()


def both(function: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])(function)


def on_rank_0(model: nn.Module) -> Any:
    """Return a context in which state dicts of weights and of optimizers are only on rank 0."""
    return type(model).state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
        FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


@dataclasses.dataclass
class Run:
    model: nn.Module
    optim: torch.optim.Optimizer
    reference: Reference
    expected_optim: torch.optim.Optimizer
    rank: int
    steps: int = 0

    def train(self, steps: int = 1) -> list[Tensor]:
        losses = []
        for _ in range(steps):
            batch = tokens(self.rank, self.steps)
            loss = loss_of(self.model, batch)
            loss.backward()
            self.reference.backward(batch)
            for optim in (self.optim, self.expected_optim):
                optim.step()
                optim.zero_grad()
            self.steps += 1
            losses.append(loss.detach())
        return losses

    def expected(self) -> dict[str, Any]:
        return named(self.reference.master, self.expected_optim)


def start(
    rank: int,
    plain: nn.Module,
    *,
    steps: int = 2,
    make: Make = adam,
    policy: tuple[type, ...] = (Block,),
    **options: Any,
) -> Run:
    reference = Reference(plain)
    model = wrap_blocks("fsdpc", copy.deepcopy(plain), *policy, **options)
    run = Run(model, make(model), reference, make(reference.master), rank)
    run.train(steps)
    return run


def named(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an unsharded optimizer's state dict, with names in place of ids.

    This function does not use the code that is tested.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    of_id = [names[id(p)] for group in optim.param_groups for p in group["params"]]
    saved = copy.deepcopy(optim.state_dict())
    groups = [{**g, "params": [of_id[i] for i in g["params"]]} for g in saved["param_groups"]]
    return {"state": {of_id[i]: s for i, s in saved["state"].items()}, "param_groups": groups}


def check_states(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that the names are the same, and that the values are equal to the bit."""
    assert got.keys() == expected.keys(), f"{sorted(got.keys() ^ expected.keys())}"
    for name, state in expected.items():
        assert got[name].keys() == state.keys(), name
        for key, value in state.items():
            where = f"{key} of {name}"
            if not isinstance(value, Tensor):
                assert got[name][key] == value, where
                continue
            other = got[name][key]
            assert (other.shape, other.dtype) == (value.shape, value.dtype), where
            assert torch.equal(other, value), f"{where}: {other} but expected {value}"


def options_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of each group, without the group's parameters.

    Tuples, such as betas, become lists, because torch's checkpoints turn tuples into lists.
    """
    return [
        {
            k: list(v) if isinstance(v, tuple) else v
            for k, v in g.items()
            if k not in ("params", "param_names")
        }
        for g in groups
    ]


def check_dict(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that states are equal, and that groups have the same parameters and options."""
    check_states(got["state"], expected["state"])
    for ours, theirs in zip(got["param_groups"], expected["param_groups"], strict=True):
        assert sorted(ours["params"]) == sorted(theirs["params"])
    assert options_of(got["param_groups"]) == options_of(expected["param_groups"])


def save(run: Run) -> dict[str, Any]:
    return type(run.model).optim_state_dict(run.model, run.optim)


def load(run: Run, saved: Any, **arguments: Any) -> None:
    """Load `saved` into the run's optimizer, and check that this does not change `saved`."""
    before = copy.deepcopy(saved)
    to_load = type(run.model).optim_state_dict_to_load(run.model, run.optim, saved, **arguments)
    if saved is not None and saved:
        check_states(saved["state"], before["state"])
    if not arguments.get("load_directly"):
        run.optim.load_state_dict(to_load)
