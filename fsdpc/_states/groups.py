"""Saved param groups, which say with which options each parameter was saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Group = dict[str, Any]
NAMES = ("params", "param_names")


def plain_options(group: Group) -> Group:
    """Return the group's options without its parameters."""
    return {key: value for key, value in group.items() if key not in NAMES}


def owners_of(groups: Sequence[Group]) -> dict[str, int]:
    """Return the index of each parameter's group, by the parameter's name."""
    return {name: index for index, group in enumerate(groups) for name in group["params"]}


def group_of(groups: Sequence[Group], owner: dict[str, int], names: Sequence[str]) -> Group | None:
    """Return the first group that has one of these parameters, or ``None`` if no group has one.
    ``ValueError``: another group, with other options, has some of these parameters.
    """
    known = [name for name in names if name in owner]
    indices = sorted({owner[name] for name in known})
    for index in indices[1:]:
        if not _equal(plain_options(groups[index]), plain_options(groups[indices[0]])):
            one, other = (next(n for n in known if owner[n] == i) for i in (indices[0], index))
            raise ValueError(
                f"parameters {one!r} and {other!r} were saved with different options but share a "
                "param group of this optimizer (with use_orig_params=False, perhaps a flat "
                "parameter): use the saved grouping, with use_orig_params=True"
            )
    return groups[indices[0]] if indices else None


def _equal(one: Group, other: Group) -> bool:
    return one.keys() == other.keys() and all(
        bool(np.all(np.asarray(one[key] == other[key]))) for key in one
    )
