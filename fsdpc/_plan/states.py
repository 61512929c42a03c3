"""Bytes per parameter of optimizers and of ZeRO's stages, with their sources.

A figure for "the optimizer" means nothing without its recipe, so each figure here names one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Optimizer:
    """State of one optimizer, in bytes per element of a shard.

    ``moments``: buffers that have the parameter's dtype; ``fixed``: bytes whatever that dtype is.
    ``master``: bytes of a copy of the parameter in fp32, kept where the parameter is narrower.
    ``temporaries``: bytes per element that a multi-tensor (foreach) update has beside its state,
    in units of the parameter's dtype; zero for fused updates. ``rest``: small states that no figure
    counts, and that are never offloaded.
    """

    name: str
    moments: int
    fixed: float
    source: str
    master: bool = False
    temporaries: int = 1
    rest: str = ""

    @property
    def without(self) -> str:
        """What a figure says of ``rest``."""
        return f"; without {self.rest}" if self.rest else ""

    def state_bytes(self, item: int) -> float:
        master = 4 if self.master and item < 4 else 0
        return self.moments * item + self.fixed + master

    @property
    def offloads(self) -> bool:
        """Whether ``fsdpc.optim`` offloads its states."""
        return self.master or self.moments > 0 or self.name in ("adamw-bf16", "adamw8bit")

    def parts(self, item: int) -> tuple[int, ...]:
        """Bytes per element of each state that ``fsdpc.optim`` offloads, but those of 8 bits.
        ``ValueError``: none.
        """
        if self.master:
            return (4, 4, 4) if item < 4 else (item, item)
        if self.name == "adamw-bf16":
            return (2, 2)
        if not self.offloads:
            raise ValueError(f"{self.name} has no states that fsdpc.optim offloads")
        return (item,) * self.moments


OPTIMIZERS = {
    o.name: o
    for o in (
        Optimizer("adamw", 2, 0, "torch.optim.AdamW: two moments in the parameter's dtype"),
        Optimizer(
            "adamw-fused", 2, 0, "torch.optim.AdamW(fused=True): no temporaries", temporaries=0
        ),
        Optimizer(
            "adamw-master",
            0,
            8,
            "fp32 moments, and an fp32 master of narrow parameters",
            master=True,
        ),
        Optimizer(
            "adamw8bit",
            0,
            2 + 8 / 256,
            "fsdpc.optim.AdamW8bit, bitsandbytes: two 1-byte moments, an fp32 scale per 256",
            temporaries=0,
        ),
        Optimizer(
            "adamw4bit",
            0,
            1 + 8 / 128,
            "torchao: two 4-bit moments, an fp32 scale per 128",
            temporaries=0,
        ),
        Optimizer(
            "adam-mini",
            1,
            0,
            "fsdpc.optim.AdamMini: one moment in the parameter's dtype",
            temporaries=0,
            rest="second moments of blocks, 4 B each, which stay beside the parameters",
        ),
        Optimizer(
            "adamw-bf16",
            0,
            4,
            "fsdpc.optim.AdamWBF16: two bfloat16 moments, rounded stochastically",
            temporaries=0,
        ),
        Optimizer("lion", 1, 0, "Lion: one moment in the parameter's dtype"),
        Optimizer("sgd", 0, 0, "torch.optim.SGD without momentum", temporaries=0),
        Optimizer("momentum", 1, 0, "torch.optim.SGD with momentum"),
    )
}


def optimizer(name: str) -> Optimizer:
    """``ValueError`` lists the names."""
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: use one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter: values that compute, gradients, and everything the optimizer keeps."""

    name: str
    params: float
    grads: float
    states: float

    @property
    def total(self) -> float:
        return self.params + self.grads + self.states

    def per_rank(self, numel: float, world: int, stage: int) -> float:
        """Bytes on each of ``world`` ranks with ZeRO stage 0 to 3 (Rajbhandari et al. 2020): the
        states are divided from stage 1 on, the gradients from 2, the values from 3.
        """
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO has the stages 0 to 3, not {stage}")
        parts = (self.states, self.grads, self.params)
        return numel * sum(b / (world if stage > i else 1) for i, b in enumerate(parts))


RECIPES = {
    r.name: r
    for r in (
        Recipe("fp32", 4, 4, 8),  # torch FSDP on fp32 values: 16
        Recipe("bf16", 2, 2, 4),  # everything in bf16: 8
        Recipe("bf16-fp32-moments", 2, 2, 8),  # 12
        Recipe("mixed", 2, 2, 12),  # ZeRO paper: fp32 master and moments: 16
        Recipe("deepspeed", 2, 4, 12),  # its estimator: 18
        Recipe("bf16-8bit", 2, 2, 2 + 8 / 256),
        Recipe("fp8-values", 1, 2, 12),
    )
}


def deepspeed_zero3(
    numel: float, largest: float, gpus: int, nodes: int = 1, *, offload: str = "none"
) -> tuple[float, float]:
    """(GPU bytes, host bytes) that DeepSpeed's ZeRO-3 estimator prints for ``gpus`` per node;
    ``offload``: ``none``, ``optimizer`` or ``all``. For comparisons with its documentation.
    """
    world = gpus * nodes
    if offload == "all":
        return 4 * largest, numel * 18 / nodes * 1.5
    if offload == "optimizer":
        return 4 * largest + 2 * numel / world, numel * 16 / nodes * 1.5
    return 4 * largest + 18 * numel / world, largest * 4 * gpus * 1.5


def deepspeed_zero2(numel: float, world: int) -> float:
    """GPU bytes that DeepSpeed's ZeRO-2 estimator prints without offload."""
    return 2 * numel + 18 * numel / world
