"""Hosts made of network namespaces of this machine, joined by a bridge: for benchmarks and tests.

Each host has an interface ``eth0`` of its own, whose rate in both directions is shaped with tc. A
host's link may delay and lose what the host sends (slow_link.py). This module needs root and the
programs ip and tc; ``missing`` returns what is missing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import slow_link

CLONE_NEWNET = 0x40000000
_made = 0


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


@cache
def missing() -> str:
    """Return why hosts cannot be made on this machine, or an empty text if they can."""
    for program in ("ip", "tc"):
        if not shutil.which(program):
            return f"the program {program} (Debian: iproute2) is not installed"
    try:
        with hosts(1, rate="1gbit"):
            return ""
    except (subprocess.SubprocessError, OSError) as error:
        text = getattr(error, "stderr", None) or str(error)
        return f"network namespaces cannot be made here (root is needed): {text.strip()}"


class Hosts:
    """``count`` hosts with the addresses 10.77.0.1, 10.77.0.2 and so on.

    ``rate`` is each host's link rate in tc's words ("1gbit"), or None for no limit.
    ``delay`` (in seconds) and ``loss`` (a fraction) apply to the frames that each host sends.
    """

    def __init__(
        self, count: int, rate: str | None = None, delay: float = 0.0, loss: float = 0.0
    ) -> None:
        global _made
        _made += 1
        self.prefix = f"f{os.getpid()}x{_made}"[-9:]
        self.count = count
        self.rate = rate
        self.delay = delay
        self.loss = loss
        self.links: list[tuple[int, int]] = []  # descriptors of each slow link's two devices
        self.carrier: subprocess.Popen | None = None
        self.addresses = [f"10.77.0.{1 + host}" for host in range(count)]
        self.names = [f"{self.prefix}n{host}" for host in range(count)]

    def _port(self, host: int) -> str:
        return port_of(self.names[host])

    def make(self) -> None:
        """Make the hosts. If this raises ``CalledProcessError``, with the reason in ``stderr``,
        call ``remove``.
        """
        _run("ip", "link", "add", f"{self.prefix}b", "type", "bridge")
        _run("ip", "link", "set", f"{self.prefix}b", "up")
        for host, name in enumerate(self.names):
            port = self._port(host)
            _run("ip", "netns", "add", name)
            self._link(port, name)
            _run("ip", "link", "set", port, "master", f"{self.prefix}b", "up")
            _run("ip", "-n", name, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            if self.rate:
                shape = ("root", "tbf", "rate", self.rate, "burst", "1mb", "latency", "50ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape)
                _run("tc", "qdisc", "add", "dev", port, *shape)
        if self.links:
            self.carrier = slow_link.start(self.links, self.delay, self.loss)

    def _link(self, port: str, name: str) -> None:
        """Make both ends of a host's link."""
        if not self.delay and not self.loss:
            peer = ("peer", "name", "eth0", "netns", name)
            _run("ip", "link", "add", port, "type", "veth", *peer)
            return
        inside = f"{port}i"
        self.links.append(
            (slow_link.tap(inside, not self.loss), slow_link.tap(port, not self.loss))
        )
        _run("ip", "link", "set", inside, "netns", name, "name", "eth0")

    def remove(self) -> None:
        """Remove the hosts; processes that still run keep their namespace until they end."""
        if self.carrier:
            self.carrier.kill()
            self.carrier.wait()
        for end in (end for link in self.links for end in link):
            os.close(end)
        for host, name in enumerate(self.names):
            subprocess.run(["ip", "link", "del", self._port(host)], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.prefix}b"], capture_output=True)

    def cut(self, host: int) -> None:
        """Cut the host's link: nothing arrives that is sent by the host or to the host."""
        _run("ip", "link", "set", self._port(host), "down")

    def heal(self, host: int) -> None:
        """Make the host's link work again."""
        _run("ip", "link", "set", self._port(host), "up")

    def sent(self, host: int) -> int:
        """Return the bytes that the host has sent so far."""
        path = f"/sys/class/net/{self._port(host)}/statistics/rx_bytes"
        with open(path, encoding="ascii") as file:
            return int(file.read())

    def environment(self, ranks: Sequence[int], port: int = 29531) -> list[dict[str, str]]:
        """Return each rank's variables, as torchrun sets them; ``ranks`` has the ranks per host."""
        made = []
        for host, count in enumerate(ranks):
            for local in range(count):
                made.append(
                    {
                        "RANK": str(len(made)),
                        "WORLD_SIZE": str(sum(ranks)),
                        "LOCAL_RANK": str(local),
                        "LOCAL_WORLD_SIZE": str(count),
                        "MASTER_ADDR": self.addresses[0],
                        "MASTER_PORT": str(port),
                        "GLOO_SOCKET_IFNAME": "eth0",
                        "FSDPC_TEST_HOST": self.names[host],
                    }
                )
        return made


@contextmanager
def hosts(
    count: int, rate: str | None = None, delay: float = 0.0, loss: float = 0.0
) -> Iterator[Hosts]:
    """Make hosts, and remove them at the end of the context."""
    made = Hosts(count, rate, delay, loss)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def bytes_per_second(rate: str) -> float:
    """Return the bytes per second of a rate in tc's words, such as "1gbit"."""
    number = float(rate.removesuffix("gbit").removesuffix("mbit"))
    return number * (1e9 if rate.endswith("gbit") else 1e6) / 8


def port_of(name: str) -> str:
    """Return the interface at the bridge's end of a host's link. Setting this interface down cuts
    the link.
    """
    prefix, _, number = name.rpartition("n")
    return f"{prefix}p{number}"


def enter(name: str) -> None:
    """Move this thread, and all threads that it starts from now on, to the host ``name``."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns to the host {name}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    print(missing() or "hosts can be made here")
    sys.exit(bool(missing()))
