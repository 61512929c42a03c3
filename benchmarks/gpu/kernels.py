"""Speed of the CUDA kernels as a share of the speed at which the same GPU copies memory.

    python -m gpu.kernels                     # 1, 8, 64, 256 and 1024 MiB
    python -m gpu.kernels --only cast --json
    python -m gpu.kernels --dry --tiny        # the same lines without a GPU

A size is that of a float32 buffer; buffers of other types have the same number of elements. Every
byte counts once when it is read and once when it is written, so that a copy of 1 MiB moves 2 MiB. A
share is the kernel's bytes per second divided by those of a device-to-device copy in the same
round. The copy moves as many bytes; it is torch's copy_ between tensors of one type, which calls
the driver's copy. A time is that of many calls in a row between two events, divided by the number
of calls, so the figures of small sizes include the time that the host needs to queue a call. Calls
rotate among sets of buffers (`MOST_SETS` for small sizes, fewer for larger sizes), so that the
caches do not hold the buffers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import torch

from fsdpc import _probe
from gpu import machine

MIB = 1 << 20
ROTATE_MIB = 512  # several times the largest cache
MOST_SETS = 64
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
GPU = "cuda:0"
PACKED_TENSORS = 12  # as many as a transformer's block has
Call = Callable[[], object]
Memory = Callable[[str, int], torch.Tensor]  # (dtype, number) -> a buffer of one set of buffers


@dataclass(frozen=True)
class Kernel:
    """The bytes moved per element, and a function that makes a call on a set of buffers."""

    bytes_per_item: float
    make: Callable[[Memory], Call]


def cast(src: str, dst: str, scale: float = 1.0) -> Kernel:
    return Kernel(
        ITEM[src] + ITEM[dst],
        lambda memory: _bind(
            _probe.kernel_cast, memory(dst, 9), dst, memory(src, 0), src, scale, GPU
        ),
    )


def scale_by(dtype: str) -> Kernel:
    """Return the kernel x *= factor, where the factor is a number on the device."""

    def make(memory: Memory) -> Call:
        x = memory(dtype, 0)
        factor = torch.full((1,), -1.0, dtype=torch.float64, device=x.device)
        return _bind(_probe.kernel_scale_by, x, dtype, factor, GPU)

    return Kernel(2 * ITEM[dtype], make)


def reduce(count: int, src: str, add: bool) -> Kernel:
    """Return the kernel acc = (src[0] + ...) * 0.5, or acc += (src[0] + ...) * 0.5 with `add`."""

    def make(memory: Memory) -> Call:
        acc, sources = memory("float32", 9), [memory(src, s) for s in range(count)]
        return _bind(_probe.kernel_reduce, acc, "float32", sources, src, 0.5, add, GPU)

    return Kernel(count * ITEM[src] + (8 if add else 4), make)


def pack(src: str, dst: str, transposed: bool = False) -> Kernel:
    """Return the kernel that packs a unit's gradients into one buffer by one launch. With
    `transposed`, one of the gradients is transposed.
    """

    def make(memory: Memory) -> Call:
        flat, out = memory(src, 0), memory(dst, 9)
        tensors, targets = split(flat, dst, transposed)
        plan = _probe.kernel_pack_plan(targets, out.numel() * ITEM[dst], GPU)
        return _bind(_probe.kernel_pack, plan, out, tensors, 0.5)

    return Kernel(ITEM[src] + ITEM[dst], make)


def split(
    flat: torch.Tensor, dst: str, transposed: bool
) -> tuple[list[torch.Tensor], list[tuple[int, int, str]]]:
    """Cut a buffer into tensors like those of a block: four large matrices, and small tensors."""
    unit = flat.numel() // 64
    lengths = [20 * unit, 16 * unit, 16 * unit, 8 * unit]
    small = (flat.numel() - sum(lengths)) // (PACKED_TENSORS - len(lengths))
    lengths += [small] * (PACKED_TENSORS - len(lengths))
    tensors, targets, at = [], [], 0
    for length in lengths:
        tensor = flat[at : at + length]
        if transposed and length == lengths[0]:
            rows = max(d for d in (1, 16, 64, 256, 1024, 4096) if length % d == 0)
            tensor = tensor.view(rows, -1).t()
        tensors.append(tensor)
        targets.append((length, at * ITEM[dst], dst))
        at += length
    return tensors, targets


def norm2(dtype: str) -> Kernel:
    """Return the norm kernel. At small sizes most of the time is the host's wait for the norm."""
    return Kernel(
        ITEM[dtype], lambda memory: _bind(_probe.kernel_norm2, memory(dtype, 0), dtype, GPU)
    )


def _bind(function: Callable[..., object], *arguments: object) -> Call:
    return lambda: function(*arguments)


KERNELS: dict[str, Kernel] = {
    "copy f32": cast("float32", "float32"),
    "cast f32 -> bf16": cast("float32", "bfloat16"),
    "cast bf16 -> f32": cast("bfloat16", "float32"),
    "cast f32 -> f16": cast("float32", "float16"),
    "scale f32": scale_by("float32"),
    "scale bf16": scale_by("bfloat16"),
    "pack 12 x bf16 -> f32": pack("bfloat16", "float32"),
    "pack 12 x bf16 -> bf16": pack("bfloat16", "bfloat16"),
    "pack, one transposed": pack("bfloat16", "bfloat16", transposed=True),
    "reduce f32": reduce(1, "float32", add=False),
    "reduce bf16, add": reduce(1, "bfloat16", add=True),
    "reduce 4 x bf16": reduce(4, "bfloat16", add=False),
    "norm f32": norm2("float32"),
    "norm bf16": norm2("bfloat16"),
}


class Buffers:
    """Several sets of equal buffers, which successive calls use in turn."""

    def __init__(self, device: torch.device, n: int, sets: int) -> None:
        self.device, self.n, self.sets = device, n, sets
        self.tensors: dict[tuple[int, str, int], torch.Tensor] = {}

    def of(self, which: int) -> Memory:
        """Return a function that gives the buffers of one set; each is made on its first use."""

        def memory(dtype: str, number: int) -> torch.Tensor:
            key = (which, dtype, number)
            if key not in self.tensors:
                tensor = torch.empty(self.n, dtype=getattr(torch, dtype), device=self.device)
                self.tensors[key] = tensor.uniform_(-2, 2)
            return self.tensors[key]

        return memory

    def calls(self, kernel: Kernel) -> list[Call]:
        return [kernel.make(self.of(which)) for which in range(self.sets)]

    def copies(self, bytes_moved: float) -> list[Call]:
        """Return copies on the device that move ``bytes_moved``, or less if buffers are smaller."""
        count = min(int(bytes_moved / 8), self.n)
        pairs = [(self.of(s)("float32", 9), self.of(s)("float32", 0)) for s in range(self.sets)]
        return [_bind(to[:count].copy_, source[:count]) for to, source in pairs]


def timed(device: machine.Device, calls: list[Call], seconds: float) -> Callable[[], float]:
    """Warm up the calls. Return a function that runs them and returns the seconds per call."""

    def once(repeats: int) -> float:
        begin = device.mark()
        for k in range(repeats):
            calls[k % len(calls)]()
        return device.milliseconds(begin, device.mark()) / 1e3 / repeats

    once(len(calls))
    repeats = max(len(calls), min(int(seconds / max(once(len(calls)), 1e-7)), 2000))
    return lambda: once(repeats)


def measure_size(
    device: machine.Device, mib: float, names: list[str], rounds: int, seconds: float
) -> dict[str, Any]:
    """Measure one size. A share divides a kernel's speed by the copy's speed in the same round; its
    median and quartiles are over rounds.
    """
    n = int(mib * MIB) // 4
    sets = max(1, min(MOST_SETS, int((2 if device.dry else ROTATE_MIB) / (2 * mib))))
    buffers = Buffers(device.device, n, sets)
    found, copy = {}, []
    for name in names:
        kernel = KERNELS[name]
        moved = kernel.bytes_per_item * n
        copied = min(int(moved / 8), n) * 8
        cases = {
            "kernel": timed(device, buffers.calls(kernel), seconds),
            "copy": timed(device, buffers.copies(moved), seconds),
        }
        device.synchronize()
        values = common.interleave(cases, rounds)
        speeds = [moved / value / 1e9 for value in values["kernel"]]
        bases = [copied / value / 1e9 for value in values["copy"]]
        pairs = zip(speeds, bases, strict=True)
        found[name] = {
            "gbps": common.spread(speeds),
            "us": common.spread([1e6 * value for value in values["kernel"]]),
            "of_copy": common.spread([a / b for a, b in pairs]),
        }
        copy += bases
    return {"sets": sets, "copy_gbps": common.spread(copy), "kernels": found}


def show(mib: float, result: dict[str, Any]) -> None:
    """Prints one size."""
    print(f"\n{mib:g} MiB of float32: copy {result['copy_gbps']['median']:,.0f} GB/s")
    rows = [
        [
            name,
            f"{one['us']['median']:,.1f}",
            f"{one['gbps']['median']:,.0f}",
            "{median:.2f} ({q1:.2f}..{q3:.2f})".format(**one["of_copy"]),
        ]
        for name, one in result["kernels"].items()
    ]
    common.print_table(["kernel", "us", "GB/s", "x copy"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1,8,64,256,1024", help="MiB of float32")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="one size that a CPU does at once")
    parser.add_argument("--dry", action="store_true", help="on the CPU in the GPU's place")
    parser.add_argument("--note", default="", help="kept in the JSON")
    parser.add_argument("--json", nargs="?", const="gpu_kernels.json", metavar="PATH")
    args = parser.parse_args()
    device = machine.open_device(args.dry)
    machine.prepare_probe(device)
    names = [name for name in KERNELS if args.only in name]
    run = {**common.describe_run(), **device.describe(), "kernels": _probe.cuda_device(0)}
    head = {"benchmark": "gpu_kernels", "note": args.note, "rounds": args.rounds, "run": run}
    sizes: dict[str, Any] = {}
    for text in ["0.0625"] if args.tiny else args.sizes.split(","):
        seconds = 1e-3 if args.tiny else 10e-3
        sizes[text] = measure_size(device, float(text), names, args.rounds, seconds)
        show(float(text), sizes[text])
        if args.json is not None:
            common.write_json(args.json, {**head, "sizes_mib": sizes})


if __name__ == "__main__":
    main()
