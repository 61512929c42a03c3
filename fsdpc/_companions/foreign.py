"""Optimizers of other libraries whose update rules need whole parameters, and their replacements.

Such optimizers are recognized by their class names. The optimizers of ``fsdpc.optim`` that replace
them give the unsharded run's results.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.distributed.tensor import DTensor

from fsdpc._engine.companions import register
from fsdpc._engine.writeback import owner_of

# Optimizer classes whose update rule needs whole parameters. ``_fsdp1/elementwise.py`` tries a few
# steps on parts of a parameter, but this trial does not detect these classes.
KNOWN = frozenset(
    "AdaGO AdaMuon AdamMini Adam_mini DAdaptAdaGrad DAdaptAdan DAdaptLion DAdaptSGD Dion "
    "DistributedMuon DistributedShampoo FusedLAMB FusedNovoGrad Kron LARS LoRARite Muon MuonClip "
    "NorMuon Prodigy PytorchLARS SWATS ScalableShampoo SpectralSphere".split()
)
_OURS = ("Muon", "Adafactor", "SOAP", "Shampoo", "AdamMini")
_RIGHT_ON_DTENSORS = ("AdamMini",)
# Prefixes of the names of classes that compute sums over a parameter's elements. They sum over one
# rank's rows only, unless the parameter group has the option ``fsdp_in_use``.
_SUMS = ("A2Grad", "DAdapt", "Prodigy")
_FOR_SHARDS = ("fsdpc", "dion")  # packages whose optimizers support shards
_named: set[type] = set()


def known(kind: type) -> bool:
    """Whether the update rule of an optimizer class is known to need whole parameters."""
    return kind.__name__ in KNOWN


def instead(kind: type) -> str | None:
    """Return the class name of ``fsdpc.optim`` that occurs in the name of ``kind``.

    None if there is no such class. Local.
    """
    name = kind.__name__.lower().replace("_", "")
    return next((ours for ours in _OURS if ours.lower() in name), None)


def name_on_dtensors(optimizer: Any) -> None:
    """Warn, once per class, if an optimizer's update rule needs more of a DTensor than one rank's
    rows.

    Local.
    """
    kind = type(optimizer)
    ours = "AdamW" if kind.__name__.startswith(_SUMS) else instead(kind)
    if ours is None or ours in _RIGHT_ON_DTENSORS or kind in _named:
        return
    if kind.__module__.split(".")[0] in _FOR_SHARDS:
        return
    groups = [group for group in optimizer.param_groups if not group.get("fsdp_in_use")]
    params = (param for group in groups for param in group["params"])
    if not any(type(param) is DTensor and owner_of(param) is not None for param in params):
        return
    _named.add(kind)
    if ours == "Muon":
        what = (
            "multiplies matrices that are sharded: results depend on the number of ranks, which "
            "sum the products in another order than one process, and each product gathers"
        )
    elif ours == "AdamW":
        what = (
            "finds step sizes by sums over whole parameters, and reads those of a rank's rows: "
            "results depend on the number of ranks"
        )
    else:
        what = "needs whole matrices and sees DTensors: torch's operators raise on some of them"
    rule = "rule and the states of torch's class" if ours in ("Muon", "Adafactor") else "rule"
    rule = "rule with a learning rate that is given" if ours == "AdamW" else rule
    warnings.warn(
        f"{kind.__name__} {what}. fsdpc.optim.{ours} has the {rule} and the unsharded run's "
        "results on any number of ranks",
        stacklevel=2,
    )


register("known", known)
register("instead", instead)
register("name on dtensors", name_on_dtensors)
