"""Random values of DTensors on CPUs.

torch draws the values on each rank from the rank's own generator. If all ranks have the same seed,
as usual, all shards of a parameter get the same values. For accelerators torch has a tracker that
prevents this; ``Draws`` is such a tracker for meshes of type "cpu".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdpc._torch import RNG_TRACKER, dtensor_random


class Draws:
    """A tracker of random numbers, which torch's DTensor dispatch uses. The dispatch runs each
    random operation on a DTensor inside ``_distribute_region``.
    """

    distribute_region_enabled = True

    @contextmanager
    def _distribute_region(
        self, spec: Any, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        """Seed the operation from two numbers: a number that the generator draws, and this rank's
        index among the shards of ``spec``. Replicas then get equal values, and different shards get
        different values. The generator advances equally on all ranks. Local.
        """
        default = torch.default_generator
        source = default if generator is None else generator
        number = int(torch.randint(2**48, (), generator=source))
        before = default.get_state()
        default.manual_seed(number * 2**15 + _shard_index(spec))
        try:
            yield
        finally:
            default.set_state(before)


def _shard_index(spec: Any) -> int:
    """Return this rank's index among the shards of a DTensor."""
    index = 0
    for dim, placement in enumerate(spec.placements):
        if not placement.is_replicate():
            index = index * spec.mesh.size(dim) + spec.mesh.get_local_rank(dim)
    return index


def install() -> None:
    """Use ``Draws`` in this process unless torch has a tracker already or there is an accelerator.
    Local.
    """
    if torch.accelerator.current_accelerator(check_available=True) is None and not _tracker():
        setattr(dtensor_random, RNG_TRACKER, Draws())


def _tracker() -> Any:
    return getattr(dtensor_random, RNG_TRACKER)
