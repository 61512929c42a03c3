"""Conversion between parameter ids and names in optimizer state dicts of unsharded models."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from fsdpc._fsdp1.collect import is_unit_module, unit_modules
from fsdpc._fsdp1.names import clean_fqn, join
from fsdpc._fsdp1.optim.book import Key
from fsdpc.api import OptimStateKeyType


def rekey(
    state_dict: dict[str, Any],
    kind: OptimStateKeyType,
    model: nn.Module,
    held: list[tuple[Key, nn.Parameter]] | None,
) -> dict[str, Any]:
    """See ``FullyShardedDataParallel.rekey_optim_state_dict``. ``held``: the ids and parameters of
    the optimizer. None means an optimizer over the unsharded model's ``parameters()``.
    """
    if kind not in (OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID):
        raise AssertionError(
            f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got {kind}"
        )
    types = {type(key) for key in state_dict["state"]}
    if len(types) > 1 and types & {str, int}:
        raise ValueError(f"Invalid parameter keys: {state_dict['state'].keys()}")
    if types <= {str if kind is OptimStateKeyType.PARAM_NAME else int}:
        return state_dict
    table: dict[Any, Any] = _table(model, held)
    if kind is OptimStateKeyType.PARAM_ID:
        table = {name: key for key, name in table.items()}
    groups = copy.deepcopy(state_dict["param_groups"])
    for group in groups:
        group["params"] = sorted(table[key] for key in group["params"])
    return {
        "state": {table[key]: value for key, value in state_dict["state"].items()},
        "param_groups": groups,
    }


def _table(model: nn.Module, held: list[tuple[Key, nn.Parameter]] | None) -> dict[Any, str]:
    """Return the parameter names by the optimizer's ids."""
    flat = [m._unit for m in unit_modules(model) if m._unit is not None and m._unit.flat_params]
    if flat and held is None:
        return dict(enumerate(_unsharded_names(model)))
    if flat:
        raise RuntimeError(
            "Each parameter should only map to one parameter name but got "
            f"{len(flat[0].infos)}: {[info.name for info in flat[0].infos]}, all in the flat "
            f"parameter of unit {flat[0].name!r}: omit optim and optim_input to get the ids of "
            "the unsharded model, or wrap with use_orig_params=True"
        )
    names = _names(model)
    keys = enumerate(model.parameters()) if held is None else held
    return {key: names[id(param)] for key, param in keys}


def _unsharded_names(model: nn.Module) -> list[str]:
    """Return the parameter names in the order of the unsharded model's ``parameters()``."""
    positions = {
        module: (position, name) for position, (name, module) in enumerate(model.named_modules())
    }
    found: list[tuple[int, int, str]] = []
    for module, (position, name) in positions.items():
        for attribute, param in module._parameters.items():
            if param is not None and not hasattr(param, "_is_flat_param"):
                found.append((position, -1, clean_fqn(join(name, attribute))))
        unit = module._unit if is_unit_module(module) else None
        for number, info in enumerate(unit.infos if unit is not None and unit.flat_params else ()):
            first = positions[info.sites[0][0]][0]
            found.append((first, number, clean_fqn(join(name, info.name))))
    return [name for _, _, name in sorted(found, key=lambda entry: entry[:2])]


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
