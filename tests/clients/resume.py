"""Functions that save and load a model and its optimizer in three ways.

`with_state` prepares an optimizer for a load by accelerate.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdpc import FSDP, FullOptimStateDictConfig, FullStateDictConfig, StateDictType

FORMS = ["one file", "sharded", "get_state_dict"]
FULL = (
    StateDictType.FULL_STATE_DICT,
    FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
    FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
)


def with_state(optimizer: torch.optim.Optimizer) -> None:
    """Make a step with zero gradients, so that the optimizer has states.

    accelerate loads a sharded checkpoint into the states that the optimizer already has. A new
    optimizer has no states, so accelerate silently loads none. The same happens with torch's FSDP.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()


def save(form, model, optimizer, folder):
    """Save the model and the optimizer in the way that `form`, one of FORMS, names. Collective."""
    if form == "one file":
        with FSDP.state_dict_type(model, *FULL):
            state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        if model.rank == 0:
            torch.save(state, folder / "checkpoint.pt")
        dist.barrier()
        return
    if form == "sharded":
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    else:
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(state, checkpoint_id=folder)


def load(form, model, optimizer, folder):
    """Load a checkpoint of `save` into a new model and a new optimizer. Collective."""
    if form == "one file":
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
        with FSDP.state_dict_type(model, *FULL):
            model.load_state_dict(state["model"])
            state = FSDP.optim_state_dict_to_load(model, optimizer, state["optim"])
        optimizer.load_state_dict(state)
        return
    if form == "sharded":
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict()}
            checkpoint.load(state, checkpoint_id=folder)
            model.load_state_dict(state["model"])
            reader = checkpoint.FileSystemReader(folder)
            state = load_sharded_optimizer_state_dict(state["model"], "optim", reader)
            state = FSDP.optim_state_dict_to_load(model, optimizer, state["optim"])
        optimizer.load_state_dict(state)
        return
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
