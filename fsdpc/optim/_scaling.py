"""Loss scaling, clipping and the search for infinities in a step of fsdpc's optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdpc._clip.norm import reduce_over_ranks
from fsdpc._engine.device import stand_in
from fsdpc._torch import global_step_pre_hooks, step_pre_hooks
from fsdpc.optim._device import Control, norm_of_units, only_gpu, sum_squares
from fsdpc.optim._places import Group, by_group, by_ranks
from fsdpc.optim._table import Table


class Scaling(NamedTuple):
    """Every gradient of a step is divided by ``scale`` and multiplied by ``clip``; on a GPU by what
    ``control`` has there.
    """

    scale: float = 1.0
    clip: float = 1.0
    control: Control = Control()
    keeps_grads: bool = False  # the memory of gradients stays as it is
    weight: float | None = None  # by which the pass moves averages; None: it moves none

    @property
    def writes_grads(self) -> bool:
        """True if gradients are divided by a scale, and so written."""
        scaled = self.scale != 1.0 or self.control.grad_scale is not None
        return scaled and not self.keeps_grads

    def rule(
        self,
        group: Mapping[str, Any],
        beta1: float | Tensor,
        beta2: float | Tensor,
        eps: float = 0.0,
        *,
        decoupled: bool = True,
        maximize: bool = False,
        nesterov: bool = False,
    ) -> Rule:
        """The numbers of a group in this step."""
        numbers = (group["lr"], beta1, beta2, eps, group["weight_decay"], self.scale, self.clip)
        flags = (decoupled, maximize, nesterov)
        return Rule(*map(float, numbers), *flags, keeps_grads=self.keeps_grads)


class Check(NamedTuple):
    """A search for infinities that a scaler leaves to the step, which reads all gradients."""

    found: Tensor  # 1 if any rank has an infinity, else 0
    agree: Callable[[], None]  # puts the ranks' maximum into ``found``


class Rule(NamedTuple):
    """The numbers of a group, in the order of ``_C.optim_step``."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: float
    clip: float
    decoupled: bool
    maximize: bool
    nesterov: bool = False
    stochastic: bool = False
    keeps_grads: bool = False
    seed: int = 0


class Members(NamedTuple):
    """The parameters of a group that have a gradient, with their memory."""

    params: list[Tensor]  # as the user passed them
    values: list[Tensor]  # contiguous
    grads: list[Tensor]  # contiguous, in the same order of elements
    copies: list[tuple[Tensor, Tensor]]  # (parameter, contiguous copy that replaces its values)


class ScaledSteps(Optimizer):
    """Base class of steps that divide gradients by a loss scale, clip them, and look for
    infinities in them.
    """

    _check: Check | None = None
    last_norm: Tensor | None = None  # of the gradients, in the last step that clipped
    _inside: Any = None  # what steps units in backward, see _in_backward.py
    _table: Table | None = None

    def _steps_plainly(self) -> bool:
        """False if a subclass has a ``step`` of its own, which may do more than this one's.
        Local.
        """
        raise NotImplementedError

    def _sees_gradients_first(self) -> bool:
        """False where code of a program runs between a scaler's check and a step: hooks, and a step
        of a subclass, which may change gradients or read ``found_inf``.
        """
        if not self._steps_plainly():
            return False
        hooks = (*global_step_pre_hooks.values(), *step_pre_hooks(self).values())
        return all(str(getattr(hook, "__module__", "")).startswith("fsdpc.") for hook in hooks)

    def _scaling_on_host(
        self, parts: list[tuple[list[Group], float]], max_norm: float | None, grad_scale: Any
    ) -> Scaling:
        """A step's scaling on the host. ``parts``: ``_squares``. Collective with ``max_norm``."""
        scale = 1.0 if grad_scale is None else float(grad_scale)
        if max_norm is None:
            return Scaling(scale)
        norm = math.sqrt(_over_ranks(parts)) / scale
        self.last_norm = torch.tensor(norm, dtype=torch.float64, device="cpu")
        factor = float(max_norm) / (norm + 1e-6)
        clip = factor if math.isnan(factor) else min(factor, 1.0)
        return Scaling(scale, clip, keeps_grads=True)

    def leave_check(self, found: Tensor | None, agree: Callable[[], None] | None = None) -> bool:
        """For a scaler: True if the next step itself looks for infinities in its gradients and
        changes nothing if a rank finds one. The step sets ``found`` to 1 or 0, and ``agree`` makes
        that the ranks' maximum. ``found`` None: the next step does not look. Local.
        """
        self._check = None
        if found is None or agree is None or self._inside is not None:
            return False
        if not found.is_cpu or stand_in():
            return False
        if not self._sees_gradients_first():
            return False
        if self._table is None:
            params = [p for group in self.param_groups for p in group["params"]]
            if not all(p.is_cpu and (p.grad is None or type(p.grad) is Tensor) for p in params):
                return False
        self._check = Check(found, agree)
        return True

    def _checked(
        self, parts: list[tuple[list[Group], float]], finite: Callable[[], bool]
    ) -> Tensor:
        """Do the scaler's check; 1 if a gradient of any rank is not finite. ``finite``: asked if a
        sum of squares is not finite. Collective over the scaler's ranks.
        """
        check, self._check = self._check, None
        assert check is not None
        good = all(math.isfinite(part) for _, part in parts) or finite()
        check.found.fill_(0.0 if good else 1.0)
        check.agree()
        if hasattr(self, "found_inf"):  # the scaler's, which hooks after the step may read
            self.found_inf = check.found
        return check.found

    def _is_on_gpu(self) -> bool:
        """True if one GPU holds all parameters. Equal on all ranks. Local."""
        return only_gpu([p for group in self.param_groups for p in group["params"]]) is not None

    def _scaling_on_gpu(
        self, members: list[Members], max_norm: float | None, grad_scale: Any, found_inf: Any
    ) -> Scaling:
        """What a step of parameters on one GPU reads there. Collective with ``max_norm``."""
        params = [p for group in self.param_groups for p in group["params"]]
        device = params[0].device

        def there(value: Any, dtype: torch.dtype) -> Tensor | None:
            return None if value is None else torch.as_tensor(value, dtype=dtype, device=device)

        scale = there(grad_scale, torch.float32)
        clip = None
        if max_norm is not None:
            norm = norm_of_units(params)
            if norm is None:
                found = math.sqrt(_over_ranks(self._squares(members)))
                norm = torch.tensor(found, dtype=torch.float64, device=device)
            if scale is not None:
                norm = norm / scale.double()
            self.last_norm = norm
            clip = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
        control = Control(scale, there(found_inf, torch.float32), clip)
        return Scaling(control=control, keeps_grads=max_norm is not None)

    def _squares(self, members: list[Members]) -> list[tuple[list[Group], float]]:
        """Sums of squares of this rank's gradients, by the groups with other elements. Local."""
        pairs = (zip(found.params, found.grads, strict=True) for found in members)
        grads = {id(param): grad for each in pairs for param, grad in each}
        params = (param for group in self.param_groups for param in group["params"])
        return [
            (groups, sum_squares([grads[id(param)] for param in own if id(param) in grads]))
            for groups, own in by_ranks(params)
        ]


def is_set(found: Any) -> bool:
    return found is not None and float(found) != 0


def are_finite(members: list[Members]) -> bool:
    """Whether all elements of gradients are finite. A host sync if some are on a GPU."""
    return all(bool(grad.isfinite().all()) for found in members for grad in found.grads)


def _over_ranks(parts: list[tuple[list[Group], float]]) -> float:
    """The sum over all ranks: ranks of a group hold different elements, replicas count once.
    Collective.
    """
    total = 0.0
    for groups, part in parts:
        for group in by_group(groups):
            part = reduce_over_ranks(group, part, "sum", "norm of gradients")
        total += part
    return total
