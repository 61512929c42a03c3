"""Shampoo: gradients between inverse roots of their second moments by rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsdpc.optim._matrices import MOMENTS, Chooser, SplitRule
from fsdpc.optim.soap import SIDES, Preconditioned, average


class Shampoo(Preconditioned):
    """Shampoo (Gupta et al., arXiv 1802.09568) as in training of networks (Anil et al., arXiv
    2002.09018): ``L^(-1/4) m R^(-1/4)`` of the first moment m, with L and R averages of ``g g^T``
    and ``g^T g``. States of an m x n matrix: 8 bytes per element, and 8 (m^2 + n^2) bytes, all at
    the matrix's owner.

    L and R are divided by ``1 - betas[1]^t``. The inverse roots are made in float64 by
    ``torch.linalg.eigh``, in the first step and then every ``precondition_frequency`` steps, with
    ``eps`` times the largest eigenvalue added to each. A side of more than
    ``max_precondition_dim`` is left alone, and the other side's power is then ``-1/2``; a matrix of
    two such sides has the update of Adam. With ``grafting`` an update gets the length of Adam's
    (with ``grafting_eps``), and so Adam's learning rates; without, ``lr`` is Shampoo's own.

    Which parameters are matrices, ``matrices``, ``split`` and AdamW's part of the others (with
    ``adamw_...``; None: the matrices' numbers, and an ``adamw_eps`` of 1e-8) are as in ``Muon``,
    with ``use_shampoo`` in groups. What travels and what is collective: as in ``SOAP``.

    ``offload``, and when ``NotImplementedError`` is raised: as for ``Muon``.
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
    """A power of a matrix, after ``eps`` times the largest eigenvalue is added to each of them."""
    values, vectors = torch.linalg.eigh(matrix.double())
    largest = values[-1:].clamp(min=1e-30)
    powers = values.clamp(min=0).add_(eps * largest).pow_(power)
    return (vectors * powers @ vectors.T).to(matrix.dtype)
