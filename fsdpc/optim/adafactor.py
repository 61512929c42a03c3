"""Adafactor, whose second moments have one value for each row and each column."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdpc._companions.matrices import Matrix
from fsdpc.optim._matrices import SplitRule, cut, split_of
from fsdpc.optim._owned import Member, Piece
from fsdpc.optim._places import ParamSpan
from fsdpc.optim._scaling import Scaling
from fsdpc.optim._spanned import Stretch
from fsdpc.optim._whole import Forms, WholeOptimizer, piece_of, scaled

Number = float | Tensor  # a tensor for a number on a GPU: the host does not wait for it


class Adafactor(WholeOptimizer):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235), with the arguments, defaults, states and
    results of ``torch.optim.Adafactor``. The states take 4 bytes for each row and each column of a
    float32 matrix, and 4 bytes for each element of a vector.

    Every parameter is stepped at one rank, its owner, which keeps the states. Gradients and values
    are sent to the owner, and new values are sent back, in the parameter's dtype. The results do
    not depend on the number of ranks. On CPUs, the results equal those of torch's class
    (``foreach=False``) to the bit if both use the same number of threads. A parameter with three or
    more dimensions is a stack of matrices with one step size, as in torch. ``foreach`` has no
    effect.

    ``split``: the parameters that consist of several matrices, as for ``Muon``. Each of these
    matrices is stepped as a separate parameter, with states named ``row_var.0``, ``row_var.1``...

    A step is collective over the ranks that share parameters, and every rank must call ``step`` the
    same number of times. ``state_dict()``, which has all states on all ranks, and
    ``load_state_dict()`` are also collective. ``offload`` and the conditions for
    ``NotImplementedError`` are those of ``Muon``.
    """

    _state_names = ("row_var", "col_var", "variance")
    _lanes = 2
    _kinds: dict[int, tuple[Matrix, ...]] | None = None  # the matrices of each span, by its id
    _split: SplitRule | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        split: SplitRule | None = None,
        offload: Any = None,
    ) -> None:
        _check(lr, beta2_decay, eps, d, weight_decay)
        self._split = split
        options = {"lr": lr, "beta2_decay": beta2_decay, "eps": tuple(eps), "d": d}
        more = {"weight_decay": weight_decay, "foreach": foreach, "maximize": maximize}
        Optimizer.__init__(self, params, {**options, **more})
        self._offload(offload)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_split": self._split}

    def _forget(self) -> None:
        super()._forget()
        self._kinds = None

    def _matrices_of(self, param: Tensor, span: ParamSpan) -> tuple[Matrix, ...]:
        if self._kinds is None or id(span) not in self._kinds:
            self._kinds = {
                id(each): self._cut(name, each.shape)
                for group in self.param_groups
                for _, each, name in self._named_spans(group)
            }
        return self._kinds[id(span)]

    def _cut(self, name: str | None, shape: tuple[int, ...]) -> tuple[Matrix, ...]:
        if len(shape) in (2, 3) and split_of(self._split, name or "", shape) != 1:
            return cut(self._split, name, shape)
        columns = shape[-1] if shape else 1
        rows = math.prod(shape) // columns if columns else 0
        return (Matrix(0, rows, columns, (columns,)),) if rows else ()

    def _work(self, member: Member) -> int:
        return member.matrix.numel

    def _wire(self, param: Tensor) -> torch.dtype:
        return param.dtype

    def _held_forms(
        self, options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Forms:
        if len(shape) < 2:
            return {"variance": (dtype, shape)}
        rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        return {"row_var": (dtype, rows), "col_var": (dtype, columns)}

    def _give(self, stretch: Stretch, piece: Piece, scaling: Scaling, lanes: Tensor) -> None:
        grad = scaled(piece_of(stretch.grad, piece), scaling)
        lanes[0].copy_(-grad if piece.member.options["maximize"] else grad)
        lanes[1].copy_(piece_of(stretch.value, piece))

    def _rule(
        self, options: Mapping[str, Any], step: int, held: dict[str, Tensor], *lanes: Tensor
    ) -> Tensor:
        """Return the new values. The operators run in the order of ``torch.optim.Adafactor``."""
        grad, values = lanes
        lr, d = options["lr"], options["d"]
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr  # for float32 products, as in torch
        eps1, eps2 = options["eps"]
        eps1 = torch.finfo(values.dtype).eps if eps1 is None else eps1
        weight = step ** options["beta2_decay"]
        size = _number(values.norm(2)) / values.numel() ** 0.5
        alpha = _at_least(size, eps2) * min(lr, 1 / step**0.5)
        if options["weight_decay"] != 0:
            values.mul_(1 - lr * options["weight_decay"])
        if grad.dim() > 1:
            for name, dim in (("row_var", -1), ("col_var", -2)):
                mean = torch.norm(grad, dim=dim, keepdim=True).square_().div_(grad.size(dim))
                held.setdefault(name, torch.zeros_like(mean)).lerp_(mean, weight)
            square = held["row_var"] @ held["col_var"]
            square.div_(held["row_var"].mean(dim=-2, keepdim=True).clamp_(min=eps1))
        else:
            held.setdefault("variance", torch.zeros_like(grad)).lerp_(grad * grad, weight)
            square = held["variance"].clone()
        update = square.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad)
        size = _number(update.norm(2)) / (update.numel() ** 0.5 * d)
        factor = -alpha / _at_least(size, 1.0)
        if values.is_cpu:
            return values.add_(update, alpha=float(factor))
        assert isinstance(factor, Tensor)
        return torch.addcmul(values, update, factor.to(values.dtype))

    def _take(self, stretch: Stretch, piece: Piece, new: Tensor, scaling: Scaling) -> None:
        piece_of(stretch.value, piece).copy_(new)


def _check(lr: Any, beta2_decay: float, eps: Any, d: float, weight_decay: float) -> None:
    """Raise ``ValueError``, with torch's text, if an option is out of range."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not 0.0 <= lr:
        raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
    if not 0.0 >= beta2_decay:
        raise ValueError(f"beta2_decay should be <= 0 but is: {beta2_decay}")
    if eps[0] is not None and not 0.0 <= eps[0]:
        raise ValueError(f"epsilon1 should be >= 0 but is: {eps[0]}")
    if not 0.0 <= eps[1]:
        raise ValueError(f"epsilon2 should be >= 0 but is: {eps[1]}")
    if not 1.0 <= d:
        raise ValueError(f"Clipping threshold d should be >= 1 but is: {d}")
    if not 0.0 <= weight_decay:
        raise ValueError(f"weight_decay should be >= 0 but is: {weight_decay}")


def _number(value: Tensor) -> Number:
    """Return the value of a tensor on the CPU as a float, as torch's class does. Return a tensor
    for a value on a GPU, so that the host does not wait.
    """
    return float(value) if value.is_cpu else value.double()


def _at_least(value: Number, least: float) -> Number:
    return value.clamp(min=least) if isinstance(value, Tensor) else max(least, value)
