"""SOAP: Adam in the eigenbases of a matrix's second moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsdpc.optim._base import check_number
from fsdpc.optim._matrices import MOMENTS, Chooser, MatrixOptimizer, SplitRule, move
from fsdpc.optim._owned import Member, Piece
from fsdpc.optim._scaling import Scaling
from fsdpc.optim._spanned import Stretch
from fsdpc.optim._whole import Forms, piece_of

SIDES = ("left", "right")


class Preconditioned(MatrixOptimizer):
    """What ``SOAP`` and ``Shampoo`` share: averages of ``g g^T`` and ``g^T g``, of the sides of a
    matrix that are not larger than ``max_precondition_dim``.
    """

    _state_names = MOMENTS
    _owners_hold = False
    _kept = ""  # the last word of the names of states made from averages, such as left_root

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        for name in ("precondition_frequency", "max_precondition_dim"):
            if options[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {options[name]}")
        if options.get("shampoo_beta") is not None:
            check_number(options["shampoo_beta"], "shampoo_beta", below=1.0)
        check_number(options.get("grafting_eps", 0.0), "grafting_eps")

    def _work(self, member: Member) -> int:
        """Products of both sides, and a step's share of decompositions (about 10 products each)."""
        options = member.options
        most, every = options["max_precondition_dim"], options["precondition_frequency"]
        work = 0
        for width in member.matrix.widths:
            rows = member.matrix.rows
            for side in (rows, width):
                if side <= most:
                    work += 3 * rows * width * side + 10 * side**3 // every
            work += rows * width
        return work

    def _held_forms(
        self, options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Forms:
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        forms: Forms = {name: (dtype, shape) for name in MOMENTS}
        for side, size in zip(SIDES, shape, strict=True):
            if size <= options["max_precondition_dim"]:
                forms |= {name: (dtype, (size, size)) for name in (side, f"{side}_{self._kept}")}
        return forms

    def _take(self, stretch: Stretch, piece: Piece, new: Tensor, scaling: Scaling) -> None:
        factors = [float(piece.member.options["lr"])] * len(piece.member.matrix.widths)
        move(piece_of(stretch.value, piece), new, piece, factors, None)


class SOAP(Preconditioned):
    """SOAP (Vyas et al., arXiv 2409.11321, algorithm 3): Adam in the eigenbases of averages of
    ``g g^T`` and ``g^T g``. States of an m x n matrix: 8 bytes per element, and 8 (m^2 + n^2)
    bytes, all at the matrix's owner.

    The bases are those of the first gradient, by ``torch.linalg.eigh``; every
    ``precondition_frequency`` steps each takes one step of orthogonal iteration, ``Q = qr(A Q)``.
    A side of more than ``max_precondition_dim`` has no basis; a matrix of two such sides is
    stepped by AdamW's rule. The first moment is kept in the parameter's coordinates, the second in
    the bases; with ``correct_bias`` both are divided as by Adam. ``shampoo_beta``: the averages'
    beta; None: ``betas[1]``. The first step has an update, unlike that of the authors' code, which
    only finds the bases.

    Which parameters are matrices, ``matrices``, ``split`` and AdamW's part of the others (with
    ``adamw_...``; None: the matrices' numbers) are as in ``Muon``, with ``use_soap`` in groups.
    Gradients travel to a matrix's owner, and updates back, in float32, so that results do not
    depend on the number of ranks; a step, ``state_dict()`` (all states on all ranks) and
    ``load_state_dict()`` are collective over the ranks that share matrices, and every rank must
    call them as often as the others.

    ``offload``, and when ``NotImplementedError`` is raised: as for ``Muon``.
    """

    _flag = "use_soap"
    _kept = "basis"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10000,
        correct_bias: bool = True,
        *,
        matrices: Chooser | None = None,
        split: SplitRule | None = None,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] | None = None,
        adamw_eps: float | None = None,
        adamw_weight_decay: float | None = None,
        offload: Any = None,
    ) -> None:
        self._matrices, self._split = matrices, split
        self._open(locals(), use_soap=None)

    def _rule(
        self, options: Mapping[str, Any], step: int, held: dict[str, Tensor], *lanes: Tensor
    ) -> Tensor:
        [grad] = lanes
        beta1, beta2 = options["betas"]
        beta = beta2 if options["shampoo_beta"] is None else options["shampoo_beta"]
        average(held, grad, beta, options["max_precondition_dim"])
        sides = [side for side in SIDES if side in held]
        if step == 1:
            for side in sides:  # the largest first, so that the iteration keeps their order
                held[f"{side}_basis"] = torch.linalg.eigh(held[side])[1].flip(1).contiguous()
        for name in MOMENTS:
            held.setdefault(name, torch.zeros_like(grad))
        bases = {side: held[f"{side}_basis"] for side in sides}
        first = held["exp_avg"].lerp_(grad, 1 - beta1)
        turned = rotated(grad, bases)
        second = held["exp_avg_sq"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        size, root = 1.0, 1.0
        if options["correct_bias"]:
            size, root = 1 - beta1**step, (1 - beta2**step) ** 0.5
        update = rotated(first, bases).div_(second.sqrt().div_(root).add_(options["eps"]))
        update = rotated(update.div_(size), {side: basis.T for side, basis in bases.items()})
        if step % options["precondition_frequency"] == 0:
            for side in sides:
                held[f"{side}_basis"] = torch.linalg.qr(held[side] @ bases[side])[0].contiguous()
        return update


def average(held: dict[str, Tensor], grad: Tensor, beta: float, most: int) -> None:
    """Step the averages of ``g g^T`` and ``g^T g``, of sides of at most ``most``."""
    for side, one in zip(SIDES, (grad, grad.T), strict=True):
        if one.size(0) <= most:
            product = one @ one.T
            held.setdefault(side, torch.zeros_like(product)).lerp_(product, 1 - beta)


def rotated(matrix: Tensor, bases: Mapping[str, Tensor]) -> Tensor:
    """The matrix in the coordinates of the bases of its sides: a new tensor."""
    new = bases["left"].T @ matrix if "left" in bases else matrix.clone()
    return new @ bases["right"] if "right" in bases else new
