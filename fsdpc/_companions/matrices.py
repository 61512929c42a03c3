"""The choice of the parameters that are matrices, and the assignment of matrices to ranks, for
optimizers and the planner. Pure arithmetic, without torch.

The assignment depends only on sizes, so all ranks compute the same assignment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# Patterns that the last components of a parameter's name match if the parameter belongs to an
# embedding or to an output layer.
_EMBEDDINGS = re.compile(r"embed|embd|^(wte|wpe|tok_emb|pos_emb|relative_attention_bias)$")
_HEADS = re.compile(r"^(lm_head|head|heads|output|classifier|score|unembed|decoder|fc_out)$")
_EXPERTS = re.compile(r"experts?(\.|$)")
ROUND = 1 << 25  # about how many elements of an owner's matrices are exchanged in one round
# Names of modules that peft puts around a module.
ADAPTED = ("base_layer", "original_module", "modules_to_save", "default")


def is_embedding_or_head(name: str) -> bool:
    """Whether a parameter's name says that it belongs to an embedding or an output layer."""
    parts = [each for each in name.split(".") if each not in ADAPTED]
    own = [parts[-1]] if parts[-1] not in ("weight", "bias") else []
    own += parts[-2:-1]
    if any(_EMBEDDINGS.search(each) for each in own):
        return True
    return parts == ["fc", "weight"] or bool(parts[-2:-1]) and bool(_HEADS.match(parts[-2]))


def is_matrix(name: str, shape: Sequence[int]) -> bool | None:
    """Whether a parameter is a matrix or a stack of experts' matrices.

    None if the parameter has more than two dimensions and its name does not tell their meaning.
    """
    if len(shape) < 2 or is_embedding_or_head(name) or name.endswith("bias"):  # biases of experts
        return False
    if len(shape) == 2 or len(shape) == 3 and _EXPERTS.search(name):
        return True
    return None


class Matrix(NamedTuple):
    """A range of rows of a parameter. For a step, one rank has these rows in full.

    ``begin`` is the index of the rows' first element in the whole parameter. The rows consist of
    one or several matrices side by side, each orthogonalised separately; ``widths`` are the numbers
    of their columns.
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
        """The number of multiplications in a Newton-Schulz iteration, up to a constant factor."""
        return sum(self.rows * width * min(self.rows, width) for width in self.widths)


def deal(
    work: Sequence[int],
    held: Callable[[int], np.ndarray],
    world: int,
    holders: bool = False,
    kept: Sequence[int | None] | None = None,
) -> list[int]:
    """Return the rank that owns each matrix. Matrices with more ``work`` are assigned first.

    ``held(i)`` returns how many elements of matrix i each rank has. A matrix goes to the rank that
    has most of its elements, among the ranks whose load stays within a limit. The limit is the mean
    load, or the work of the largest matrix if that is more. If no rank stays within the limit, the
    matrix goes to the rank with the least load. With ``holders``, only ranks that have elements of
    a matrix may own it, and matrices of which few ranks have elements are assigned first.
    ``kept[i]`` is the owner of matrix i if this owner must not change, else None.
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
        owners[i] = int(chosen[loads[chosen].argmin()])  # if loads are equal, the first rank
        loads[owners[i]] += work[i]
    return owners


def rounds_of(
    work: Sequence[int], numels: Sequence[int], owners: Sequence[int], world: int, most: int
) -> list[int]:
    """Return the round in which each matrix is gathered by its owner. The number of rounds is the
    largest number of elements of an owner, divided by ``most`` and rounded up. The rounds of the
    owner with the largest work have about equal work.
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
