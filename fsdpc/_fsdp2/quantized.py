"""The policy for weights and gradients that are sent in fewer bits (qwZ and qgZ of ZeRO++). The
engine encodes and decodes the values by ``csrc/codec``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdpc import _C
from fsdpc._engine.interop import computes

CODECS = tuple(name for name, *_, weights, _ in _C.CODECS if weights)
REDUCE_CODECS = tuple(name for name, *_, gradients in _C.CODECS if gradients)
_FEWEST = 64  # minimum number of rows, and of elements in a row, of a parameter that is encoded
_SCALED = (
    "error_feedback adds to a gradient what an earlier one lost, and float16's loss scale may "
    "differ between both: choose bfloat16 or float32, or leave error_feedback away"
)


@dataclass(frozen=True)
class QuantizedPolicy(MixedPrecisionPolicy):
    """A subclass of torch's ``MixedPrecisionPolicy`` for ``fully_shard(..., mp_policy=)``. With it,
    units gather their weights, and on request send their gradients, in fewer bits (ZeRO++, arXiv
    2306.10209, calls these two qwZ and qgZ).

    Each rank sends codes of its rows of a parameter. The codes are made from values in the shard's
    own dtype, with one scale per block of a row. Only floating-point parameters with at least 64
    rows of at least 64 elements are encoded. Modules compute with the decoded values in
    ``param_dtype``. ``codec`` is None (values are sent unencoded) or one of

    - ``"int8"``: a signed byte per element and a float32 scale per 256 elements. The error of a
      value is at most the largest magnitude of its block / 252.
    - ``"float8_e4m3"``, ``"float8_e5m2"``: a float of 8 bits per element and a float32 scale per
      256 elements. The error of a value is at most 1/16 (e4m3) or 1/8 (e5m2) of its own magnitude,
      except for the smallest values.
    - ``"mxfp8"``: E4M3 values and a power of two as the scale per 32 elements, as in OCP's MX
      formats.
    - ``"nvfp4"``: E2M1 values, an E4M3 scale per 16 elements and a float32 scale per 512 elements.
      NVIDIA's format has one float32 scale per tensor instead.
    - ``"nf4"``: 4 bits per element, which select one of QLoRA's levels, and a float32 scale per 64
      elements.

    ``reduce_codec`` names the codes in which gradients of the same parameters are sent to the rank
    that sums them, between hosts or between GPUs. It is None (gradients are sent unencoded), one of
    the above except nf4, or

    - ``"int4"``: -7 to 7 in 4 bits and a float32 scale per 128 elements. The error of a value is at
      most the largest magnitude of its block / 14. Values of a smaller magnitude than this bound
      become 0.
    - ``"int4_stochastic"``: the same codes, but values are rounded up or down at random, with an
      error of at most a seventh of the largest magnitude, so that sums over steps are right on
      average. The random numbers are computed from the gradients, so equal runs give results that
      are equal to the bit.

    Ranks of one host sum their gradients before they encode the sum. A rank adds its own gradients
    to the sum unencoded. Nothing is encoded where all ranks share memory, nor in sums over
    replicas, nor with ``set_collectives("c10d")``. GPUs share no memory: over NCCL each rank sends
    codes to all other ranks. The sums of units with encoded parameters are then equal, to the bit,
    to the sums of as many hosts with one rank each. Where a GPU's collectives are staged through
    host memory, ``fully_shard`` raises ``NotImplementedError``.

    ``error_feedback``: the rank that sends a gradient keeps the error that ``reduce_codec`` makes,
    in float32, and adds this error to the unit's next gradient before that gradient is encoded. The
    error of a sum over steps is then the error that is kept, not the sum of the errors of all
    steps. The kept errors belong to the process. No state dict or checkpoint contains them, so a
    resumed run begins without kept errors. Loading a state dict or checkpoint drops them, and so
    does unfreezing a parameter that was frozen when its unit was made. A parameter that is frozen
    later keeps its error until it is trained again. A block that is not finite does not change the
    kept error. ``error_feedback`` is not allowed for float16 (``ValueError``), whose loss scale
    changes between steps.

    A block with a value that is not finite becomes NaN. Other parameters (norms, biases, adapters
    of low rank) are sent unencoded. Shards, optimizer states and checkpoints are not encoded. In
    units with parameters that have a gather of their own (``fsdp_pre_all_gather``), the other
    parameters are gathered unencoded.
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
    """Return what ``policy`` says for parameters of this shape and dtype that are cut along
    dimension 0: the codec of the gather ("" for none), the codec of the gradients ("" for none),
    and whether the errors of the gradients are kept. ``ValueError``: errors are to be kept, and the
    gradients are float16.
    """
    if not isinstance(policy, QuantizedPolicy) or len(shape) < 2 or not computes(dtype):
        return "", "", False
    if min(shape[0], math.prod(shape[1:])) < _FEWEST:
        return "", "", False
    if policy.error_feedback and (policy.param_dtype or dtype) == torch.float16:
        raise ValueError(_SCALED)
    return policy.codec or "", policy.reduce_codec or "", policy.error_feedback
