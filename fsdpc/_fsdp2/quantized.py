"""The policy for weights and gradients that travel in fewer bits (qwZ and qgZ of ZeRO++). The
engine codes them, by ``csrc/codec``.
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
_FEWEST = 64  # a coded parameter has at least so many rows, and elements in each
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
    scale per block of a row. Only floating-point parameters with at least 64 rows of at least 64
    elements are coded. Modules compute with the decoded values in ``param_dtype``. ``codec`` is
    None (values travel as they are) or one of

    - ``"int8"``: a signed byte per element and a float32 scale per 256. A value is off by at most
      the largest magnitude of its block / 252.
    - ``"float8_e4m3"``, ``"float8_e5m2"``: a float of 8 bits and a float32 scale per 256. A value
      is off by at most 1/16 or 1/8 of its own magnitude, but for the smallest ones.
    - ``"mxfp8"``: E4M3 and a power of two per 32, as OCP's MX formats.
    - ``"nvfp4"``: E2M1 and an E4M3 scale per 16, and a float32 scale per 512, where NVIDIA's format
      has one per tensor.
    - ``"nf4"``: 4 bits and a float32 scale per 64, the levels of QLoRA.

    ``reduce_codec`` names the codes in which gradients of the same parameters go to the rank that
    sums them, over a wire or between GPUs; None: they go as they are. Choose one of the above
    except nf4, or

    - ``"int4"``: -7 to 7 in 4 bits and a float32 scale per 128. A value is off by at most the
      largest magnitude of its block / 14: smaller ones become 0.
    - ``"int4_stochastic"``: rounded up or down at random instead, by at most a seventh, so that
      sums over steps are right on average. What is random follows from the gradients: equal runs
      are equal to the bit.

    Ranks of one host sum before they code, and a rank adds its own part as it is. So nothing is
    coded where all ranks share memory, in sums over replicas, and by ``set_collectives("c10d")``.
    GPUs share no memory: over NCCL codes go from each rank to all others, and units with coded
    parameters are summed as on a wire, to the bit. Where a GPU's collectives are staged through
    host memory, ``fully_shard`` raises ``NotImplementedError``.

    ``error_feedback`` keeps what ``reduce_codec`` loses of a gradient at the rank that sends it, in
    float32, and adds it to the unit's next one before that is coded: a sum over steps is then off
    by what is kept, not by what all steps lost. What is kept belongs to the process: no state dict
    or checkpoint has it, loading one drops it, and so does unfreezing a parameter that was frozen
    when its unit was made; one that is frozen later keeps its part until it is trained again. A
    resumed run begins with nothing kept. Blocks that are not finite leave what is kept as it is.
    ``error_feedback`` is not for float16, whose loss scale changes between steps.

    A block with a value that is not finite becomes NaN. Other parameters (norms, biases, adapters
    of low rank) travel as they are. Shards, optimizer states and checkpoints do not change. Units
    with parameters that bring their own gather (``fsdp_pre_all_gather``) gather their other
    parameters as they are.
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
    and sends their gradients ("": in none), and whether it keeps what the gradients lose.
    ``ValueError``: it should keep what gradients in float16 lose.
    """
    if not isinstance(policy, QuantizedPolicy) or len(shape) < 2 or not computes(dtype):
        return "", "", False
    if min(shape[0], math.prod(shape[1:])) < _FEWEST:
        return "", "", False
    if policy.error_feedback and (policy.param_dtype or dtype) == torch.float16:
        raise ValueError(_SCALED)
    return policy.codec or "", policy.reduce_codec or "", policy.error_feedback
