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
    """The base of ``SOAP`` and ``Shampoo``, which keep averages of ``g g^T`` and ``g^T g`` for the
    sides of a matrix that are not larger than ``max_precondition_dim``.
    """

    _state_names = MOMENTS
    _owners_hold = False
    _kept = ""  # such as "root", for the states left_root and right_root, made from averages

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        for name in ("precondition_frequency", "max_precondition_dim"):
            if options[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {options[name]}")
        if options.get("shampoo_beta") is not None:
            check_number(options["shampoo_beta"], "shampoo_beta", below=1.0)
        check_number(options.get("grafting_eps", 0.0), "grafting_eps")

    def _work(self, member: Member) -> int:
        """Return the cost of a step: the products of both sides, and a step's share of the
        decompositions, each of which costs about 10 products.
        """
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
    ``g g^T`` and ``g^T g``. An m x n matrix takes 8 bytes of states per element and another
    8 (m^2 + n^2) bytes, all on the rank that owns the matrix.

    The first step takes the bases from the first gradient, by ``torch.linalg.eigh``. Every
    ``precondition_frequency`` steps, each basis takes one step of orthogonal iteration,
    ``Q = qr(A Q)``. A side of more than ``max_precondition_dim`` has no basis; a matrix with two
    such sides is stepped by AdamW's rule. The first moment is kept in the parameter's coordinates,
    the second moment in the coordinates of the bases. With ``correct_bias`` both moments are
    divided as in Adam. ``shampoo_beta`` is the beta of the averages (None: ``betas[1]``). The first
    step updates parameters; in the authors' code the first step only computes the bases.

    As in ``Muon``, ``matrices``, ``split``, and ``use_soap`` in groups decide which parameters are
    matrices, and AdamW steps the others with the options ``adamw_...`` (None: the option without
    ``adamw_``). Gradients are sent to a matrix's owner, and updates are sent back, in float32, so
    that results do not depend on the number of ranks. A step, ``state_dict()`` (which returns all
    states on all ranks) and ``load_state_dict()`` are collective over the ranks that share
    matrices, and every rank must call them as often as the others.

    ``offload``, and the cases in which ``NotImplementedError`` is raised, are as in ``Muon``.
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
            for side in sides:  # flip: largest eigenvalues first; the iteration keeps this order
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
    """Update the averages of ``g g^T`` and ``g^T g``, for sides that are at most ``most`` long."""
    for side, one in zip(SIDES, (grad, grad.T), strict=True):
        if one.size(0) <= most:
            product = one @ one.T
            held.setdefault(side, torch.zeros_like(product)).lerp_(product, 1 - beta)


def rotated(matrix: Tensor, bases: Mapping[str, Tensor]) -> Tensor:
    """Return a new tensor: the matrix in the coordinates of the bases of its sides."""
    new = bases["left"].T @ matrix if "left" in bases else matrix.clone()
    return new @ bases["right"] if "right" in bases else new
