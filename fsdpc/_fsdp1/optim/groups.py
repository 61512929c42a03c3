"""``param_groups`` of an optimizer's state dict: conversion between the unsharded model's names and
an optimizer's keys.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from fsdpc._fsdp1.optim.book import Book, Key
from fsdpc._fsdp1.optim.describe import equal

Group = dict[str, Any]
_NAMES = ("params", "param_names")


def named_groups(
    groups: list[Group], held: list[tuple[Key, nn.Parameter]], book: Book
) -> list[Group]:
    """Groups with names for keys; a flat parameter becomes all names that it covers. Local."""
    params = dict(held)
    result = []
    for group in groups:
        names = [name for key in group["params"] for name in book.names_of(params[key])]
        result.append(_with(group, names, "param_names" in group))
    return result


def _with(group: Group, params: list[Any], param_names: bool) -> Group:
    made = {key: copy.deepcopy(value) for key, value in group.items() if key not in _NAMES}
    made["params"] = params
    if param_names:
        made["param_names"] = list(params)
    return made


def keyed_groups(
    saved: list[Group],
    held: list[tuple[Key, nn.Parameter]],
    book: Book,
    own: list[Group] | None,
) -> list[Group]:
    """Groups for the optimizer that holds ``held``, with the saved groups' options. Local.

    ``own``: the optimizer's current groups, whose number, order and parameters stay; ``None``: the
    saved grouping stays. ``KeyError``: a saved name is not in the model, or a trainable parameter
    is not in the optimizer. ``ValueError``: one of the optimizer's groups (or flat parameters)
    holds parameters with different saved options.
    """
    owner = _owners(saved, book)
    _check_known(owner, held, book)
    if own is None:
        return _divided_as_saved(saved, owner, held, book)
    keys = iter(held)
    result = []
    for index, group in enumerate(own):
        members = [next(keys) for _ in group["params"]]
        names = [name for _, param in members for name in book.names_of(param)]
        options = _options(saved, owner, names, index) or group
        made = _with(options, [key for key, _ in members], False)
        if "param_names" in group:
            made["param_names"] = list(group["param_names"])
        result.append(made)
    return result


def _owners(saved: list[Group], book: Book) -> dict[str, int]:
    """The index of the saved group of each parameter, by the model's first name."""
    first = {alias: name for name, aliases in book.aliases.items() for alias in aliases}
    return {
        first.get(name, name): index
        for index, group in enumerate(saved)
        for name in group["params"]
    }


def _check_known(owner: dict[str, int], held: list[tuple[Key, nn.Parameter]], book: Book) -> None:
    in_optimizer = {name for _, param in held for name in book.names_of(param)}
    frozen = {
        name
        for entry in book.units
        for sharded in entry.params
        if not sharded.param.requires_grad
        for name in sharded.names
    } | {name for name, param in book.plain.items() if not param.requires_grad}
    for name in owner:
        if name not in book.aliases:
            raise KeyError(f"{name} is in a saved param group but not in the model")
        if name not in in_optimizer and name not in frozen:
            raise KeyError(f"{name} is in a saved param group but not in the optimizer")


def _options(
    saved: list[Group], owner: dict[str, int], names: list[str], index: int
) -> Group | None:
    """The saved group of all these names; ``None`` if no group was saved for them."""
    places = sorted({owner[name] for name in names if name in owner})
    if not places:
        empty = index < len(saved) and not names and not saved[index]["params"]
        return saved[index] if empty else None
    first = saved[places[0]]
    for other in places[1:]:
        if not equal(_plain_options(saved[other]), _plain_options(first)):
            mine, theirs = ([n for n in names if owner.get(n) == p][0] for p in (places[0], other))
            raise ValueError(
                f"parameters {mine!r} and {theirs!r} were saved with different options but share a "
                "param group of this optimizer (with use_orig_params=False, perhaps a flat "
                "parameter): use the saved grouping, with use_orig_params=True"
            )
    return first


def _plain_options(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in _NAMES}


def _divided_as_saved(
    saved: list[Group],
    owner: dict[str, int],
    held: list[tuple[Key, nn.Parameter]],
    book: Book,
) -> list[Group]:
    keys: list[list[Key]] = [[] for _ in saved]
    for key, param in held:
        names = book.names_of(param)
        _options(saved, owner, names, -1)
        places = [owner[name] for name in names if name in owner]
        if places:
            keys[places[0]].append(key)
    return [_with(group, found, False) for group, found in zip(saved, keys, strict=True)]
