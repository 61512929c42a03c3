"""The bytes of states per parameter, for each optimizer, with the sources of these numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OF_WHOLE = ("muon", "soap", "shampoo", "adafactor")  # one rank steps a whole matrix


@dataclass(frozen=True)
class Optimizer:
    """The states of one optimizer, per element of a shard.

    ``moments``: how many buffers have the parameter's dtype. ``fixed``: bytes that do not depend on
    the parameter's dtype. ``master``: whether there is an fp32 copy of narrower parameters.
    ``temporaries``: how many temporary buffers of the parameter's dtype a multi-tensor (foreach)
    update needs; zero for fused updates. ``rest``: small states that are not counted here, and are
    never offloaded. ``classes``: the names of the classes with these states.
    """

    name: str
    moments: int
    fixed: float
    source: str
    master: bool = False
    temporaries: int = 1
    rest: str = ""
    classes: tuple[str, ...] = ()

    @property
    def without(self) -> str:
        """The text of a plan's row about ``rest``."""
        return f"; without {self.rest}" if self.rest else ""

    def state_bytes(self, item: int) -> float:
        master = 4 if self.master and item < 4 else 0
        return self.moments * item + self.fixed + master

    @property
    def offloads(self) -> bool:
        """Whether the states can be offloaded to host memory or a disk through buffers."""
        has_some = self.master or self.moments > 0 or self.name in ("adamw-bf16", "adamw8bit")
        return has_some and self.name not in OF_WHOLE

    def takes(self, changes: Mapping[str, object]) -> bool:
        """Return whether the states can be in the place that these options of a setup give."""
        moves = changes.get("host") or changes.get("disk") and self.name not in OF_WHOLE
        return self.offloads or not moves

    def parts(self, item: int) -> tuple[int, ...]:
        """Return the bytes per element of each state that ``fsdpc.optim`` offloads; not for 8-bit
        states. ``ValueError``: this optimizer has no states that pass through buffers.
        """
        if self.master:
            return (4, 4, 4) if item < 4 else (item, item)
        if self.name == "adamw-bf16":
            return (2, 2)
        if not self.offloads:
            able = ", ".join(o.name for o in OPTIMIZERS.values() if o.offloads)
            raise ValueError(
                f"{self.name} has no states that pass through buffers, from host memory or a disk: "
                "leave that option away, or keep parameters, gradients and states in host memory "
                f"(--offload), or use one of {able}"
            )
        return (item,) * self.moments


OPTIMIZERS = {
    o.name: o
    for o in (
        Optimizer(
            "adamw",
            2,
            0,
            "torch.optim.AdamW: two moments in the parameter's dtype",
            classes=("AdamW", "Adam", "NAdam", "RAdam"),
        ),
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
            classes=("AdamW8bit",),
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
            classes=("AdamMini",),
        ),
        Optimizer(
            "adamw-bf16",
            0,
            4,
            "fsdpc.optim.AdamWBF16: two bfloat16 moments, rounded stochastically",
            temporaries=0,
            classes=("AdamWBF16",),
        ),
        Optimizer(
            "muon",
            1,
            0,
            "fsdpc.optim.Muon: one momentum for matrices, two moments for the rest",
            temporaries=0,
            classes=("Muon",),
        ),
        Optimizer(
            "soap",
            2,
            0,
            "fsdpc.optim.SOAP: two moments, averages and bases of both sides of matrices",
            temporaries=0,
            classes=("SOAP",),
        ),
        Optimizer(
            "shampoo",
            2,
            0,
            "fsdpc.optim.Shampoo: two moments, averages and roots of both sides of matrices",
            temporaries=0,
            classes=("Shampoo",),
        ),
        Optimizer(
            "adafactor",
            0,
            0,
            "Adafactor: an average for each row and each column of a matrix, in its dtype",
            temporaries=0,
            classes=("Adafactor",),
        ),
        Optimizer("lion", 1, 0, "Lion: one moment in the parameter's dtype", classes=("Lion",)),
        Optimizer("sgd", 0, 0, "torch.optim.SGD without momentum", temporaries=0, classes=("SGD",)),
        Optimizer("momentum", 1, 0, "torch.optim.SGD with momentum"),
    )
}


BY_CLASS = {name: o.name for o in OPTIMIZERS.values() for name in o.classes}


def optimizer(name: str) -> Optimizer:
    """The optimizer of this name. ``ValueError`` lists the known names."""
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: use one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
