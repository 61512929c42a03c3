"""Which parameters are matrices, and the deal of matrices to ranks: arithmetic, without torch, for
optimizers and for planners.

A deal depends on sizes alone, so that all ranks come to the same one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# Modules that hold an embedding or an output layer, by the last parts of their parameters' names.
_EMBEDDINGS = re.compile(r"embed|embd|^(wte|wpe|tok_emb|pos_emb|relative_attention_bias)$")
_HEADS = re.compile(r"^(lm_head|head|heads|output|classifier|score|unembed|decoder|fc_out)$")
_EXPERTS = re.compile(r"experts?(\.|$)")
ROUND = 1 << 25  # elements of an owner's matrices that are exchanged in one round, or one matrix
ADAPTED = ("base_layer", "original_module", "modules_to_save", "default")  # peft's module names


def is_embedding_or_head(name: str) -> bool:
    """Whether the name of a parameter or its module is that of an embedding or output layer."""
    parts = [each for each in name.split(".") if each not in ADAPTED]
    own = [parts[-1]] if parts[-1] not in ("weight", "bias") else []
    own += parts[-2:-1]
    if any(_EMBEDDINGS.search(each) for each in own):
        return True
    return parts == ["fc", "weight"] or bool(parts[-2:-1]) and bool(_HEADS.match(parts[-2]))


def is_matrix(name: str, shape: Sequence[int]) -> bool | None:
    """Whether a parameter is a matrix or a stack of experts' matrices; None: it has more than two
    dimensions, and nothing says what they are.
    """
    if len(shape) < 2 or is_embedding_or_head(name) or name.endswith("bias"):  # biases of experts
        return False
    if len(shape) == 2 or len(shape) == 3 and _EXPERTS.search(name):
        return True
    return None


class Matrix(NamedTuple):
    """Rows of a parameter that are whole in one place for a step.

    ``begin``: index of their first element in the whole parameter; ``widths``: columns of each of
    the matrices that stand side by side in these rows and are orthogonalised one by one.
    """

    begin: int
    rows: int
    columns: int
    widths: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def work(self) -> int:
        """Multiplications of one iteration of Newton-Schulz, up to a constant factor."""
        return sum(self.rows * width * min(self.rows, width) for width in self.widths)


def deal(
    work: Sequence[int],
    held: Callable[[int], np.ndarray],
    world: int,
    holders: bool = False,
    kept: Sequence[int | None] | None = None,
) -> list[int]:
    """The owner of each matrix. The largest is dealt first, to the rank that holds most of it
    (``held(i)``: elements of matrix i on each rank) of the ranks whose load stays within the mean
    or the largest matrix, else to the rank with the least load. ``holders``: only to ranks that
    hold some of it; matrices that fewer ranks hold come first then. ``kept``: owners that stay.
    """
    owners = [0 if owner is None else owner for owner in kept or [None] * len(work)]
    loads = np.zeros(world, dtype=np.float64)
    free = [i for i in range(len(work)) if kept is None or kept[i] is None]
    for i in {*range(len(work))}.difference(free):
        loads[owners[i]] += work[i]
    share = max(max(work, default=0), -(-sum(work) // world))
    few = [np.count_nonzero(held(i)) if holders else 0 for i in range(len(work))]
    for i in sorted(free, key=lambda i: (few[i], -work[i], i)):
        own = held(i)
        may = own > 0 if few[i] else np.ones(world, dtype=bool)
        chosen = np.flatnonzero(may & (loads + work[i] <= share))
        if chosen.size:
            chosen = chosen[own[chosen] == own[chosen].max()]
        else:
            chosen = np.flatnonzero(may)
        owners[i] = int(chosen[loads[chosen].argmin()])  # the first of equal loads
        loads[owners[i]] += work[i]
    return owners


def rounds_of(
    work: Sequence[int], numels: Sequence[int], owners: Sequence[int], world: int, most: int
) -> list[int]:
    """The round in which each matrix is at its owner. There are as many rounds as the owner with
    the most elements needs at ``most`` elements a round; an owner's rounds have about equal work.
    """
    elements, loads = [0] * world, [0] * world
    for owner, numel, cost in zip(owners, numels, work, strict=True):
        elements[owner] += numel
        loads[owner] += cost
    count = max(1, -(-max(elements, default=0) // most))
    heaviest, done = max(max(loads, default=0), 1), [0] * world
    found = []
    for owner, cost in zip(owners, work, strict=True):
        middle = done[owner] + cost / 2
        found.append(min(int(middle * count / heaviest), count - 1))
        done[owner] += cost
    return found
