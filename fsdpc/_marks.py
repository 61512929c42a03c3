"""Marks that a user puts on modules and the engine reads."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)

DATA_DEPENDENT = "_fsdpc_data_dependent"


def mark_data_dependent(module: M) -> M:
    """Declare that which units below ``module`` run depends on the data, rank by rank.

    Mark the container of a mixture of experts whose router picks experts from each rank's own
    batch. Where ranks cannot see each other's requests cheaply, the units below a marked module are
    gathered on every rank in a fixed order; over shared memory the mark changes nothing, since
    there any rank may ask for any unit.

    Local; call it on every rank, before the first forward. Returns ``module``.
    Raises ``TypeError`` when ``module`` is not an ``nn.Module``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"mark_data_dependent expects an nn.Module but got {type(module).__name__}")
    setattr(module, DATA_DEPENDENT, True)
    return module
