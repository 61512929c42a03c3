"""Ranks on several hosts, which are network namespaces (benchmarks/namespaces.py).

`pytest --hosts N` spreads the ranks of a test over N hosts, unless the test itself chooses hosts.
The ranks are spread as evenly as possible. If there is a remainder, each of the last hosts gets one
rank more: of three ranks on two hosts, the first host gets one and the second host gets two.
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

PLACES = "FSDPC_TEST_PLACES"  # the environment variable with each rank's host, in rank order
COUNTED = "counted-as-"
PORT = 29531
missing = namespaces.missing
_home = -1  # in a rank: file descriptor of the network namespace in which the rank was started
_kept = ExitStack()  # holds the hosts that made() has made; remove() closes it


def spread(world: int, hosts: int) -> list[int]:
    """Return the number of ranks on each host."""
    hosts = min(world, hosts)
    return [world // hosts + (host >= hosts - world % hosts) for host in range(hosts)]


@cache
def made(count: int, delay: float = 0.0, loss: float = 0.0) -> namespaces.Hosts:
    """Make hosts that all tests of this process share."""
    return _kept.enter_context(namespaces.hosts(count, delay=delay, loss=loss))


def remove() -> None:
    made.cache_clear()
    _kept.close()


def environment(hosts: namespaces.Hosts, ranks: Sequence[int]) -> dict[str, str]:
    """Return the variables that ranks need to find their host; host i has ``ranks[i]`` ranks."""
    places = [name for name, count in zip(hosts.names, ranks, strict=False) for _ in range(count)]
    return {PLACES: " ".join(places), "MASTER_ADDR": hosts.addresses[0]}


def environment_for(
    hosts: int, world: int, delay: float = 0.0, loss: float = 0.0
) -> dict[str, str]:
    """Return the variables for ``world`` ranks that are spread over ``hosts`` shared hosts.

    ``delay`` and ``loss`` are those of ``namespaces.Hosts``. Where no hosts can be made, the ranks
    only count as ranks of different hosts.
    """
    ranks = spread(world, hosts)
    if missing():
        return counted_as("".join(chr(97 + host) * count for host, count in enumerate(ranks)))
    return environment(made(hosts, delay, loss), ranks)


def counted_as(hosts: str) -> dict[str, str]:
    """Return the variables with which ranks on this machine count as ranks of different hosts.

    ``"abb"`` puts rank 0 on host "a", and ranks 1 and 2 on host "b".
    """
    return {PLACES: " ".join(f"{COUNTED}{host}" for host in hosts)}


def store_of(rank: int, world: int) -> dist.Store | None:
    """Move this rank into the network namespace of its host, and return the store for the group.

    Returns None if the ranks only count as ranks of different hosts. Called in a rank.
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
    """Set the network link of the host that has rank `rank` to "down" or "up".

    Called in a rank.
    """
    port = namespaces.port_of(os.environ[PLACES].split()[rank])
    command = [f"--net=/proc/self/fd/{_home}", "ip", "link", "set", port, state]
    subprocess.run(["nsenter", *command], pass_fds=[_home], check=True, timeout=30)
