"""AdamW with bfloat16 states, and bfloat16 parameters without a float32 copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdpc.optim._disk import Disk
from fsdpc.optim._host import Host
from fsdpc.optim._places import ParamSpan, local_of
from fsdpc.optim._scaling import Members, Rule, Scaling
from fsdpc.optim._spanned import SpannedOptimizer
from fsdpc.optim.adam import AdamW


def _refuse_amsgrad(group: dict[str, Any]) -> None:
    if isinstance(group, dict) and group.get("amsgrad"):
        raise ValueError(
            "AdamWBF16 has no amsgrad, and a group of parameters or of a loaded state dict has it: "
            "set group['amsgrad'] = False there, or use fsdpc.optim.AdamW, which has amsgrad"
        )


class AdamWBF16(SpannedOptimizer, AdamW):
    """AdamW whose states are bfloat16: 4 bytes of states per element of a parameter.

    Every value is computed in float32 and rounded once. bfloat16 has 8 significant bits, so
    rounding to the nearest would always lose an update below 2^-9 of a value. With
    ``stochastic_rounding`` (default) a value is rounded up with a probability equal to the fraction
    that is cut off, and the expected value is exact. The random bits are a hash of ``seed``, the
    parameter's position in the optimizer, the element's index in the whole parameter and the step.
    They are the same on any number of ranks and threads, and after training resumes. Parameters in
    bfloat16 are rounded in the same way; float32 parameters are not rounded.

    A state dict holds bfloat16 states, and ``torch.optim.AdamW`` can load it. Raises
    ``NotImplementedError`` for DTensors that are not cut by rows, and ``ValueError`` for groups
    with ``amsgrad``.
    """

    _state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = True,
        seed: int = 0,
        offload: Disk | Host | None = None,
    ) -> None:
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be between 0 and 2**64 - 1, got {seed}")
        if getattr(offload, "masters", False):
            raise ValueError("AdamWBF16 has no float32 masters: use AdamW with masters=True")
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, offload=offload)
        self._add_defaults(stochastic_rounding=stochastic_rounding, seed=seed)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _refuse_amsgrad(param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state.get("param_groups", ()):
            _refuse_amsgrad(group)
        super().__setstate__(state)

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        _refuse_amsgrad(group)
        return self._state_names

    def _begin_group(self, group: dict[str, Any], found: Members) -> None:
        _refuse_amsgrad(group)
        super()._begin_group(group, found)

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.bfloat16

    def _rule(self, group: dict[str, Any], scaling: Scaling) -> Rule:
        rule = super()._rule(group, scaling)
        return rule._replace(stochastic=group["stochastic_rounding"], seed=group["seed"])

    def _table_place(self, param: Tensor) -> tuple[int, int] | None:
        spans = self._spans(param)
        if len(spans) != 1 or spans[0].count != local_of(param).numel():
            return None
        return spans[0].begin, self._key(param, spans[0])

    def _spans(self, param: Tensor) -> list[ParamSpan]:
        """Return a parameter's spans on this rank. If there are none, return one empty span, so
        that the parameter's step counter advances on this rank, too.
        """
        return self._place(param).spans or [ParamSpan(0, 0, 0, (0,))]

    def _step_group(self, group: dict[str, Any], found: Members, scaling: Scaling) -> None:
        stretches = list(self._stretches(found.params, found.values, found.grads))
        states = self._states_of(stretches, self._state_names)
        ones = [1] * len(stretches)
        self._run_over("adam", self._rule(group, scaling), scaling, stretches, states, ones)
