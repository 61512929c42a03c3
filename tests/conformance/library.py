"""The interface through which a case uses torch's FSDP or fsdpc, by the same names."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from toys import PLACE, Block, clean, difference, loss_of, tokens

PACKAGES = {"torch": "torch.distributed.fsdp", "fsdpc": "fsdpc"}
# The cases of fully_shard state what torch 2.13 does; earlier releases lack methods and arguments.
HAS_ROWS = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")


@dataclasses.dataclass
class Library:
    """The library under test, torch or fsdpc, on one rank."""

    name: str
    package: str
    rank: int
    world: int
    made: dict[str, Any] = dataclasses.field(default_factory=dict)  # options that `units` adds
    caught: list[warnings.WarningMessage] = dataclasses.field(default_factory=list)

    @property
    def FSDP(self) -> Any:
        return importlib.import_module(self.package).FullyShardedDataParallel

    def submodule(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.{name}")

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """Wrap a module by FSDP on the CPU, or on a GPU with `pytest --gpu cuda`."""
        options.setdefault("device_id", PLACE)
        return self.FSDP(module, **options)

    def wrap_blocks(self, module: nn.Module, *classes: type, **options: Any) -> Any:
        """Make each module of the classes (default: Block) a unit, and the root as well."""
        policy = torch.distributed.fsdp.wrap.ModuleWrapPolicy(set(classes or (Block,)))
        return self.wrap(module, auto_wrap_policy=policy, **options)

    # --- what a case of both interfaces calls: RowsLibrary has the same names --------------------

    def units(self, module: nn.Module, *classes: type, **options: Any) -> Any:
        """Make each module of the classes (default: Block) a unit, and the root as well."""
        return self.wrap_blocks(module, *classes, **self.made, **options)

    def replicas(self) -> dict[str, Any]:
        """Return options of `units` for two replicas of two shards each. Collective."""
        strategy = torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD
        return {"sharding_strategy": strategy, "device_mesh": init_device_mesh("cpu", (2, 2))}

    def precision(self, **dtypes: torch.dtype) -> dict[str, Any]:
        """Return options of `units` for the dtypes of computation and of reduction."""
        return {"mixed_precision": torch.distributed.fsdp.MixedPrecision(**dtypes)}

    def clip(self, model: Any, limit: float) -> Tensor:
        """Clip the gradients to a total norm of ``limit``; return the norm before. Collective."""
        return model.clip_grad_norm_(limit)

    def values(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the unsharded values of a state dict. Collective."""
        return dict(state)

    def backward(self, model: Any, step: int = 0, micro: int = 0, sync: bool = True) -> Tensor:
        """Run a backward on this rank's batch, with a reduction if ``sync``; return the loss."""
        with self.summing(model, sync):
            loss = loss_of(model, self.batch(step, micro))
            loss.backward()
        return loss.detach()

    def warned(self, words: str = "") -> list[str]:
        """Return the sorted categories, each once, of all warnings that contain the words."""
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
        """Assert that the call raises this type or a subtype, and return the type's name."""
        try:
            call(*args, **kwargs)
        except error as caught:
            assert words.lower() in str(caught).lower(), f"other words: {caught}"
            return error.__name__
        raise AssertionError(f"{call} raised nothing, {error.__name__} was expected")

    def batch(self, step: int = 0, micro: int = 0) -> Tensor:
        """Return the token ids of this rank's batch."""
        return tokens(self.rank, step, micro)

    def summing(self, model: Any, sync: bool) -> AbstractContextManager[None]:
        """Return a context for a backward that sums gradients over the ranks only if ``sync``."""
        return nullcontext() if sync else model.no_sync()

    def gradients_after(self, model: Any, pattern: str = "1") -> dict[str, Any]:
        """Run a backward per letter and return the gradients. A backward at "0" reduces nothing."""
        for micro, letter in enumerate(pattern):
            if "0" in pattern:
                self.backward(model, 0, micro, letter == "1")
            else:
                loss_of(model, self.batch(0, micro)).backward()
        return self.gradients(model)

    def check_gradients(self, model: Any, reference: Any) -> None:
        """Assert that the gradients equal those of a `Reference`."""
        text = difference(self.gradients(model), reference.gradients(), rtol=1e-5)
        assert not text, f"gradients: {text}"

    def full_after(
        self,
        model: Any,
        loss: Callable[[int], Tensor] | None = None,
        *,
        count: int = 3,
        optimizer: Any = None,
    ) -> dict[str, Tensor]:
        """Return the full parameters after `count` steps on ``loss(step)``.

        The default optimizer is SGD.
        """
        optimizer = optimizer or torch.optim.SGD(trainable(model), lr=0.1)
        for step in range(count):
            (loss(step) if loss else loss_of(model, self.batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return self.full(model)

    def train(
        self,
        model: Any,
        steps: int = 2,
        *,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
        set_to_none: bool = True,
    ) -> dict[str, Any]:
        """Make AdamW steps on this rank's batches; return the losses and the final parameters."""
        optimizer = torch.optim.AdamW(trainable(model), lr=1e-2, eps=1e-3)
        losses = []
        for step in range(steps):
            with within():
                loss = loss_of(model, self.batch(step))
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        return {"losses": losses, "parameters": self.full(model)}

    def full(self, model: Any) -> dict[str, Tensor]:
        """Return every unsharded parameter under its clean name. Collective."""
        with self.FSDP.summon_full_params(model, writeback=False):
            return {clean(n): p.detach().clone() for n, p in model.named_parameters()}

    def gradients(self, model: Any) -> dict[str, Tensor]:
        """Return every unsharded gradient, or zeros if there is none. Collective."""
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


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]
