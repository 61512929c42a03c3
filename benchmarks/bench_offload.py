"""Time optimizer steps with states on a disk, beside steps in memory and plain reads and writes.

python benchmarks/bench_offload.py                        # print
python benchmarks/bench_offload.py --json                 # and write results/offload.json
python benchmarks/bench_offload.py --folder /mnt/nvme --millions 200

One process with one thread runs AdamW in float32 on parameters of --tensor elements. "raw" reads
and writes the file as a step does, in the same chunks, buffers and order, but computes nothing.
"raw by threads" shows what another program would get from the disk: threads of this script read and
write as many bytes with preadv and pwritev past the page cache. Cases take turns in each round; a
share is a quotient within one round, and the table shows medians. Seconds are wall-clock time, so
no other process should use the machine.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common
import torch
from torch import nn

from fsdpc import _C, optim

REQUEST = 1 << 20
DEPTH = 16


def parameters(count: int, numel: int) -> list[nn.Parameter]:
    """Return parameters that have gradients."""
    made = [nn.Parameter(torch.randn(numel)) for _ in range(count)]
    for param in made:
        param.grad = torch.randn(numel)
    return made


class Raw:
    """``DEPTH`` threads that read and write a temporary file in requests of ``REQUEST`` bytes."""

    def __init__(self, folder: str, nbytes: int) -> None:
        self.nbytes = nbytes // REQUEST * REQUEST
        self.fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, self.nbytes)
        self.memory = [mmap.mmap(-1, REQUEST) for _ in range(DEPTH)]
        self.threads = ThreadPoolExecutor(DEPTH)

    def _both(self, which: int) -> None:
        for at in range(which * REQUEST, self.nbytes, DEPTH * REQUEST):
            os.preadv(self.fd, [self.memory[which]], at)
            os.pwritev(self.fd, [self.memory[which]], at)

    def run(self) -> None:
        """Read and write every byte once."""
        list(self.threads.map(self._both, range(DEPTH)))


def nothing(chunk: Any, buffer: Any) -> None:
    """Do nothing, in place of a step on one chunk."""


def timed(call: Callable[[], Any]) -> Callable[[], float]:
    def measure() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--millions", type=int, default=85, help="parameters")
    parser.add_argument("--tensor", type=int, default=2_359_296, help="elements of one parameter")
    parser.add_argument("--buffer-mib", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run = common.describe_run(kept=options.json)
    torch.set_num_threads(1)
    count = max(1, options.millions * 1_000_000 // options.tensor)
    buffers = options.buffer_mib << 20
    disks = {
        "io_uring": optim.Disk(options.folder, buffers, io="auto"),
        "threads": optim.Disk(options.folder, buffers, io="threads"),
        "checksums": optim.Disk(options.folder, buffers, checksum=True),
    }
    params = parameters(count, options.tensor)
    made = {name: optim.AdamW(params, offload=disk) for name, disk in disks.items()}
    made["memory"] = optim.AdamW(params)
    for optimizer in made.values():
        optimizer.step()  # if the states are in a file, this writes every byte of the file
    store = made["io_uring"]._store
    assert store is not None
    raw = Raw(options.folder, store.end)
    raw.run()
    cases = {name: timed(optimizer.step) for name, optimizer in made.items()}
    cases["raw"] = timed(lambda: store.passes(params).run(nothing))
    cases["raw by threads"] = timed(raw.run)
    found = common.interleave(cases, options.rounds)
    entries = {}
    for name, seconds in found.items():
        entries[name] = {
            "seconds": common.spread(seconds),
            "ns_per_parameter": common.spread(
                [1e9 * s / (count * options.tensor) for s in seconds]
            ),
        }
        if name != "memory":
            entries[name]["gb_per_s"] = common.spread([2 * store.end / s / 1e9 for s in seconds])
        for rival in ("raw", "raw by threads"):
            shares = [r / s for r, s in zip(found[rival], seconds, strict=True)]
            entries[name][f"of_{rival.replace(' ', '_')}"] = common.spread(shares)
    info = _C.disk_info(store.disk)
    print(
        f"{count} x {options.tensor} parameters, {store.end / 1e6:.0f} MB of states, "
        f"{buffers / 1e6:.0f} MB of buffers, {info['io']}, direct {info['direct']}"
    )
    columns = ["seconds", "ns_per_parameter", "gb_per_s", "of_raw", "of_raw_by_threads"]
    rows = [
        [name, *(f"{entry[c]['median']:.3f}" if c in entry else "" for c in columns)]
        for name, entry in entries.items()
    ]
    common.print_table(["case", *columns], rows)
    if options.json:
        sizes = {"parameters": count * options.tensor, "state_bytes": store.end, "buffers": buffers}
        common.write_json(
            "offload.json",
            {
                "run": run,
                "io": info["io"],
                "direct": info["direct"],
                "sizes": sizes,
                "cases": entries,
            },
        )


if __name__ == "__main__":
    main()
