"""Training of a sharded model beside an unsharded reference that makes the same steps.

The parameters of both models are frozen and unfrozen together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from toys import (
    PRECISIONS,
    Precision,
    Reference,
    Toy,
    check_gradients,
    check_parameters,
    clean,
    loss_of,
    none_gradients,
    tokens,
    toy,
    wrap_blocks,
)

both_ways = pytest.mark.parametrize("use_orig_params", [True, False])
# The strategies that need no mesh.
every_strategy = pytest.mark.parametrize(
    "strategy", list(ShardingStrategy)[:3], ids=lambda s: s.name
)


def sharded(strategy: ShardingStrategy, world: int) -> dict[str, Any]:
    """Return options of a ``Pair``: the strategy, its mesh, and its sharding groups."""
    options: dict[str, Any] = {"sharding_strategy": strategy}
    if strategy is ShardingStrategy.NO_SHARD:
        options["groups"] = [[r] for r in range(world)]
    if strategy is ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
        options["groups"] = [[0, 1], [2, 3]]
    return options


def params_of(model: nn.Module, path: str) -> list[nn.Parameter]:
    """Return the parameters at or below a path of the unwrapped model; "" is the whole model."""
    found = [p for name, p in model.named_parameters() if under(clean(name), path)]
    assert found, f"no parameter at {path}"
    return found


def under(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(path + ".")


class Pair:
    """A sharded model and its unsharded reference, each with an optimizer of all its parameters."""

    def __init__(
        self,
        rank: int,
        *,
        plain: nn.Module | None = None,
        frozen: tuple[str, ...] = (),
        precision: Precision = PRECISIONS[0],
        groups: list[list[int]] | None = None,
        wrapped: Callable[..., nn.Module] = wrap_blocks,
        optimizer_of: Callable[[list[nn.Parameter]], Any] | None = None,
        **options: Any,
    ) -> None:
        plain = plain or toy()
        self.rank = rank
        for path in frozen:
            for p in params_of(plain, path):
                p.requires_grad_(False)
        self.reference = Reference(plain, precision, groups=groups)
        self.model = wrapped("fsdpc", plain, **options, **precision.options())
        self.optimizers = [(optimizer_of or adam)(list(m.parameters())) for m in self.models]
        self.step_number = 0

    @property
    def plain(self) -> nn.Module:
        """The unsharded model."""
        return self.reference.master

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.model, self.plain

    def set(self, path: str, flag: bool) -> None:
        for model in (self.model, self.reference.master, self.reference.compute):
            for p in params_of(model, path):
                p.requires_grad_(flag)

    def batch(self, micro: int = 0) -> torch.Tensor:
        return tokens(self.rank, self.step_number, micro)

    def accumulate(self, micro: int = 0) -> None:
        """Run one backward without communication on both models."""
        with self.model.no_sync():
            loss_of(self.model, self.batch(micro)).backward()
        self.reference.backward(self.batch(micro), sync=False)

    def backward(self, between: Callable[[], None] = lambda: None) -> None:
        """Run the forwards of both models, call `between`, and run the backwards of both models."""
        loss = loss_of(self.model, self.batch())
        if between:
            expected = self.reference.forward(self.batch())
            between()
            self.reference.compute.zero_grad(set_to_none=True)
            expected.backward()
            self.reference.take_gradients()
            self.reference.reduce()
        loss.backward()

    def step(self, between: Callable[[], None] = lambda: None, *, zero: bool = True) -> None:
        """Run a backward, compare gradients, step the optimizers, and compare parameters."""
        self.backward(between)
        self.compare_gradients()
        self.apply(zero=zero)

    def follow(self, *steps: str) -> None:
        """Run one step for each text of `steps`.

        The words of a text are commands. They are executed before the step's forward, or between
        forward and backward if they stand behind "|". "+path" makes the parameters below a path
        trainable, and "-path" freezes them ("all" is every parameter). A digit is the number of a
        micro-batch that runs without communication. "eval" is a forward without gradients.

        "keep" leaves the gradients in place after the step. "none" says that nothing is trainable,
        so that there is no backward.
        """
        for text in steps:
            before, _, between = text.partition("|")
            self.do(before)
            if "none" in text:
                assert not loss_of(self.model, self.batch()).requires_grad
            else:
                self.step(lambda words=between: self.do(words), zero="keep" not in text)

    def do(self, words: str) -> None:
        for word in words.split():
            if word[0] in "+-":
                self.set("" if word[1:] == "all" else word[1:], word[0] == "+")
            elif word.isdigit():
                self.accumulate(int(word))
            elif word == "eval":
                with torch.no_grad():
                    self.model(self.batch(1))

    def compare_gradients(self) -> None:
        what = f"in step {self.step_number}"
        check_gradients("fsdpc", self.model, self.reference, what)
        got, expected = none_gradients(self.model), self.reference.none_gradients()
        assert got <= expected and self.flat_aware(expected - got), (
            f"without gradient {what}: {got} != {expected}"
        )

    def flat_aware(self, missing: set[str]) -> bool:
        """Return True if `missing` is empty or the parameters are flat.

        With flat parameters, a gradient that is None in the reference is shown as zeros.
        """
        return not missing or not self.model._use_orig_params

    def apply(self, *, zero: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            if zero:
                optimizer.zero_grad()
        check_parameters("fsdpc", self.model, self.reference, f"after step {self.step_number}")
        self.step_number += 1


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-3)


__all__ = ["Pair", "Toy", "adam", "both_ways", "every_strategy", "params_of", "sharded"]
