"""Selection of the tensors to save or load (``only``), and renaming of a checkpoint's tensors
(``rename``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from fsdpc.checkpoint.model import Model
from fsdpc.checkpoint.optimizer import State, state_name

Only = str | Iterable[str] | Callable[[str], bool] | None
Rename = Mapping[str, str] | Callable[[str], str] | None
_MOST_SHOWN = 3


def chooser(only: Only) -> Callable[[str], bool]:
    """Return a function that is True for the names that ``only`` selects: all names for None, the
    names that match a pattern (``*``, ``?``, ``[abc]``) or one of several patterns, or the names
    for which a function is true. Raises ``TypeError`` if ``only`` is none of these.
    """
    if only is None:
        return lambda name: True
    if callable(only):
        function = only
        return lambda name: bool(function(name))
    patterns = [only] if isinstance(only, str) else list(only)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError("only must be a pattern, several patterns, or a function of a name")
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def lasting(only: Only) -> Only:
    """Return ``only`` in a form that can be used several times: an iterator becomes a list."""
    return only if only is None or isinstance(only, str) or callable(only) else list(only)


def renamer(rename: Rename) -> Callable[[str], str]:
    """Return a function from names in the checkpoint to names in the model. Raises ``TypeError`` if
    ``rename`` is neither None, nor a mapping, nor a function.
    """
    if rename is None:
        return lambda name: name
    if isinstance(rename, Mapping):
        table = rename
        return lambda name: table.get(name, name)
    if not callable(rename):
        raise TypeError("rename must be a mapping of names, or a function of a name")
    return rename


def chosen_names(model: Model, chosen: Callable[[str], bool], only: Only) -> set[str]:
    """Return the names of the entries that ``only`` selects. A tied tensor is selected by any of
    its names. Raises ``ValueError`` if ``only`` selects no entry.
    """
    aliases = {name for alias, name in model.aliases.items() if chosen(alias)}
    kept = {entry.name for entry in model.entries if chosen(entry.name)} | aliases
    if not kept and model.entries:
        shown = ", ".join(repr(entry.name) for entry in model.entries[:_MOST_SHOWN])
        raise ValueError(f"only={only!r} matches no name of the model, which has {shown}, ...")
    return kept


def cut_model(model: Model, chosen: Callable[[str], bool], only: Only) -> set[str]:
    """Remove the tensors and extra states that ``only`` does not select. Returns the names of the
    selected tensors. Raises ``ValueError`` if ``only`` selects no tensor.
    """
    kept = chosen_names(model, chosen, only)
    model.entries = [entry for entry in model.entries if entry.name in kept]
    model.aliases = {alias: name for alias, name in model.aliases.items() if name in kept}
    model.extra = {key: value for key, value in model.extra.items() if chosen(key)}
    return kept


def cut_state(state: State, kept: set[str]) -> None:
    """Remove the states of all parameters except those with the names ``kept``."""
    state.kinds = {name: form for name, form in state.kinds.items() if name in kept}
    names = {state_name(name, key) for name, form in state.kinds.items() for key in form}
    state.entries = [entry for entry in state.entries if entry.name in names]
    cut_groups(state.groups, kept)


def cut_groups(groups: list[dict[str, Any]], kept: set[str]) -> None:
    """Remove all parameters except those with the names ``kept``, and then empty groups."""
    for group in groups:
        group["params"] = [name for name in group["params"] if name in kept]
    groups[:] = [group for group in groups if group["params"]]
