"""Speed of the CPU kernels on one thread, as a share of memcpy and of torch's addition.

python benchmarks/bench_kernels.py                          # print
python benchmarks/bench_kernels.py --json                   # and write results/kernels.json
python benchmarks/bench_kernels.py --sizes 1,16 --tables avx512 --only cast

A size sets the number of elements: so many float32 values have this size. Every byte counts once
when it is read and once when it is written, so that a copy of 1 MiB moves 2 MiB. Buffers are reused
from call to call: small buffers stay in the caches, as small slots do in training. Time is the
thread's processor time, which other processes disturb only through shared caches and memory; the
time of a call without elements is subtracted. All cases of a size take turns in each round, and a
share is a quotient within one round. torch's own operations are measured in the same rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import time
from collections.abc import Callable
from functools import partial

import common
import torch

from fsdpc import _probe

MIB = 1 << 20
MIN_SECONDS = 2e-3  # least time of a measurement; short calls are repeated until it is reached
PLAIN_LIMIT_MIB = 16  # the plain table takes too long for larger sizes
MEMORY_LIMIT_MIB = 64  # 4 sources of float32 take too much memory for larger sizes
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
Call = Callable[[], object]


class Memory:
    """Page-aligned buffers of `n` random elements, one per dtype and slot. Buffers of 2 MiB or more
    are on huge pages.

    Args:
        n: elements of each buffer.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.tensors: dict[tuple[str, int], torch.Tensor] = {}

    def __call__(self, dtype: str, slot: int = 0) -> torch.Tensor:
        key = (dtype, slot)
        if key not in self.tensors:
            block = mmap.mmap(-1, self.n * ITEM[dtype], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if self.n * ITEM[dtype] >= 2 * MIB:
                block.madvise(mmap.MADV_HUGEPAGE)
            tensor = torch.frombuffer(block, dtype=getattr(torch, dtype))
            self.tensors[key] = tensor.uniform_(-2, 2)
        return self.tensors[key]


def empty(dtype: str) -> torch.Tensor:
    """Return a buffer without elements, to time the overhead of a call."""
    return torch.empty(0, dtype=getattr(torch, dtype))


Maker = Callable[[Callable[..., torch.Tensor], str | None], Call]


def cast(src: str, dst: str, scale: float = 1.0) -> tuple[int, Maker]:
    """Return the bytes moved per element, and a function that makes the call from the buffers and
    the name of a kernel table (None: torch's own operation).
    """

    def make(memory: Callable[..., torch.Tensor], table: str | None) -> Call:
        source, target = memory(src, 0), memory(dst, 9)
        if table is None:
            return partial(target.copy_, source)
        return partial(_probe.kernel_cast, target, dst, source, src, scale, table)

    return ITEM[src] + ITEM[dst], make


def scale_in_place(dtype: str) -> tuple[int, Maker]:
    """Return the case x *= -1, which keeps the magnitudes of the values."""

    def make(memory: Callable[..., torch.Tensor], table: str | None) -> Call:
        x = memory(dtype, 0)
        if table is None:
            return partial(x.mul_, -1.0)
        return partial(_probe.kernel_cast, x, dtype, x, dtype, -1.0, table)

    return 2 * ITEM[dtype], make


def accumulate(src: str) -> tuple[int, Maker]:
    """Return the case acc += src * 0.5 in float32."""

    def make(memory: Callable[..., torch.Tensor], table: str | None) -> Call:
        acc, source = memory("float32", 9), memory(src, 0)
        if table is None:
            return partial(acc.add_, source, alpha=0.5)
        return partial(_probe.kernel_accumulate, acc, "float32", source, src, 0.5, table)

    return ITEM[src] + 8, make


def reduce(count: int, src: str, add: bool = False) -> tuple[int, Maker]:
    """Return the case acc = (src[0] + src[1] + ...) * 0.5 in float32, or acc += ... with `add`."""

    def torch_sum(acc: torch.Tensor, sources: list[torch.Tensor]) -> None:
        torch.add(sources[0], sources[1], out=acc)
        for source in sources[2:]:
            acc.add_(source)
        acc.mul_(0.5)

    def make(memory: Callable[..., torch.Tensor], table: str | None) -> Call:
        acc, sources = memory("float32", 9), [memory(src, s) for s in range(count)]
        if table is None:
            return partial(torch_sum, acc, sources)
        return partial(_probe.kernel_reduce, acc, "float32", sources, src, 0.5, add, table)

    return count * ITEM[src] + (8 if add else 4), make


def norm(dtype: str) -> tuple[int, Maker]:
    """Return the case of a sum of squares in double; torch computes the norm in float32."""

    def make(memory: Callable[..., torch.Tensor], table: str | None) -> Call:
        x = memory(dtype, 0)
        if table is None:
            return partial(torch.linalg.vector_norm, x, dtype=torch.float32)
        return partial(_probe.kernel_norm2, x, dtype, table)

    return ITEM[dtype], make


KERNELS: dict[str, tuple[int, Maker]] = {
    "copy f32": cast("float32", "float32"),
    "cast f32 -> bf16": cast("float32", "bfloat16"),
    "cast bf16 -> f32": cast("bfloat16", "float32"),
    "cast f32 -> f16": cast("float32", "float16"),
    "cast f16 -> f32": cast("float16", "float32"),
    "scale f32": scale_in_place("float32"),
    "scale bf16": scale_in_place("bfloat16"),
    "accumulate f32": accumulate("float32"),
    "accumulate bf16": accumulate("bfloat16"),
    "reduce 2 x f32": reduce(2, "float32"),
    "reduce 2 x bf16": reduce(2, "bfloat16"),
    "reduce 4 x f32": reduce(4, "float32"),
    "reduce 4 x bf16": reduce(4, "bfloat16"),
    "reduce 4 x bf16, add": reduce(4, "bfloat16", add=True),
    "norm f32": norm("float32"),
    "norm bf16": norm("bfloat16"),
}


def seconds(call: Call, repeats: int) -> float:
    """Return the mean processor time of this thread per call, over `repeats` calls in a row."""
    begin = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - begin) / repeats


def overhead_of(call: Call) -> float:
    """Return the time of a call on buffers without elements."""
    return min(seconds(call, 200) for _ in range(5))


def speed(call: Call, overhead: float, bytes_moved: int) -> Callable[[], float]:
    """Warm up a call and return a function that measures its GB/s once."""
    call()
    once = seconds(call, 3)
    repeats = max(1, int(MIN_SECONDS / once))
    return lambda: bytes_moved / max(seconds(call, repeats) - overhead, 1e-9) / 1e9


def memcpy(dst: torch.Tensor, src: torch.Tensor, bytes_: int) -> Call:
    return partial(ctypes.memmove, dst.data_ptr(), src.data_ptr(), bytes_)


def measure_size(mib: float, tables: list[str], kernels: list[str], rounds: int) -> dict:
    """Measure one size; the module's docstring defines the figures in the result."""
    n = int(mib * MIB) // 4
    memory = Memory(n)
    a, b, c = (memory("float32", slot) for slot in (0, 1, 9))
    none = torch.empty(0)
    copy_overhead = overhead_of(memcpy(none, none, 0))
    add_overhead = overhead_of(partial(torch.add, none, none, out=none.clone()))
    cases = {
        "memcpy": speed(memcpy(c, a, 4 * n), copy_overhead, 8 * n),
        "torch add": speed(partial(torch.add, a, b, out=c), add_overhead, 12 * n),
    }
    for name in kernels:
        item_bytes, make = KERNELS[name]
        if mib > MEMORY_LIMIT_MIB and name == "reduce 4 x f32":
            continue
        for table in [*tables, None]:
            if table == "plain" and mib > PLAIN_LIMIT_MIB:
                continue
            overhead = overhead_of(make(lambda dtype, slot=0: empty(dtype), table))
            cases[f"{name}|{table or 'torch'}"] = speed(
                make(memory, table), overhead, item_bytes * n
            )
    values = common.interleave(cases, rounds)
    found: dict[str, dict] = {}
    for key in [key for key in values if "|" in key]:
        name, table = key.split("|")
        found.setdefault(name, {})[table] = {
            "gbps": common.spread(values[key]),
            "of_memcpy": common.spread(quotients(values[key], values["memcpy"])),
            "of_torch_add": common.spread(quotients(values[key], values["torch add"])),
        }
    return {
        "memcpy_gbps": common.spread(values["memcpy"]),
        "torch_add_gbps": common.spread(values["torch add"]),
        "kernels": found,
    }


def quotients(values: list[float], bases: list[float]) -> list[float]:
    return [value / base for value, base in zip(values, bases, strict=True)]


def show(mib: float, result: dict, tables: list[str]) -> None:
    """Print one size: GB/s of each table, and the shares of the best table."""
    base, add = (result[key]["median"] for key in ("memcpy_gbps", "torch_add_gbps"))
    print(f"\n{mib:g} MiB of float32: memcpy {base:.1f} GB/s, torch add {add:.1f} GB/s")
    rows = []
    for name, by_table in result["kernels"].items():
        figures = [by_table.get(table) for table in [*tables, "torch"]]
        best = by_table.get(tables[-1], by_table["torch"])
        shares = [
            "{median:.2f} ({q1:.2f}..{q3:.2f})".format(**best[key])
            for key in ("of_memcpy", "of_torch_add")
        ]
        rows.append([name, *(f"{f['gbps']['median']:.1f}" if f else "-" for f in figures), *shares])
    head = ["GB/s", *tables, "torch", f"{tables[-1]} / memcpy", f"{tables[-1]} / torch add"]
    common.print_table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="0.0625,1,8,64,256", help="MiB of float32")
    parser.add_argument("--tables", default=",".join(_probe.kernel_names()))
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--note", default="", help="goes into the result, e.g. what disturbed it")
    parser.add_argument("--json", action="store_true", help="write results/kernels.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tables = args.tables.split(",")
    kernels = [name for name in KERNELS if args.only in name]
    record = common.describe_run(kept=args.json)
    sizes = {}
    for text in args.sizes.split(","):
        sizes[text] = measure_size(float(text), tables, kernels, args.rounds)
        show(float(text), sizes[text], tables)
    if args.json:
        head = {"benchmark": "kernels", "note": args.note, "threads": 1, "rounds": args.rounds}
        common.write_json("kernels.json", {**head, **record, "sizes_mib": sizes})


if __name__ == "__main__":
    main()
