"""Norms and largest values of gradients, weights and updates, measured by an optimizer's step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fsdpc._engine.writeback import owner_of
from fsdpc.optim._device import ordinals_of
from fsdpc.optim._places import by_group, by_ranks, clean, names_of

MEASURES = 6  # sum of squares and largest magnitude of gradients, of weights and of updates


class Statistics(NamedTuple):
    """2-norms and largest magnitudes of all elements of a parameter or a unit, over all ranks. The
    largest magnitude is infinite if a value is not finite.
    """

    grad_norm: float
    grad_max: float
    weight_norm: float
    weight_max: float
    update_norm: float
    update_max: float


class Measured(NamedTuple):
    """The statistics of one step. A flat parameter (``use_orig_params=False``) counts as one
    parameter.
    """

    step: int  # the number of calls of ``step`` since ``measure``
    parameters: dict[str, Statistics]
    units: dict[str, Statistics]  # key: unit name, or module name for parameters in no unit


class Meter:
    """A meter that measures each ``every``-th step of an optimizer."""

    def __init__(self, optimizer: Any, every: int) -> None:
        self.optimizer, self.every = optimizer, every
        self.steps = 0
        self.on = False  # whether the present step is measured
        self.found: Measured | None = None
        self._rows: dict[Tensor, np.ndarray] = {}

    def begin(self) -> bool:
        """Count a step that begins, and return whether the step is measured."""
        self.steps += 1
        self.on = self.steps % self.every == 0
        if self.on:
            groups = self.optimizer.param_groups
            params = [param for group in groups for param in group["params"]]
            if any(where is not None for where in ordinals_of(params)):
                raise NotImplementedError("measure() reads parameters in host memory, not on GPUs")
            self._rows = {param: np.zeros(MEASURES) for param in params}
        return self.on

    def add(self, param: Tensor, measures: np.ndarray) -> None:
        """Add the measures of a part of a parameter, in the order of ``MEASURES``."""
        _add(self._rows[param], measures)

    def add_matrix(self, param: Tensor, grad: Tensor, new: Tensor, old: Tensor) -> None:
        """Add the measures of a matrix, computed from its values before and after the step. The C
        code does not measure steps of matrices.
        """
        measures = np.zeros(MEASURES)
        for what, value in enumerate((grad, new, new - old)):
            wide = value.double()
            measures[2 * what] = float(wide.square().sum())
            measures[2 * what + 1] = float(wide.abs().max()) if wide.numel() else 0.0
        self.add(param, measures)

    def end(self, scale: float) -> None:
        """End a measured step: reduce the measures over the ranks and make ``found``. ``scale`` is
        the loss scale, by which gradients in memory were multiplied. Collective.
        """
        self.on = False
        self._reduce()
        parameters: dict[str, np.ndarray] = {}
        units: dict[str, np.ndarray] = {}
        number = 0
        for group in self.optimizer.param_groups:
            given = group.get("param_names")
            for index, param in enumerate(group["params"]):
                own = given[index] if given else None
                names = names_of(param, own)
                name = clean(names[0] if len(names) == 1 else own) or str(number)
                unit = owner_of(param)
                of = clean(unit.name or "") if unit is not None else name.rpartition(".")[0]
                parameters[name] = self._rows[param]
                _add(units.setdefault(of or "", np.zeros(MEASURES)), self._rows[param])
                number += 1
        every = (
            {name: _statistics(row, scale) for name, row in rows.items()}
            for rows in (parameters, units)
        )
        self.found = Measured(self.steps, *every)
        self._rows = {}

    def _reduce(self) -> None:
        """Reduce the measures over the ranks, with one sum and one maximum for all parameters that
        the same ranks share.
        """
        for groups, params in by_ranks(self._rows):
            rows = [self._rows[param] for param in params]
            every = np.array(rows).reshape(-1, MEASURES)
            sums, most = every[:, ::2].copy(), every[:, 1::2].copy()
            most[np.isnan(most)] = np.inf
            for group in by_group(groups):
                flat = sums.reshape(-1), most.reshape(-1)
                group.all_reduce(flat[0], "sum", "statistics of a step")
                group.all_reduce(flat[1], "max", "statistics of a step")
            for row, of_sums, of_most in zip(rows, sums, most, strict=True):
                row[::2], row[1::2] = of_sums, of_most


def _add(row: np.ndarray, measures: np.ndarray) -> None:
    row[::2] += measures[::2]
    row[1::2] = np.maximum(row[1::2], measures[1::2])  # NaN stays


def _statistics(row: np.ndarray, scale: float) -> Statistics:
    norms = np.sqrt(row[::2])
    values = [float(each) for pair in zip(norms, row[1::2], strict=True) for each in pair]
    values[:2] = [value / abs(scale) for value in values[:2]]
    return Statistics(*values)
