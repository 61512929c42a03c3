"""Optimizer state dicts of models without units: parameter ids to names and back."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from fsdpc._names import clean_fqn
from fsdpc._optim_book import Key
from fsdpc.api import OptimStateKeyType


def rekey(
    state_dict: dict[str, Any],
    kind: OptimStateKeyType,
    model: nn.Module,
    held: list[tuple[Key, nn.Parameter]],
) -> dict[str, Any]:
    """See ``FullyShardedDataParallel.rekey_optim_state_dict``; ``held``: the optimizer's ids."""
    if kind not in (OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID):
        raise AssertionError(
            f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got {kind}"
        )
    types = {type(key) for key in state_dict["state"]}
    if len(types) > 1 and types & {str, int}:
        raise ValueError(f"Invalid parameter keys: {state_dict['state'].keys()}")
    if types <= {str if kind is OptimStateKeyType.PARAM_NAME else int}:
        return state_dict
    names = _names(model)
    table: dict[Any, Any] = {key: names[id(param)] for key, param in held}
    if kind is OptimStateKeyType.PARAM_ID:
        table = {name: key for key, name in table.items()}
    groups = copy.deepcopy(state_dict["param_groups"])
    for group in groups:
        group["params"] = sorted(table[key] for key in group["params"])
    return {
        "state": {table[key]: value for key, value in state_dict["state"].items()},
        "param_groups": groups,
    }


def _names(model: nn.Module) -> dict[int, str]:
    found: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(clean_fqn(name))
    for names in found.values():
        if len(names) > 1:
            raise RuntimeError(
                "Each parameter should only map to one parameter name but got "
                f"{len(names)}: {names}"
            )
    return {param: names[0] for param, names in found.items()}
