"""Loss scaling, clipping and the check for infinities in a step of fsdpc's optimizers."""

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
    """The factors by which a step scales its gradients. Every gradient is divided by ``scale`` and
    multiplied by ``clip``. On a GPU, the tensors in ``control`` replace these two numbers.
    """

    scale: float = 1.0
    clip: float = 1.0
    control: Control = Control()
    keeps_grads: bool = False  # whether the step must not write to gradients
    weight: float | None = None  # the new values' weight in averages; None: no averages

    @property
    def writes_grads(self) -> bool:
        """True if the step divides gradients by the loss scale in place."""
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
        """Return the numbers with which this step updates the parameters of ``group``."""
        numbers = (group["lr"], beta1, beta2, eps, group["weight_decay"], self.scale, self.clip)
        flags = (decoupled, maximize, nesterov)
        return Rule(*map(float, numbers), *flags, keeps_grads=self.keeps_grads)


class Check(NamedTuple):
    """A check for infinities that a scaler leaves to the step, because the step reads all gradients
    anyway.
    """

    found: Tensor  # 1 if any rank has an infinity, else 0
    agree: Callable[[], None]  # puts the ranks' maximum into ``found``


class Rule(NamedTuple):
    """The numbers with which a step updates a group, in the order that ``_C.optim_step`` needs."""

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

    params: list[Tensor]  # the parameters that the user passed
    values: list[Tensor]  # contiguous
    grads: list[Tensor]  # contiguous, in the same order of elements
    copies: list[tuple[Tensor, Tensor]]  # (parameter, contiguous copy that the step uses)


class ScaledSteps(Optimizer):
    """The base class of optimizers whose steps divide gradients by a loss scale, clip gradients,
    and check gradients for infinities.
    """

    _check: Check | None = None
    last_norm: Tensor | None = None  # the norm of gradients in the last step with max_norm
    _inside: Any = None  # the object that steps units in backward, see _in_backward.py
    _table: Table | None = None

    def _steps_plainly(self) -> bool:
        """Return False if a subclass overrides ``step``, because that method may do more than this
        class's ``step``. Local.
        """
        raise NotImplementedError

    def _sees_gradients_first(self) -> bool:
        """Return False if code of the program runs between a scaler's check and the step: a hook or
        a subclass's ``step``, which may change gradients or read ``found_inf``.
        """
        if not self._steps_plainly():
            return False
        hooks = (*global_step_pre_hooks.values(), *step_pre_hooks(self).values())
        return all(str(getattr(hook, "__module__", "")).startswith("fsdpc.") for hook in hooks)

    def _scaling_on_host(
        self, parts: list[tuple[list[Group], float]], max_norm: float | None, grad_scale: Any
    ) -> Scaling:
        """Return the scaling of a step on the host. ``parts``: sums of squares of gradients, as
        ``_squares`` returns them. Collective with ``max_norm``.
        """
        scale = 1.0 if grad_scale is None else float(grad_scale)
        if max_norm is None:
            return Scaling(scale)
        norm = math.sqrt(_over_ranks(parts)) / scale
        self.last_norm = torch.tensor(norm, dtype=torch.float64, device="cpu")
        factor = float(max_norm) / (norm + 1e-6)
        clip = factor if math.isnan(factor) else min(factor, 1.0)
        return Scaling(scale, clip, keeps_grads=True)

    def leave_check(self, found: Tensor | None, agree: Callable[[], None] | None = None) -> bool:
        """Let the next step do a scaler's check for infinities, and return True if this is
        possible. The next step then changes nothing if a rank finds an infinity in its gradients.
        The step sets ``found`` to 1 or 0 and calls ``agree``, which replaces ``found`` by the
        maximum over the ranks. If ``found`` is None, the next step does not check. Local.
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
        """Do the scaler's check. Return 1 if a gradient of any rank is not finite, else 0.
        ``finite`` checks this rank's gradients one by one; it is called only if a sum of squares is
        not finite. Collective over the scaler's ranks.
        """
        check, self._check = self._check, None
        assert check is not None
        good = all(math.isfinite(part) for _, part in parts) or finite()
        check.found.fill_(0.0 if good else 1.0)
        check.agree()
        if hasattr(self, "found_inf"):  # set by the scaler; hooks after the step may read it
            self.found_inf = check.found
        return check.found

    def _is_on_gpu(self) -> bool:
        """Return True if one GPU has all parameters. Equal on all ranks. Local."""
        return only_gpu([p for group in self.param_groups for p in group["params"]]) is not None

    def _scaling_on_gpu(
        self, members: list[Members], max_norm: float | None, grad_scale: Any, found_inf: Any
    ) -> Scaling:
        """Return the scaling of a step whose parameters are all on one GPU, as tensors on that GPU.
        Collective with ``max_norm``.
        """
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
        """Return sums of squares of this rank's gradients. Each sum comes with the groups of ranks
        that have other elements of the same parameters. Local.
        """
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
    """Return whether all gradients are finite. The host waits for gradients on a GPU."""
    return all(bool(grad.isfinite().all()) for found in members for grad in found.grads)


def _over_ranks(parts: list[tuple[list[Group], float]]) -> float:
    """Return the sum of ``parts`` over all ranks. The ranks of a group have different elements;
    replicas are counted once. Collective.
    """
    total = 0.0
    for groups, part in parts:
        for group in by_group(groups):
            part = reduce_over_ranks(group, part, "sum", "norm of gradients")
        total += part
    return total
