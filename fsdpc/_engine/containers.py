"""Replacement of the items of containers: the result has the container's type and fields."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from fsdpc._torch import pytree_nodes

Change = Callable[[Any], Any]


def within(change: Change, value: Any) -> Any:
    """Return a container like ``value`` with ``change(item)`` in the place of each item.

    Return ``value`` itself if no item changes or ``value`` is no container. Local.

    Containers are tuples, lists, dicts, sets, dataclasses, and whatever is registered with
    torch's pytrees.
    """
    if isinstance(value, dict) or is_dataclass(value):
        return _within_fields(change, value)
    children = children_of(value)
    if children is None:
        return value
    new = [change(item) for item in children]
    if all(one is other for one, other in zip(children, new, strict=True)):
        return value
    return rebuilt(value, new)


def is_dataclass(value: Any) -> bool:
    """Whether ``value`` is an instance of a dataclass. Local."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def children_of(value: Any) -> list[Any] | None:
    """Return the items of a tuple, list, set or registered pytree node; else None. Local."""
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    node = pytree_nodes.get(type(value))
    return None if node is None else list(node.flatten_fn(value)[0])


def rebuilt(value: Any, items: Sequence[Any]) -> Any:
    """Return an object like ``value`` whose items (see ``children_of``) are ``items``. Local."""
    kind = type(value)
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = items
        return made
    if hasattr(value, "_fields") and isinstance(value, tuple):
        return kind._make(items)
    if isinstance(value, tuple | set | frozenset):
        return kind(items)
    node = pytree_nodes[kind]
    return node.unflatten_fn(items, node.flatten_fn(value)[1])


def _within_fields(change: Change, value: Any) -> Any:
    """Apply ``within`` to a dict, a dataclass, or an object that is both.

    The object is copied and changed, so that no constructor runs on the new values.
    """
    made = value
    for key, item in list(value.items()) if isinstance(value, dict) else ():
        new = change(item)
        if new is not item:
            made = _copy_of(value) if made is value else made
            made[key] = new
    for field in dataclasses.fields(value) if is_dataclass(value) else ():
        item = getattr(made, field.name, None)
        new = change(item)
        if new is not item:
            made = _copy_of(value) if made is value else made
            object.__setattr__(made, field.name, new)
    return made


def _copy_of(value: Any) -> Any:
    try:
        return copy.copy(value)
    except TypeError:  # `value` is a dict and a dataclass, and its constructor needs the fields
        if not is_dataclass(value):
            raise
        return dataclasses.replace(value)
