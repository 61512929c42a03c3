"""Writing folders of torch's distributed checkpoints (DCP) with torch's own library, for programs
that read no other format. A folder appears only when it is complete, as fsdpc's own checkpoints do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

from fsdpc._torch import ShardedTensor
from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint.dcp_folder import INDEX, KEYS, keys_of
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.folders import Draft
from fsdpc.checkpoint.layout import fingerprint, lay_out
from fsdpc.checkpoint.model import read_model
from fsdpc.checkpoint.optimizer import check_objects
from fsdpc.checkpoint.ranks import Ranks, check_equal


def check_options(format: str, given: list[str]) -> None:
    """Raise ``ValueError`` if the format is unknown, or if it does not support an option that was
    passed to ``save``.
    """
    if format != "dcp":
        raise ValueError(f"format must be 'safetensors' or 'dcp', not {format!r}")
    if given:
        raise ValueError(
            f"format='dcp' has no {', '.join(given)}: save without format= and convert the folder "
            "(python -m fsdpc.checkpoint convert SOURCE TARGET --to dcp)"
        )


def save_dcp(
    target: Path,
    ranks: Ranks,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    *,
    overwrite: bool,
) -> None:
    """Write a checkpoint with the keys "model", "optimizer" and "scheduler". Collective over
    ``ranks``.

    ``CheckpointError``: a rank failed; the target has not changed.
    """
    what = f"saving checkpoint {target} in torch's format"
    state = _state_of(ranks, model, optimizer, scheduler, target, what)
    draft: Draft | None = None
    try:
        with ranks.step(what) as created:
            if ranks.rank == 0:
                draft = Draft(target, overwrite, replaces=(_manifest.NAME, INDEX))
                created.value = str(draft.path)
        with ranks.step(what):
            _write(state, created.values[0], ranks)
        with ranks.step(what):
            if draft is not None:
                draft.publish(list(draft.path.iterdir()))
    except BaseException:
        if draft is not None:
            draft.discard()
        raise


def _state_of(
    ranks: Ranks, model: nn.Module, optimizer: Any, scheduler: Any, target: Path, what: str
) -> dict[str, Any]:
    with ranks.step(what) as read:
        optimizer = check_objects(optimizer, scheduler, "state_dict")
        found = read_model(model, (ranks.rank, ranks.world))  # raises if a tensor has no values
        read.value = {
            "sets": fingerprint([lay_out(found.entries, name="model", aliases=found.aliases)]),
            "target": str(target),
            "states": 1 if optimizer is None else len(optimizer.state),
        }
    check_equal(what, read.values)
    if not any(values["states"] for values in read.values):
        raise CheckpointError(
            f"{what}: the optimizer has no state: torch's library would make one by a step without "
            "gradients. Save after its first step, or without optimizer="
        )
    with ranks.step(what):
        weights, states = get_state_dict(model, () if optimizer is None else optimizer)
        state: dict[str, Any] = {"model": weights}
        if optimizer is not None:
            _check_states(weights, states["state"])
            state["optimizer"] = states
        if scheduler is not None:
            state["scheduler"] = scheduler.state_dict()
        state[KEYS] = keys_of(state)
    return state


def _check_states(weights: dict[str, Any], states: dict[str, Any]) -> None:
    """Raise ``TypeError`` if a state of a sharded parameter is a plain tensor. Torch's library
    would write one rank's shard as if it were the full tensor.
    """
    for name, values in states.items():
        if not _is_sharded(weights.get(name)):
            continue
        for key, value in values.items():
            if _is_sharded(value) or not isinstance(value, torch.Tensor):
                continue
            if value.numel() > 1:
                raise TypeError(
                    f"state {key!r} of {name} is no distributed tensor, as torch's format needs: "
                    "save without format="
                )


def _is_sharded(value: Any) -> bool:
    return isinstance(value, DTensor | ShardedTensor)


def _write(state: dict[str, Any], folder: str, ranks: Ranks) -> None:
    try:
        dcp.save(
            state,
            checkpoint_id=folder,
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),  # buffers: rank 0's
            process_group=ranks.torch_group(),
            no_dist=ranks.world == 1,
        )
    except CheckpointException as error:  # every rank gets the same exception
        own = error.failures.get(ranks.rank)
        if own is not None and not isinstance(own[0], Exception):
            raise own[0] from None  # Ctrl-C
        texts = [f"rank {r}: {type(e).__name__}: {e}" for r, (e, _) in error.failures.items()]
        raise CheckpointError("; ".join(texts)) from error
