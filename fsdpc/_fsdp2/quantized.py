"""Weights and gradients that travel in fewer bits (qwZ and qgZ of ZeRO++): their policy, and the
gathered value where Python gathers. Elsewhere the engine codes, by ``csrc/codec``.

A block is a part of a row, so codes depend on the whole parameter alone, and gathered values are
the same on any number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdpc import _C
from fsdpc._engine.device import engine_device
from fsdpc._engine.interop import computes
from fsdpc._fsdp2.gathered import Gathered
from fsdpc._torch import preserved_versions

_BLOCK = 256  # elements with one scale (csrc/activation)
CODECS = ("int8", "float8_e4m3", "float8_e5m2", "mxfp8", "nf4")  # csrc/codec
REDUCE_CODECS = ("int8", "int4", "int4_stochastic", "float8_e4m3", "float8_e5m2", "mxfp8")
_FEWEST = 64  # rows, and elements of a row, of a parameter that is coded
_PACKED = (torch.float32, torch.bfloat16, torch.float16)
_SCALED = (
    "error_feedback adds to a gradient what an earlier one lost, and float16's loss scale may "
    "differ between both: choose bfloat16 or float32, or leave error_feedback away"
)


@dataclass(frozen=True)
class QuantizedPolicy(MixedPrecisionPolicy):
    """For ``fully_shard(..., mp_policy=)``: torch's ``MixedPrecisionPolicy``, whose units gather
    their weights, and if asked send their gradients, in fewer bits (ZeRO++, arXiv 2306.10209,
    calls that qwZ and qgZ).

    Each rank sends codes of its rows of a parameter, made from the shard's own dtype, with one
    scale per block of a row: of floating-point parameters with at least 64 rows of at least 64
    elements. Modules compute with the decoded values in ``param_dtype``. ``codec`` is None (values
    travel as they are) or one of

    - ``"int8"``: a signed byte per element and a float32 scale per 256. A value is off by at most
      the largest magnitude of its block / 252.
    - ``"float8_e4m3"``, ``"float8_e5m2"``: a float of 8 bits and a float32 scale per 256. A value
      is off by at most 1/16 or 1/8 of its own magnitude, but for the smallest ones.
    - ``"mxfp8"``: E4M3 and a power of two per 32, as OCP's MX formats.
    - ``"nf4"``: 4 bits and a float32 scale per 64, the levels of QLoRA.

    ``reduce_codec`` is None or in which codes the same parameters' gradients go over a wire to the
    rank that sums them: one of the above but for nf4, or

    - ``"int4"``: -7 to 7 in 4 bits and a float32 scale per 128. A value is off by at most the
      largest magnitude of its block / 14: smaller ones become 0.
    - ``"int4_stochastic"``: rounded up or down at random instead, by at most a seventh, so that
      sums over steps are right on average. What is random follows from the gradients: equal runs
      are equal to the bit.

    Ranks of one host sum before they code, and a rank adds its own part as it is. So nothing is
    coded where all ranks share memory, in sums over replicas, and by ``set_collectives("c10d")``.

    ``error_feedback`` keeps what ``reduce_codec`` loses of a gradient at the rank that sends it, in
    float32, and adds it to the unit's next one before that is coded: a sum over steps is then off
    by what is kept, not by what all steps lost. What is kept belongs to the process: no state dict
    or checkpoint has it, loading one drops it, and so do freezing and unfreezing; a resumed run
    begins with nothing kept. Blocks that are not finite leave it as it is. Not for float16, whose
    loss scale changes between steps.

    A block with a value that is not finite becomes NaN. Other parameters (norms, biases, adapters
    of low rank) travel as without. Shards, optimizer states and checkpoints are as without. On a
    GPU there is no ``reduce_codec``; there, and in a unit with parameters that bring their own
    gather, ``codec`` is "int8" or None, and all ranks gather such units alike: in Python, without
    prefetching.
    """

    codec: str | None = "int8"
    reduce_codec: str | None = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for name, chosen, known in (
            ("codec", self.codec, CODECS),
            ("reduce_codec", self.reduce_codec, REDUCE_CODECS),
        ):
            if chosen is not None and chosen not in known:
                raise ValueError(
                    f"unknown {name} {chosen!r}: choose None or one of {', '.join(known)}"
                )
        if self.error_feedback and self.reduce_codec is None:
            raise ValueError("error_feedback keeps what a reduce_codec loses: choose one")
        if self.error_feedback and torch.float16 in (self.param_dtype, self.reduce_dtype):
            raise ValueError(_SCALED)


def codecs_of(
    policy: MixedPrecisionPolicy | None, shape: torch.Size, dtype: torch.dtype
) -> tuple[str, str, bool]:
    """In which codes ``policy`` gathers parameters of this shape and dtype, cut along dimension 0,
    and sends their gradients ("": in none), and whether it keeps what these lose. ``ValueError``:
    that cannot be kept.
    """
    if not isinstance(policy, QuantizedPolicy) or len(shape) < 2 or not computes(dtype):
        return "", "", False
    if min(shape[0], math.prod(shape[1:])) < _FEWEST:
        return "", "", False
    if policy.error_feedback and (policy.param_dtype or dtype) == torch.float16:
        raise ValueError(_SCALED)
    return policy.codec or "", policy.reduce_codec or "", policy.error_feedback


class Quantized(Gathered):
    """A parameter that travels in 8 bits."""

    def __init__(self, padded: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(padded, dtype, device)
        self._row = math.prod(padded[1:])
        self._blocks = -(-self._row // _BLOCK)
        self._ragged = self._row % _BLOCK > 0
        ordinal = engine_device(device)
        self._ordinal = -1 if ordinal is None else ordinal

    def send(self, local: Tensor) -> list[Tensor]:
        """As ``Gathered.send``: codes and scales of whole rows."""
        rows = local.reshape(-1, self._row)
        whole_rows = rows.shape[0] == self.padded[0] and not self._ragged
        if not whole_rows or rows.device != self.device or not _packs(rows):
            dtype = rows.dtype if rows.dtype in _PACKED else torch.float32
            whole = torch.zeros(self._size(self.padded[0]), dtype=dtype, device=self.device)
            whole[: rows.shape[0], : self._row].copy_(rows)
            rows = whole
        packed = torch.empty(rows.shape, dtype=torch.int8, device=self.device)
        scales = torch.empty(rows.numel() // _BLOCK, device=self.device)
        _C.activation_pack(rows, packed, scales, self._ordinal)
        return [packed[:, : self._row], scales]

    def finish(self, local: Tensor, out: Tensor) -> Tensor | None:
        """As ``Gathered.finish``; what was sent is dropped."""
        packed, scales = self.shaped()
        if not self.made:
            shape = (packed.shape[0], *self.padded[1:])
            self.inner = (torch.empty(shape, dtype=self.dtype, device=self.device),)
        value = self.inner[0].view(-1, self._row)
        if not self._ragged and _packs(value):
            _C.activation_unpack(value, packed, scales, self._ordinal)
        else:
            codes = packed.new_zeros(self._size(packed.shape[0]))
            codes[:, : self._row] = packed
            dtype = self.dtype if self.dtype in _PACKED else torch.float32
            rows = torch.empty(codes.shape, dtype=dtype, device=self.device)
            _C.activation_unpack(rows, codes, scales, self._ordinal)
            with preserved_versions(self.inner):
                value.copy_(rows[:, : self._row])
        for output in self.outputs:
            output.untyped_storage().resize_(0)
        return None if self.made else self.inner[0]

    def _size(self, rows: int) -> tuple[int, int]:
        """Of so many rows, each in whole blocks."""
        return rows, self._blocks * _BLOCK


def _packs(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.dtype in _PACKED
