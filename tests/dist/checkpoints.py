"""Helpers that the tests of state dicts and checkpoints share.

The helpers make a model with all kinds of entries, shard models in each way, put whole values
together from shards, and save and load checkpoints on disk.

If one group of ranks writes a checkpoint and another group reads it, pass the folder `tmp_path`:

    run_ranks(write, 2, path=str(tmp_path), kind="fsdp1")
    run_ranks(read, 3, path=str(tmp_path), kind="fsdpc")
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from toys import Block, toy, wrap_blocks

FULL = StateDictType.FULL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT

# Name -> engine and options. build() takes two more names: "fsdp2" is torch's fully_shard, and
# "plain" is no sharding at all.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdpc": ("fsdpc", {"use_orig_params": True}),
    "fsdpc-flat": ("fsdpc", {"use_orig_params": False}),
    "fsdpc-mesh": ("fsdpc", {"use_orig_params": True, "mesh": True}),
    "fsdp1": ("torch.distributed.fsdp", {"use_orig_params": True}),
    "fsdp1-flat": ("torch.distributed.fsdp", {"use_orig_params": False}),
    "fsdp1-mesh": ("torch.distributed.fsdp", {"use_orig_params": True, "mesh": True}),
}


class Mixed(nn.Module):
    """A model with entries of many kinds.

    It has buffers of all kinds, tied parameters, a 0-dim parameter, a frozen parameter, integer and
    low-precision parameters, extra state, and one module at two places.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.stage = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.again = self.stage[0]
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.low = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.codes = nn.Parameter(torch.arange(7), requires_grad=False)
        self.register_buffer("mask", torch.randn(2, 2))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.note = "kept"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stage(self.embed(tokens).mean(0)) * self.scale
        return self.head(self.again(x)) + self.mask.sum() + self.low.sum()


def mixed(seed: int = 0) -> Mixed:
    torch.manual_seed(seed)
    model = Mixed()
    with torch.no_grad():
        model.codes += seed
    return model


def build(kind: str, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """Shard the model (default: a Toy) as `kind` says, with one unit per Block. Collective."""
    model = toy() if model is None else model
    if kind == "plain":
        return model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for module in list(model.modules()):
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    engine, own = KINDS[kind]
    options = {**own, **options}
    if options.pop("mesh", False):
        options["device_mesh"] = mesh
    return wrap_blocks(engine, model, **options)


def hybrid(mesh: bool) -> dict[str, Any]:
    """Return the options of HYBRID_SHARD on four ranks, as a mesh or as process groups."""
    if mesh:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        options: dict[str, Any] = {"device_mesh": both}
    else:
        shard, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        replicate, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        options = {"process_group": (shard, replicate)}
    return {**options, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}


def whole(value: Any) -> Any:
    """Return `value` with every distributed tensor replaced by the whole tensor, on every rank.

    `value` is a value of a state dict or a dict of such values. Collective for distributed values.
    One collective gathers all ShardedTensors.
    """
    leaves, form = tree_flatten(value)
    sharded = iter(whole_of_sharded([leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]))
    return tree_unflatten([whole_of_one(leaf, sharded) for leaf in leaves], form)


def whole_of_one(value: Any, sharded: Iterator[Tensor]) -> Any:
    if isinstance(value, ShardedTensor):
        return next(sharded)
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_of_sharded(values: list[ShardedTensor]) -> list[Tensor]:
    """Put values together by the metadata of their shards, which must cover each element once."""
    if not values:
        return []
    groups = {value._process_group for value in values}
    assert len(groups) == 1, groups
    mine = [[(s.metadata.shard_offsets, s.tensor) for s in v.local_shards()] for v in values]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=groups.pop())
    members = [shards for shards in everyone if shards is not None]
    return [put_together(v, sum(parts, [])) for v, *parts in zip(values, *members, strict=True)]


def put_together(value: ShardedTensor, shards: list[tuple[list[int], Tensor]]) -> Tensor:
    full = torch.zeros(value.size(), dtype=value.dtype)
    covered = torch.zeros(value.size(), dtype=torch.int)
    for offsets, tensor in shards:
        place = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
        full[place] = tensor
        covered[place] += 1
    assert bool((covered == 1).all()), "shards overlap or leave a gap"
    return full


def same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that keys, order, dtypes, shapes and values are equal; `got` may be distributed."""
    assert list(got) == list(expected)
    full = whole(dict(got))
    for key, value in expected.items():
        found = full[key]
        if isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype and found.shape == value.shape, key
            assert torch.equal(found, value), key
        else:
            assert found == value, key


def typed(model: nn.Module, kind: StateDictType = SHARDED, config: Any = None) -> Any:
    """Return the context `state_dict_type` of the units' class, torch's or fsdpc's."""
    units = [m for m in model.modules() if hasattr(type(m), "state_dict_type")]
    return type(units[0]).state_dict_type(model, kind, config)


def save(path: str, state: dict[str, Any]) -> None:
    """Save a checkpoint with torch.distributed.checkpoint. Collective."""
    dcp.save(state, checkpoint_id=path)


def load(path: str, state: dict[str, Any]) -> None:
    """Fill `state` in place from a checkpoint, with resharding where needed. Collective."""
    dcp.load(state, checkpoint_id=path)


def dcp_state_dict() -> Any:
    """Return the module torch.distributed.checkpoint.state_dict, imported on first use."""
    return importlib.import_module("torch.distributed.checkpoint.state_dict")
