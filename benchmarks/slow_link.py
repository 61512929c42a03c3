"""Slow links between the hosts of namespaces.py, for kernels that cannot delay or drop frames.

A link is a pair of TAP devices, one on the host and one at the bridge. A process that runs this
file carries frames between the two devices. Without losses, the process carries whole TCP segments
of up to 64 KB, as a network card would take them, because this is fast. With losses, the process
carries single frames, so that each frame is lost or arrives independently of the others.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
CHECKSUMS, SEGMENTS = 1, 2
LARGEST = 10 + 18 + (1 << 16)


def tap(name: str, whole_segments: bool) -> int:
    """Make a TAP device and return its descriptor. Closing the descriptor removes the device."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH14x", name.encode(), flags))
    fcntl.ioctl(descriptor, TUNSETOFFLOAD, CHECKSUMS | SEGMENTS if whole_segments else 0)
    return descriptor


def start(pairs: Sequence[tuple[int, int]], delay: float, loss: float) -> subprocess.Popen:
    """Start a process that carries frames between the descriptors of each (host, bridge) pair.

    ``delay`` (in seconds) and ``loss`` (a fraction of the frames) apply to what the host sends.
    """
    ends = [end for pair in pairs for end in pair]
    command = [sys.executable, __file__, str(delay), str(loss), *map(str, ends)]
    return subprocess.Popen(command, pass_fds=ends)


def carry(source: int, target: int, delay: float, loss: float) -> None:
    """Start threads that carry frames from ``source`` to ``target``."""
    late: deque[tuple[float, bytes]] = deque()
    more = threading.Condition()
    chance = random.Random(source)

    def read() -> None:
        while True:
            frame = os.read(source, LARGEST)
            if loss and chance.random() < loss:
                continue
            if not delay:
                send(frame)
                continue
            with more:
                late.append((time.monotonic() + delay, frame))
                more.notify()

    def send(frame: bytes) -> None:
        try:
            os.write(target, frame)
        except OSError:
            pass  # the device is down because the link was cut

    def deliver() -> None:
        while True:
            with more:
                while not late:
                    more.wait()
                due, frame = late.popleft()
            time.sleep(max(due - time.monotonic(), 0))
            send(frame)

    for job in (read, deliver):
        threading.Thread(target=job, daemon=True).start()


def main() -> None:
    """Carry frames until the process is killed or its parent ends."""
    import common

    common.end_with_parent()
    delay, loss, *ends = sys.argv[1:]
    for inside, outside in zip(map(int, ends[::2]), map(int, ends[1::2]), strict=True):
        carry(inside, outside, float(delay), float(loss))
        carry(outside, inside, 0.0, 0.0)
    threading.Event().wait()


if __name__ == "__main__":
    main()
