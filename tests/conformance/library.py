"""What a case sees of the library under test: the same names, whichever of the two it is."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from toys import PLACE, Block, clean, loss_of, tokens

PACKAGES = {"torch": "torch.distributed.fsdp", "fsdpc": "fsdpc"}


@dataclasses.dataclass
class Library:
    """One of the two libraries, on one rank."""

    name: str
    package: str
    rank: int
    world: int
    caught: list[warnings.WarningMessage] = dataclasses.field(default_factory=list)

    @property
    def FSDP(self) -> Any:
        return importlib.import_module(self.package).FullyShardedDataParallel

    def submodule(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.{name}")

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """FullyShardedDataParallel on the CPU, or on the GPU of `pytest --gpu cuda`."""
        options.setdefault("device_id", PLACE)
        return self.FSDP(module, **options)

    def wrap_blocks(self, module: nn.Module, *classes: type, **options: Any) -> Any:
        """One unit per module of the classes (default: Block), and the root's own."""
        policy = torch.distributed.fsdp.wrap.ModuleWrapPolicy(set(classes or (Block,)))
        return self.wrap(module, auto_wrap_policy=policy, **options)

    def warned(self, words: str = "") -> list[str]:
        """Categories of the warnings so far that contain the words, each once, sorted."""
        found = [w for w in self.caught if words.lower() in str(w.message).lower()]
        return sorted({w.category.__name__ for w in found})

    def refuses(
        self,
        error: type[BaseException],
        call: Callable[..., Any],
        *args: Any,
        words: str = "",
        **kwargs: Any,
    ) -> str:
        """Asserts that the call raises this type (or one derived from it); returns its name."""
        try:
            call(*args, **kwargs)
        except error as caught:
            assert words.lower() in str(caught).lower(), f"other words: {caught}"
            return error.__name__
        raise AssertionError(f"{call} raised nothing, {error.__name__} was expected")

    def batch(self, step: int = 0, micro: int = 0) -> Tensor:
        """This rank's token ids."""
        return tokens(self.rank, step, micro)

    def train(self, model: Any, steps: int = 2, **options: Any) -> dict[str, Any]:
        """Losses of a few AdamW steps on this rank's batches, and the parameters after them."""
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=1e-2, eps=1e-3)
        losses = []
        for step in range(steps):
            loss = loss_of(model, self.batch(step))
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad(**options)
        return {"losses": losses, "parameters": self.full(model)}

    def full(self, model: Any) -> dict[str, Tensor]:
        """Every parameter at full size under its clean name. Collective."""
        with self.FSDP.summon_full_params(model, writeback=False):
            return {clean(n): p.detach().clone() for n, p in model.named_parameters()}

    def gradients(self, model: Any) -> dict[str, Tensor]:
        """Every gradient at full size, zeros where there is none. Collective."""
        saved = [(p, p.detach().clone()) for p in model.parameters()]
        with torch.no_grad():
            for p, _ in saved:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.copy_(grad.reshape(p.shape))
            try:
                return self.full(model)
            finally:
                for p, value in saved:
                    p.copy_(value)
