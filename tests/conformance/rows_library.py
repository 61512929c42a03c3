"""The interface through which cases of ``fully_shard`` use the library under test."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from library import Library
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from toys import Block, clean, loss_of, toy


class RowsLibrary(Library):
    """The library under test, used through ``fully_shard``, which shards parameters by rows."""

    @property
    def fully_shard(self) -> Any:
        return importlib.import_module(self.package).fully_shard

    @property
    def FSDPModule(self) -> Any:
        return importlib.import_module(self.package).FSDPModule

    def name_of(self, name: str) -> Any:
        return getattr(importlib.import_module(self.package), name)

    def mesh(self, *shape: int, names: Iterable[str] = ("replicate", "shard")) -> DeviceMesh:
        """Return a mesh of all ranks, which is 1-D if no shape is given. Collective."""
        shape = shape or (self.world,)
        dims = tuple(names) if len(shape) == 2 else None
        return init_device_mesh("cpu", shape, mesh_dim_names=dims)

    def shard_blocks(self, model: nn.Module, *classes: type, **options: Any) -> Any:
        """Make each module of the classes (default: Block) and the root a unit. Collective."""
        for module in reversed(list(model.modules())):
            if isinstance(module, classes or (Block,)) and module is not model:
                self.fully_shard(module, **options)
        return self.fully_shard(model, **options)

    def summing(self, model: Any, sync: bool) -> AbstractContextManager[None]:
        model.set_requires_gradient_sync(sync)
        return nullcontext()

    def units(self, module: nn.Module, *classes: type, **options: Any) -> Any:
        return self.shard_blocks(module, *classes, **options)

    def replicas(self) -> dict[str, Any]:
        return {"mesh": self.mesh(2, 2)}

    def precision(self, **dtypes: torch.dtype) -> dict[str, Any]:
        return {"mp_policy": MixedPrecisionPolicy(**dtypes)}

    def clip(self, model: Any, limit: float) -> Tensor:
        self.resharded(model)
        return whole(nn.utils.clip_grad_norm_(model.parameters(), limit))

    def values(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: whole(value) for name, value in state.items()}

    def resharded(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, TorchFSDPModule):
                module.reshard()

    def full(self, model: Any) -> dict[str, Tensor]:
        """Return every unsharded parameter under its clean name. Collective."""
        self.resharded(model)
        return {clean(n): whole(p) for n, p in model.named_parameters()}

    def gradients(self, model: Any) -> dict[str, Any]:
        """Return every unsharded gradient, or None if there is none. Collective."""
        self.resharded(model)
        return {
            clean(n): None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()
        }


def whole(value: Tensor) -> Tensor:
    """Return a copy of the whole tensor. Collective for a DTensor."""
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def linear(rows=5, columns=3, seed=0, **options):
    torch.manual_seed(seed)
    return nn.Linear(columns, rows, **options)


def trained(lib, seed=0, steps=2, optimizer=True, **options):
    """Train a model for some steps; return it, with its optimizer if ``optimizer``."""
    model = lib.shard_blocks(toy(seed), **options)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(steps):
        loss_of(model, lib.batch(step)).backward()
        made.step()
        made.zero_grad()
    return (model, made) if optimizer else model


def wholes(state):
    if isinstance(state, dict):
        return {key: wholes(value) for key, value in state.items()}
    if isinstance(state, list):
        return [wholes(value) for value in state]
    return whole(state) if isinstance(state, torch.Tensor) else state


def shown(model):
    """Return the names of the parameters that are sharded now."""
    return [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
