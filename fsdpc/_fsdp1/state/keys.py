"""Keys of a unit's parameters in state dicts, with and without wrapper segments."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdpc._fsdp1.collect import owned_modules
from fsdpc._fsdp1.names import FSDP_PREFIX, FSDP_WRAPPED, clean_fqn, join


def managed_names(member: Any) -> dict[str, int]:
    """Return a dict from the name of each registration site of the unit's parameters to the index
    of the parameter.

    The names are clean and relative to the instance. A tied parameter appears under each of its
    names. Local.
    """
    unit = member._unit
    if unit is None:
        return {}
    sites = {
        (id(module), attribute): i
        for i, info in enumerate(unit.infos)
        for module, attribute in info.sites
    }
    found: dict[str, int] = {}
    modules = owned_modules(member._fsdp_wrapped_module, member._ignored.modules, shared_twice=True)
    for name, module in modules:
        for attribute in _attributes(module):
            index = sites.get((id(module), attribute))
            if index is not None:
                found[join(name, attribute)] = index
    return found


def _attributes(module: nn.Module) -> list[str]:
    """Return the names of the registered parameters and of all plain attributes. A unit with flat
    parameters puts plain tensors into attributes in the place of the original parameters.
    """
    return [*module._parameters, *(key for key in module.__dict__ if key not in module._parameters)]


def take_wrapper_out(state_dict: dict[str, Any], prefix: str) -> None:
    """Remove this instance's wrapper segment from keys and metadata, in place, keeping order."""
    start = prefix + FSDP_PREFIX
    for key in list(state_dict):
        if key.startswith(start):
            state_dict[prefix + key[len(start) :]] = state_dict.pop(key)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        wrapped = prefix + FSDP_WRAPPED
        for key in [key for key in metadata if key == wrapped or key.startswith(start)]:
            metadata[clean_fqn(key)] = metadata.pop(key)


def put_wrapper_in(state_dict: dict[str, Any], prefix: str) -> None:
    """Insert the wrapper segment into the keys, for loading. A key that already has the segment
    does not change.
    """
    for key in list(state_dict):
        if key.startswith(prefix):
            rest = key[len(prefix) :].removeprefix(FSDP_PREFIX)
            state_dict[prefix + FSDP_PREFIX + rest] = state_dict.pop(key)


def fill_ties(member: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Add missing names of tied parameters to ``state_dict``. A missing name gets the value that is
    stored under another name of the same parameter.
    """
    found: dict[int, Any] = {}
    names = managed_names(member)
    for name, i in names.items():
        if prefix + FSDP_PREFIX + name in state_dict:
            found[i] = state_dict[prefix + FSDP_PREFIX + name]
    for name, i in names.items():
        if i in found:
            state_dict.setdefault(prefix + FSDP_PREFIX + name, found[i])
