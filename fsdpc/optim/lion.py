"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsdpc.optim._base import FusedOptimizer
from fsdpc.optim._disk import Disk
from fsdpc.optim._host import Host
from fsdpc.optim._scaling import Rule, Scaling


class Lion(FusedOptimizer):
    """Lion (Chen et al., arXiv 2302.06675); 4 bytes of state per element in float32.

    ``p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)``, then
    ``m = beta2 * m + (1 - beta2) * g``. The paper recommends a learning rate 3 to 10
    times smaller than AdamW's and a weight decay 3 to 10 times larger. A difference in the last bit
    of a gradient may flip the sign of an update, so compare runs by their losses.

    The states are ``step``, and ``exp_avg`` in the parameter's dtype. ``offload``: a ``Disk`` or a
    ``Host`` to keep ``exp_avg`` on.
    """

    _kind = "lion"
    _state_names = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        offload: Disk | Host | None = None,
    ) -> None:
        self._open(locals())

    def _rule(self, group: dict[str, Any], scaling: Scaling) -> Rule:
        return scaling.rule(group, *group["betas"], maximize=group["maximize"])
