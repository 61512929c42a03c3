"""The link between two hosts. ``fsdpc doctor`` measures it if torchrun runs on several hosts:

    torchrun --nnodes 2 --nproc-per-node 1 ... -m fsdpc doctor

The measurement gives the latency of a small message, and the rate of both directions at once. The
messages for the rate have the size in which units are sent (csrc/comm/comm_flight_moves.c).
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
    """The link from rank 0 to rank ``other``. ``rate``: bytes per second in each direction, while
    both directions are in use. ``gather``: the fraction of ``rate`` that torch's ``all_gather``
    reaches. ``latency``: seconds in one direction.
    """

    other: int
    host: str
    rate: float
    gather: float
    latency: float


def launched() -> bool:
    """Return whether torchrun, or a similar launcher, has started this and other processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def measure() -> tuple[Link | None, str]:
    """Return the link to the first rank of another host (None: all ranks are on one host), and a
    text on how all ranks exchange units. Collective over the ranks that torchrun started.
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
    for _ in range(1 + ROUNDS):  # the first call connects, and does not count
        dist.barrier(group=pair)
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return min(found[1:])


def _latency(pair: dist.ProcessGroup, peer: int) -> float:
    """Return the seconds of a message in one direction: half of the median round trip."""
    found, word = [], torch.zeros(1, device="cpu")
    for _ in range(PINGS):
        begun = time.perf_counter()
        for send in (pair.rank() == 0, pair.rank() != 0):
            (pair.send if send else pair.recv)([word], peer, 2).wait()
        found.append(time.perf_counter() - begun)
    return statistics.median(found) / 2
