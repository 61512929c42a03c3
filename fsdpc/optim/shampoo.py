"""Shampoo: gradients preconditioned by inverse roots of second moments of rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsdpc.optim._matrices import MOMENTS, Chooser, SplitRule
from fsdpc.optim.soap import SIDES, Preconditioned, average


class Shampoo(Preconditioned):
    """Shampoo (Gupta et al., arXiv 1802.09568) in the form for neural networks (Anil et al., arXiv
    2002.09018). The update is ``L^(-1/4) M R^(-1/4)``, where M is the first moment, and L and R are
    averages of ``g g^T`` and ``g^T g``. An m x n matrix takes 8 bytes of states per element and
    another 8 (m^2 + n^2) bytes, all on the rank that owns the matrix.

    L and R are divided by ``1 - betas[1]^t``. The inverse roots are computed in float64 by
    ``torch.linalg.eigh``, in the first step and then every ``precondition_frequency`` steps, after
    ``eps`` times the largest eigenvalue is added to each eigenvalue. A side of more than
    ``max_precondition_dim`` has no root, and the power of the other side is then ``-1/2``. A matrix
    with two such sides has the update of Adam. With ``grafting``, an update is scaled to the norm
    of Adam's update (with ``grafting_eps``), so that Adam's learning rates can be used. Without
    ``grafting``, ``lr`` must be chosen for Shampoo.

    As in ``Muon``, ``matrices``, ``split``, and ``use_shampoo`` in groups decide which parameters
    are matrices, and AdamW steps the others with the options ``adamw_...`` (None: the option
    without ``adamw_``). The default of ``adamw_eps`` is 1e-8. What ranks send and which methods are
    collective is as in ``SOAP``.

    ``offload``, and the cases in which ``NotImplementedError`` is raised, are as in ``Muon``.
    """

    _flag = "use_shampoo"
    _kept = "root"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-12,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 8192,
        grafting: bool = True,
        grafting_eps: float = 1e-8,
        *,
        matrices: Chooser | None = None,
        split: SplitRule | None = None,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] | None = None,
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        offload: Any = None,
    ) -> None:
        self._matrices, self._split = matrices, split
        self._open(locals(), use_shampoo=None)

    def _rule(
        self, options: Mapping[str, Any], step: int, held: dict[str, Tensor], *lanes: Tensor
    ) -> Tensor:
        [grad] = lanes
        beta1, beta2 = options["betas"]
        average(held, grad, beta2, options["max_precondition_dim"])
        sides = [side for side in SIDES if side in held]
        if step == 1 or step % options["precondition_frequency"] == 0:
            power = -1 / (2 * len(sides)) if sides else 0.0
            for side in sides:
                whole = held[side] / (1 - beta2**step)
                held[f"{side}_root"] = inverse_root(whole, power, options["eps"])
        for name in MOMENTS:
            held.setdefault(name, torch.zeros_like(grad))
        first = held["exp_avg"].lerp_(grad, 1 - beta1) / (1 - beta1**step)
        second = held["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = second.sqrt().div_((1 - beta2**step) ** 0.5)
        adam = first / root.add_(options["grafting_eps"])
        if not sides:
            return adam
        update = held["left_root"] @ first if "left" in held else first
        update = update @ held["right_root"] if "right" in held else update
        if options["grafting"]:
            update = update * (adam.norm() / update.norm().clamp(min=1e-30))
        return update


def inverse_root(matrix: Tensor, power: float, eps: float) -> Tensor:
    """Return a power of a symmetric matrix. First ``eps`` times the largest eigenvalue is added to
    each eigenvalue.
    """
    values, vectors = torch.linalg.eigh(matrix.double())
    largest = values[-1:].clamp(min=1e-30)
    powers = values.clamp(min=0).add_(eps * largest).pow_(power)
    return (vectors * powers @ vectors.T).to(matrix.dtype)
