"""Muon: orthogonalised momentum for matrices, and AdamW for all other parameters."""

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
    defaults and results of ``torch.optim.Muon``. A float32 matrix takes 4 bytes of states per
    element.

    Embeddings, output layers, and parameters that are not matrices are stepped by the rule of
    ``fsdpc.optim.AdamW``. They may be in the same groups as matrices. AdamW's options are
    ``adamw_lr`` (None: ``lr``; a scheduler that changes ``lr`` changes both by the same factor),
    ``adamw_betas``, ``adamw_eps`` and ``adamw_weight_decay`` (None: ``weight_decay``). Whether a
    parameter is a matrix is decided by the first of these rules that applies to the parameter:

    1. ``use_muon`` of the parameter's group. If True, all parameters of the group that have 2 or 3
       dimensions are matrices; if False, none are. In a group with False, ``lr``, ``betas``,
       ``eps`` and ``weight_decay`` are AdamW's.
    2. ``matrices(name, shape)``, called for parameters of 2 or more dimensions. It returns True or
       False, or None to leave the decision to the next rules.
    3. Names, from ``model.named_parameters()`` or FSDP's units. Embeddings (the module's or the
       parameter's own name contains ``embed`` or ``embd``, or is ``wte``, ``wpe`` or similar),
       output layers (the module is called ``lm_head``, ``head``, ``output``, ``classifier``,
       ``score``, ``decoder``...) and biases, such as those of stacked experts, go to AdamW.
    4. The number of dimensions. A parameter of two dimensions is a matrix. A parameter of three
       dimensions is one matrix for each index of the first dimension, if a part of its name is
       ``expert`` or ends in ``experts``. Every other parameter goes to AdamW. If such a parameter
       has three or more dimensions, there is a warning, because another view of the parameter may
       be a matrix.

    Rules 3 and 4 need names. Without a name, a parameter is a matrix if all parameters of its group
    have two dimensions, as in torch. If they do not, ``ValueError`` is raised.

    ``split`` says which parameters consist of several matrices. It is a dict from the last parts of
    names to splits, or a function of name and shape. ``3`` cuts the rows into three equal matrices,
    ``[d, k, k]`` into matrices of d, k and k rows. ``(1, 3)`` and ``(1, [d, k, k])`` cut the
    columns in the same way. In a parameter of three dimensions every matrix is cut. ``ns_dtype`` is
    the dtype of the iteration: ``torch.bfloat16``, as in torch, or ``torch.float32``.

    A step is collective over the ranks that share matrices, and every rank must call ``step`` as
    often as the others. For the iteration, one rank, the owner, has the whole matrix. Each element
    is sent to the owner once and back once, in the dtype of the iteration. All ranks compute the
    same assignment of owners, which balances the iteration's cost. Results of float32 parameters
    do not depend on the number of ranks, and on CPUs are equal to those of ``torch.optim.Muon`` to
    the bit for equal numbers of threads. For narrower parameters on CPUs torch rounds the learning
    rate, and this class does not. A step processes the matrices in rounds, so that it needs memory
    for a few matrices of the largest size, or 256 MiB if matrices are smaller (512 MiB in float32).

    ``offload``: a ``Disk`` to keep states on. A step updates the states of matrices in a memory
    mapping of the file. Raises ``NotImplementedError`` for a ``Host`` with parameters on a GPU, for
    ``masters=True``, for ``checksum=True``, and for DTensors that are not cut by rows.
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
        """Step the momentum of a piece, and write to ``lanes`` what the owner orthogonalises."""
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
        """Orthogonalise each of the matrices side by side in ``lanes[0]``. Overwrites ``lanes``."""
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
    """Return approximately the orthogonal factor of the polar decomposition of ``matrix``. The
    iteration begins with ``matrix`` divided by its norm (at least by ``eps``), and repeats
    ``x = a x + (b (x x^T) + c (x x^T)^2) x`` ``steps`` times. Uses torch's operators, in the order
    and with the strides of ``torch.optim.Muon``. Overwrites ``matrix``.
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
    """Return the factor of a matrix's learning rate, as in ``torch.optim.Muon``."""
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
