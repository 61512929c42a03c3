"""Muon: momentum, orthogonalised matrix by matrix; AdamW for what is no matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsdpc.optim._base import check_number
from fsdpc.optim._matrices import MOMENTS, Chooser, MatrixOptimizer, SplitRule, move
from fsdpc.optim._owned import Member, Piece
from fsdpc.optim._scaling import Scaling
from fsdpc.optim._spanned import Stretch, part
from fsdpc.optim._whole import piece_of, scaled

MOMENTUM = "momentum_buffer"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(MatrixOptimizer):
    """Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/), with the arguments,
    defaults and results of ``torch.optim.Muon``: 4 bytes of states per element of a float32 matrix.

    Parameters that are no matrices, embeddings and output layers are stepped by AdamW, as
    by ``fsdpc.optim.AdamW``, in the same groups: with ``adamw_lr`` (None: ``lr``; a scheduler that
    changes ``lr`` changes both by the same factor), ``adamw_betas``, ``adamw_eps`` and
    ``adamw_weight_decay`` (None: ``weight_decay``). The first of these rules that knows a
    parameter decides:

    1. ``use_muon`` of its group: True takes all its parameters of 2 and 3 dimensions, False none.
       In a group with False, ``lr``, ``betas``, ``eps`` and ``weight_decay`` are AdamW's.
    2. ``matrices(name, shape)``, called for parameters of 2 and more dimensions: True or False, or
       None for the next rules.
    3. Names, from ``model.named_parameters()`` or FSDP's units: embeddings (the module's or the
       parameter's own name contains ``embed`` or ``embd``, or is ``wte``, ``wpe`` and the like)
       and output layers (the module is called ``lm_head``, ``head``, ``output``, ``classifier``,
       ``score``, ``decoder``...) go to AdamW, and so do biases, such as those of stacked experts.
    4. Two dimensions are a matrix. Three are a matrix for each index of the first dimension, if a
       part of the name is ``expert`` or ends in ``experts``. Everything else goes to AdamW, with a
       warning for three and more dimensions, which may be matrices under another view.

    Parameters without names are all matrices if all have two dimensions (as in torch); otherwise
    a missing name is a ``ValueError``.

    ``split``: parameters that hold several matrices, by the last parts of the name, or by a
    function of name and shape. ``3`` cuts the rows into three equal matrices, ``[d, k, k]`` into
    matrices of so many rows, ``(1, 3)`` and ``(1, [d, k, k])`` the columns; of parameters of three
    dimensions each matrix is cut. ``ns_dtype``: the iteration's, ``torch.bfloat16`` as in torch,
    or ``torch.float32``.

    A step is collective over the ranks that share matrices, and every rank must call ``step`` as
    often as the others. Each matrix is whole at one rank, its owner, for the iteration; elements
    travel once there and once back, in the dtype of the iteration. Owners are dealt by the
    iteration's cost, alike on all ranks. So results of float32 parameters do not depend on the
    number of ranks, and are ``torch.optim.Muon``'s to the bit on processors with equal numbers of
    threads; for narrow ones torch rounds the learning rate on processors, and this class does not.
    A step takes the matrices round by round, so that it needs memory for a few of the largest size,
    or 256 MiB for smaller ones (512 MiB in float32).

    ``offload``: a ``Disk`` to keep states on; those of matrices are stepped in a mapping of the
    file. ``NotImplementedError``: a ``Host`` for parameters on a GPU, ``masters=True``,
    ``checksum=True``, and DTensors that are not cut by rows.
    """

    _flag = "use_muon"
    _of_matrix = (MOMENTUM,)
    _state_names = (MOMENTUM, *MOMENTS)
    keeps_whole_states = _owners_hold = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        matrices: Chooser | None = None,
        split: SplitRule | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        offload: Any = None,
    ) -> None:
        if ns_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"ns_dtype must be torch.bfloat16 or torch.float32, got {ns_dtype}")
        self._matrices, self._split, self._dtype = matrices, split, ns_dtype
        self._open(locals(), use_muon=None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_dtype": self._dtype}

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        check_number(options["momentum"], "momentum value")
        if options["adjust_lr_fn"] not in ADJUSTMENTS:
            raise ValueError(
                f"Adjust learning rate function {options['adjust_lr_fn']} is not supported"
            )
        check_number(options["ns_steps"], "ns_steps", below=100)
        if len(options["ns_coefficients"]) != 3:
            raise ValueError("ns_coefficients must be a tuple of exactly 3 values")

    # --- the rule --------------------------------------------------------------------------------

    def _work(self, member: Member) -> int:
        return member.matrix.work * int(member.options["ns_steps"])

    def _wire(self, param: Tensor) -> torch.dtype:
        return self._dtype

    def _give(self, stretch: Stretch, piece: Piece, scaling: Scaling, lanes: Tensor) -> None:
        """Step the momentum of a piece, and send what is orthogonalised."""
        options = piece.member.options
        buffer = piece_of(part(self.state[stretch.param][MOMENTUM], stretch.span), piece)
        factor, found = options["momentum"], scaling.control.found_inf
        grad = scaled(piece_of(stretch.grad, piece), scaling).to(buffer.dtype)
        if found is None:
            buffer.lerp_(grad, 1 - factor)
        else:
            buffer.copy_(torch.where(found == 0, buffer.lerp(grad, 1 - factor), buffer))
        lanes[0].copy_(grad.lerp(buffer, factor) if options["nesterov"] else buffer)

    def _apply(self, member: Member, lanes: Tensor, step: int) -> Tensor:
        """Orthogonalise each of the matrices that stand side by side. Overwrites ``lanes``."""
        options, widths = member.options, member.matrix.widths
        iteration = options["ns_coefficients"], options["ns_steps"], options["eps"]
        if len(widths) == 1:
            return newton_schulz(lanes[0], *iteration)
        parts = lanes[0].split(widths, 1)
        return torch.cat([newton_schulz(one.contiguous(), *iteration) for one in parts], 1)

    def _take(self, stretch: Stretch, piece: Piece, new: Tensor, scaling: Scaling) -> None:
        options, matrix = piece.member.options, piece.member.matrix
        factors = [
            float(options["lr"] * adjustment(options["adjust_lr_fn"], matrix.rows, width))
            for width in matrix.widths
        ]
        move(piece_of(stretch.value, piece), new, piece, factors, scaling.control.found_inf)


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Do ``x = a x + (b (x x^T) + c (x x^T)^2) x`` for ``steps`` times, from ``matrix`` divided by
    its norm, at least ``eps``: about the orthogonal factor of its polar decomposition. By torch's
    operators, in the order and with the strides of ``torch.optim.Muon``. Overwrites ``matrix``.
    """
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def adjustment(kind: str | None, rows: int, columns: int) -> float:
    """What multiplies the learning rate of a matrix, as in ``torch.optim.Muon``."""
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
