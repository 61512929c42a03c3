"""Ranks on hosts of their own: network namespaces (benchmarks/namespaces.py), for `pytest --hosts`
and for tests that name their hosts.

The ranks of a test are spread as evenly as they can be, the last hosts get one more: three ranks on
two hosts are 1 + 2.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import namespaces

PLACES = "FSDPC_TEST_PLACES"  # a variable with the name of each rank's host, in rank order
COUNTED = "counted-as-"
PORT = 29531
missing = namespaces.missing
_home = -1  # in a rank: the network namespace that the rank came from
_kept = ExitStack()  # hosts are made once, and removed when pytest ends


def spread(world: int, hosts: int) -> list[int]:
    """How many of the ranks each host has."""
    hosts = min(world, hosts)
    return [world // hosts + (host >= hosts - world % hosts) for host in range(hosts)]


@cache
def made(count: int, delay: float = 0.0, loss: float = 0.0) -> namespaces.Hosts:
    """Hosts that all tests of this process share."""
    return _kept.enter_context(namespaces.hosts(count, delay=delay, loss=loss))


def remove() -> None:
    made.cache_clear()
    _kept.close()


def environment(hosts: namespaces.Hosts, ranks: Sequence[int]) -> dict[str, str]:
    """What ranks need to find their host, as many on each as ``ranks`` says."""
    places = [name for name, count in zip(hosts.names, ranks, strict=False) for _ in range(count)]
    return {PLACES: " ".join(places), "MASTER_ADDR": hosts.addresses[0]}


def environment_for(
    hosts: int, world: int, delay: float = 0.0, loss: float = 0.0
) -> dict[str, str]:
    """As ``environment`` for shared hosts, over which the ranks are spread; where no hosts can be
    made, ranks count as being on some. ``delay`` and ``loss`` as for ``namespaces.Hosts``.
    """
    ranks = spread(world, hosts)
    if missing():
        return counted_as("".join(chr(97 + host) * count for host, count in enumerate(ranks)))
    return environment(made(hosts, delay, loss), ranks)


def counted_as(hosts: str) -> dict[str, str]:
    """What ranks need to count as ranks of different hosts without being there: ``"abb"`` puts rank
    0 on one host, and ranks 1 and 2 on another one.
    """
    return {PLACES: " ".join(f"{COUNTED}{host}" for host in hosts)}


def store_of(rank: int, world: int) -> dist.Store | None:
    """In a rank: enters its host, and returns the store of its group. None: the ranks only count
    as ranks of other hosts.
    """
    global _home
    place = os.environ[PLACES].split()[rank]
    if place.startswith(COUNTED):
        os.environ["FSDPC_HOST"] = place
        return None
    _home = os.open("/proc/self/ns/net", os.O_RDONLY)
    namespaces.enter(place)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    address, wait = os.environ["MASTER_ADDR"], datetime.timedelta(seconds=60)
    return dist.TCPStore(address, PORT, world, is_master=rank == 0, timeout=wait)


def set_link(rank: int, state: str) -> None:
    """In a rank: the link of that rank's host is now "down" or "up"."""
    port = namespaces.port_of(os.environ[PLACES].split()[rank])
    command = [f"--net=/proc/self/fd/{_home}", "ip", "link", "set", port, state]
    subprocess.run(["nsenter", *command], pass_fds=[_home], check=True, timeout=30)
