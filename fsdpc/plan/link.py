"""The link between two hosts, measured by ``fsdpc doctor`` when torchrun starts it on several:

    torchrun --nnodes 2 --nproc-per-node 1 ... -m fsdpc doctor

Doctor measures the latency of a small message, and the rate of both directions at once, in the
chunks in which units travel (csrc/comm/comm_flight.c).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdpc._comm.texts import ALL_GATHER

BYTES, CHUNK = 64 << 20, 1 << 20
PINGS, ROUNDS = 30, 3
SECONDS = 120


@dataclass(frozen=True)
class Link:
    """From rank 0 to rank ``other``. ``rate``: bytes per second in each direction, both at once;
    ``gather``: the part of that which torch's ``all_gather`` reaches; ``latency``: seconds one way.
    """

    other: int
    host: str
    rate: float
    gather: float
    latency: float


def launched() -> bool:
    """Whether torchrun, or the like, has started this process among others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def measure() -> tuple[Link | None, str]:
    """The link to the first rank of another host (None: all ranks are on one), and how units of all
    ranks travel. Collective over the ranks that torchrun started.
    """
    from fsdpc._comm.bootstrap import comm_for_group, this_host
    from fsdpc._comm.objects import exchange

    own_group = not dist.is_initialized()
    if own_group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    try:
        comm = comm_for_group(dist.group.WORLD)
        hosts = exchange(comm, this_host(), "the names of hosts")
        other = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
        found = None
        if other is not None:
            pair = dist.new_group([0, other], timeout=timedelta(seconds=SECONDS))
            if dist.get_rank() in (0, other):
                found = _between(pair, other, hosts[other].split()[0])
        dist.barrier()
        return found, _travels(comm, len(set(hosts)))
    finally:
        if own_group:
            dist.destroy_process_group()


def _travels(comm: object, hosts: int) -> str:
    kind, ranks = comm.kind, comm.world  # type: ignore[attr-defined]
    if kind == "shm":
        return f"{ranks} ranks of one host share memory"
    if kind != "c10d":
        return f"{ranks} ranks, kind {kind}"
    if not comm.flies:  # type: ignore[attr-defined]
        return f"{ranks} ranks on {hosts} hosts: torch's blocking collectives"
    inside = ", shared memory inside each host" if hosts < ranks else ""
    return f"{ranks} ranks on {hosts} hosts: sends and receives in the background{inside}"


def _between(pair: dist.ProcessGroup, other: int, host: str) -> Link:
    peer = 1 - pair.rank()
    out, into = (torch.zeros(BYTES, dtype=torch.uint8, device="cpu") for _ in range(2))
    whole = torch.zeros(2 * BYTES, dtype=torch.uint8, device="cpu")

    def both_ways() -> None:
        works = []
        for a, b in zip(into.split(CHUNK), out.split(CHUNK), strict=True):
            works += [pair.recv([a], peer, 1), pair.send([b], peer, 1)]
        for work in works:
            work.wait()

    def gather() -> None:
        getattr(dist, ALL_GATHER)(whole, out, group=pair)

    rate, plain = (BYTES / _best(pair, call) for call in (both_ways, gather))
    return Link(other, host, rate, plain / rate, _latency(pair, peer))


def _best(pair: dist.ProcessGroup, call: Callable[[], None]) -> float:
    found = []
    for _ in range(1 + ROUNDS):  # the first call connects
        dist.barrier(group=pair)
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return min(found[1:])


def _latency(pair: dist.ProcessGroup, peer: int) -> float:
    """Seconds one way: half of the time there and back."""
    found, word = [], torch.zeros(1, device="cpu")
    for _ in range(PINGS):
        begun = time.perf_counter()
        for send in (pair.rank() == 0, pair.rank() != 0):
            (pair.send if send else pair.recv)([word], peer, 2).wait()
        found.append(time.perf_counter() - begun)
    return statistics.median(found) / 2
