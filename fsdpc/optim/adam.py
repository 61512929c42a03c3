"""Adam and AdamW, whose results equal those of torch's fused CPU kernels to the bit."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsdpc.optim._base import FusedOptimizer
from fsdpc.optim._disk import Disk
from fsdpc.optim._host import Host
from fsdpc.optim._scaling import Members, Rule, Scaling


class Adam(FusedOptimizer):
    """Adam (Kingma and Ba, arXiv 1412.6980), with torch's argument names and defaults.

    Steps equal ``torch.optim.Adam(..., fused=True)`` on the host to the bit, for float32, float64,
    bfloat16 and float16. There is one exception: torch's kernels round ``exp_avg_sq`` of a tensor's
    last ``numel % 16`` elements (``% 32`` for 16-bit types) in another way. torch's default kernels
    (``foreach``) compute square roots differently, and their results differ in the last bit of some
    parameters.

    ``foreach``, ``fused`` and ``capturable`` are accepted and have no effect;
    ``differentiable=True`` raises ``NotImplementedError``. The states are those of torch: ``step``,
    and in the parameter's dtype ``exp_avg``, ``exp_avg_sq`` and, with ``amsgrad``,
    ``max_exp_avg_sq``. Without ``amsgrad``, the states take 8 bytes per element of a float32
    parameter. ``offload``: a ``Disk`` or a ``Host`` for the states.
    """

    _kind = "adam"
    _state_names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        offload: Disk | Host | None = None,
    ) -> None:
        self._open(locals())

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._state_names if group["amsgrad"] else self._state_names[:2]

    def _begin_group(self, group: dict[str, Any], found: Members) -> None:
        super()._begin_group(group, found)
        for param in found.params if group["amsgrad"] else ():
            if "max_exp_avg_sq" not in self.state[param]:
                self.state[param]["max_exp_avg_sq"] = self._zeros(param, "max_exp_avg_sq")

    def _rule(self, group: dict[str, Any], scaling: Scaling) -> Rule:
        return scaling.rule(
            group,
            *group["betas"],
            group["eps"],
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"],
        )


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), which is ``Adam`` with decoupled weight
    decay, as in ``torch.optim.AdamW(..., fused=True)``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        offload: Disk | Host | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            offload=offload,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
