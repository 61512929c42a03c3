"""``param_groups`` of an optimizer's state dict: conversion between the unsharded model's names and
an optimizer's keys.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from fsdpc._fsdp1.optim.book import Book, Key
from fsdpc._states.groups import Group, group_of, owners_of, plain_options


def named_groups(
    groups: list[Group], held: list[tuple[Key, nn.Parameter]], book: Book
) -> list[Group]:
    """Return the groups with parameter names in the place of the optimizer's keys. A flat parameter
    is replaced by the names of all original parameters that it covers. Local.
    """
    params = dict(held)
    result = []
    for group in groups:
        names = [name for key in group["params"] for name in book.names_of(params[key])]
        result.append(_with(group, names, "param_names" in group))
    return result


def _with(group: Group, params: list[Any], param_names: bool) -> Group:
    made = {**copy.deepcopy(plain_options(group)), "params": params}
    if param_names:
        made["param_names"] = list(params)
    return made


def keyed_groups(
    saved: list[Group],
    held: list[tuple[Key, nn.Parameter]],
    book: Book,
    own: list[Group] | None,
) -> list[Group]:
    """Return the groups of the optimizer whose parameters are ``held``, with the options of the
    saved groups. Local.

    ``own``: the optimizer's current groups, whose number, order and parameters do not change;
    ``None``: the parameters are grouped as they were saved. ``KeyError``: a saved name is not in
    the model, or a trainable parameter is not in the optimizer. ``ValueError``: one of the
    optimizer's groups (or flat parameters) has parameters with different saved options.
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
        options = group_of(saved, owner, names)
        if options is None:  # the group is empty, or none of its names was saved
            stands = index < len(saved) and not names and not saved[index]["params"]
            options = saved[index] if stands else group
        made = _with(options, [key for key, _ in members], False)
        if "param_names" in group:
            made["param_names"] = list(group["param_names"])
        result.append(made)
    return result


def _owners(saved: list[Group], book: Book) -> dict[str, int]:
    """Return ``owners_of(saved)`` with each name replaced by the parameter's first name."""
    first = {alias: name for name, aliases in book.aliases.items() for alias in aliases}
    return {first.get(name, name): index for name, index in owners_of(saved).items()}


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


def _divided_as_saved(
    saved: list[Group],
    owner: dict[str, int],
    held: list[tuple[Key, nn.Parameter]],
    book: Book,
) -> list[Group]:
    keys: list[list[Key]] = [[] for _ in saved]
    for key, param in held:
        names = [name for name in book.names_of(param) if name in owner]
        group_of(saved, owner, names)
        if names:
            keys[min(owner[name] for name in names)].append(key)
    return [_with(group, found, False) for group, found in zip(saved, keys, strict=True)]
