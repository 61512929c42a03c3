"""Reading of DeepSpeed's universal checkpoints (``ds_to_universal``).

A folder ``zero/<parameter>/`` has files of ``torch.save`` for the fp32 value (``fp32.pt``), the
step and each optimizer state. ZeRO stages 1 and 2 write ``{"param": tensor}``. Stage 3 writes flat
tensors without their shapes, and does not write the step. The shapes are then read from a file of
model states, and the step from the file of the optimizer's state, if these files have no objects of
DeepSpeed's classes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any

import torch

from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.held import Root

_FOLDER, _VALUE, _STEP, _END = "zero", "fp32", "step", ".pt"
_OPTIMIZER = f"{_FOLDER}/optimizer_state{_END}"
_OPTIONS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum")  # as torch names them
_OF_RANKS = re.compile(r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_OF_MODEL = re.compile(r".*_model_states\.pt")
Read = Callable[[str], Any]


def universal_tree(root: Root, read: Read) -> dict[str, Any] | None:
    """Return a dict with "model" and, if there are states, "optimizer"; or None if the folder is no
    universal checkpoint. All other keys of the dict name what was left out. ``read`` returns the
    content of a file.

    Raises ``CheckpointError`` if the folder has the files of ZeRO's ranks instead of a universal
    checkpoint, or if the shape of a value is not known.
    """
    here = os.listdir(root.folder.fd)
    if not root.exists(f"{_FOLDER}/."):  # the folder does not exist, or is a file
        if any(map(_OF_RANKS.fullmatch, here)):
            raise CheckpointError(
                f"{root.path} has the parts of ranks of DeepSpeed's ZeRO, which pickle its objects "
                "and could run code: make a universal checkpoint of them (python -m "
                "deepspeed.checkpoint.ds_to_universal --input_folder ... --output_folder ...)"
            )
        return None
    paths = {name: _files(root, name) for name in _entries(root, _FOLDER)}
    paths = {name: files for name, files in paths.items() if _VALUE in files}
    if not paths:
        return None
    states = {n: {key: read(path) for key, path in files.items()} for n, files in paths.items()}
    left: dict[str, Any] = {}
    common = _safely(read, _OPTIMIZER, left) if root.exists(_OPTIMIZER) else {}
    files = sorted(filter(_OF_MODEL.fullmatch, here))
    beside: dict[str, Any] = {}
    if any(isinstance(own[_VALUE], torch.Tensor) for own in states.values()):  # stage 3
        shapes = _shapes(_safely(read, files[0], left)) if files else {}
        _complete(root, states, shapes, common, left)
    elif len(files) == 1:  # several files are shards of tensor parallelism
        beside = _safely(read, files[0], left).get("module") or {}
    for name, own in states.items():
        for key, value in own.items():
            own[key] = value.get("param") if isinstance(value, dict) else value
            if not isinstance(own[key], torch.Tensor | int | float):
                raise CheckpointError(f"{root.path / paths[name][key]} has no tensor")
    model = {name: own.pop(_VALUE) for name, own in states.items()}
    _add(model, {n: v for n, v in beside.items() if isinstance(v, torch.Tensor)})
    states = {name: own for name, own in states.items() if own}
    optimizer = {"state": states, "param_groups": [_group(common, list(states), left)]}
    return {"model": model, **({"optimizer": optimizer} if states else {}), **left}


def _add(model: dict[str, Any], beside: dict[str, torch.Tensor]) -> None:
    """Add the model's other tensors: buffers, frozen parameters, and tied parameters (with the fp32
    value of the parameter to which they are tied).
    """
    first = {_memory(beside[name]): value for name, value in model.items() if name in beside}
    for name, value in beside.items():
        model.setdefault(name, first.get(_memory(value), value) if value.numel() else value)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _entries(root: Root, folder: str) -> list[str]:
    if root.is_link(folder):
        raise CheckpointError(f"{root.path / folder} is a symbolic link, which is not followed")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root.folder.fd)
    try:
        return sorted(os.listdir(fd))
    finally:
        os.close(fd)


def _files(root: Root, name: str) -> dict[str, str]:
    """Return the paths of a parameter's files, by the names of the states."""
    folder = f"{_FOLDER}/{name}"
    try:
        files = _entries(root, folder)
    except NotADirectoryError:
        return {}
    return {file.removesuffix(_END): f"{folder}/{file}" for file in files if file.endswith(_END)}


def _safely(read: Read, path: str, left: dict[str, Any]) -> dict[Any, Any]:
    """Return the dict in a file, or an empty dict if torch cannot read the file without running
    code from the file.
    """
    try:
        found = read(path)
    except CheckpointError as error:
        left[f"{path}: {error}"] = None
        return {}
    return found if isinstance(found, dict) else {}


def _shapes(content: dict[Any, Any]) -> dict[Any, torch.Size]:
    found = content.get("param_shapes")
    parts = [part for part in (found if isinstance(found, list) else [found]) if type(part) is dict]
    return {n: s for part in parts for n, s in part.items() if isinstance(s, torch.Size)}


def _complete(
    root: Root,
    states: dict[str, dict[str, Any]],
    shapes: dict[Any, torch.Size],
    common: dict[Any, Any],
    left: dict[str, Any],
) -> None:
    """Complete ``states``, which come from a checkpoint of stage 3: give the flat tensors their
    shapes, and add the step to each parameter's states. Leave out the states of parameters whose
    step is not known.
    """
    step = _step_of(common)
    for name, own in states.items():
        for key, value in own.items():
            if isinstance(value, torch.Tensor) and key != _STEP:
                if math.prod(shapes.get(name, ())) != value.numel():
                    raise CheckpointError(
                        f"{root.path / _FOLDER / name / key}{_END} has {value.numel()} elements "
                        f"and no shape, and the files of model states have {shapes.get(name)}: "
                        "they are missing, or hold objects that only code can read"
                    )
                own[key] = value.view(shapes.get(name, ()))
        if _STEP not in own and step is not None:
            own[_STEP] = step
        if _STEP not in own and len(own) > 1:
            left[f"the optimizer's states of {name}: their step is not known"] = None
            states[name] = {_VALUE: own[_VALUE]}


def _step_of(common: dict[Any, Any]) -> Any:
    """Return the step if all parameters have the same step, else None."""
    inner = common.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    steps = [s.get(_STEP) for s in states.values() if type(s) is dict] if states else []
    return steps[0] if steps and all(step == steps[0] for step in steps) else None


def _group(common: dict[Any, Any], names: list[str], left: dict[str, Any]) -> dict[str, Any]:
    """Return one parameter group, with the options that are equal in all groups, because no file
    says which parameters were in which group.
    """
    groups = [group for group in common.get("param_groups") or [{}] if isinstance(group, dict)]
    keys = dict.fromkeys(key for group in groups for key in group if key != "params")
    kept = {
        key: groups[0][key]
        for key in _OPTIONS
        if all(key in group and group[key] == groups[0][key] for group in groups)
    }
    lost = [str(key) for key in keys if key not in kept]
    if lost:
        left[f"{_OPTIMIZER}: {', '.join(lost)} of its groups"] = None
    return {**kept, "params": names}
