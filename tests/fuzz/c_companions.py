"""Random calls of the extension's functions for optimizers, checkpoints, activations and stalls.

Raw addresses (ranges of files, parts of a disk's buffers) stay valid, as the extension requires.
All other arguments may be odd.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import c_values as values
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from fsdpc import _probe

OPTIM_KINDS = {"adam": (2, 3), "sgd": (0, 1), "lion": (1, 1), "mini": (2, 2), "adam8": (4, 4)}
BLOCK = 256  # the number of packed values in a block
PAGE = 4096
HEADERS = [
    b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}',
    b'{"__metadata__":{"k":"v"},"w":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}   ',
    b"{}",
]


class Companions:
    """A mixin of ``c_calls.Caller``, with the calls of optimizers, checkpoints, activations and
    stall reports."""

    rng: random.Random
    depth: int
    seed: int
    log: Callable[[str], None]
    call: Callable[..., Any]
    keep: Callable[[str, Any], Any]
    some: Callable[[str], Any]
    mostly: Callable[[Any], Any]
    mischief: Callable[[], None]
    hostile: Callable[[], Any]
    odd: Callable[[], Any]
    listed: Callable[[list[Any]], list[Any]]
    pool: dict[str, list[Any]]

    # --- optimizers ----------------------------------------------------------------------------

    def tensor(self, n: int, dtype: torch.dtype = torch.float32) -> Any:
        """Mostly a tensor of ``n`` ones; at times another tensor, an array or None."""
        if self.rng.random() < 0.06:
            return self.rng.choice([values.tensors(self.rng, n), values.arrays(self.rng), None])
        return torch.ones(n, dtype=dtype)

    def rule(self) -> Any:
        numbers: list[Any] = [1e-3, 0.9, 0.99, 1e-8, 0.1, 1.0, 1.0]
        flags: list[Any] = [self.rng.random() < 0.5 for _ in range(5)]
        made = [*numbers, *flags, self.rng.randrange(2**64)]
        if self.rng.random() < 0.1:
            made[self.rng.randrange(len(made))] = self.odd()
        return tuple(made[:-1] if self.rng.random() < 0.03 else made)

    def call_optim_step(self) -> None:
        rng = self.rng
        kind = rng.choice([*OPTIM_KINDS, "edges8"])
        least, most = OPTIM_KINDS["adam8" if kind == "edges8" else kind]
        count, several = rng.randrange(4), rng.randint(least, most)
        sizes = [rng.choice([0, 1, 5, 255, 256, 257, 1025]) for _ in range(count)]
        firsts = [rng.choice([0, 0, 1, 255, 300]) for _ in range(count)]
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float64])
        whole = [[self.tensor(n, dtype) for n in sizes] for _ in range(2)]
        if "8" in kind:
            blocks = [touched(f, n, BLOCK) for f, n in zip(firsts, sizes, strict=True)]
            states = [[self.tensor(n, torch.uint8) for n in sizes] for _ in range(2)]
            states += [[self.tensor(n) for n in blocks] for _ in range(2)]
        else:
            states = [[self.tensor(n, dtype) for n in sizes] for _ in range(several)]
        block = rng.choice([1, 64, 2**40])
        if kind == "mini":
            states[1] = [
                self.tensor(touched(f, n, block)) for f, n in zip(firsts, sizes, strict=True)
            ]
        places: Any = tuple((f, 7 * i, block) for i, f in enumerate(firsts))
        if rng.random() < 0.1:
            places = tuple(rng.choice([p, 1, (), self.hostile()]) for p in places)
        edges = np.zeros((count, 2, 3), np.float32) if kind == "edges8" else None
        steps = [self.tensor(1) for _ in range(count)]
        given = (kind, self.rule, whole[0], whole[1], tuple(states), steps)
        measures = rng.choice([None, np.zeros((count, 6)), np.zeros(6), self.hostile()])
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        averages = (0.1, [rng.choice([None, self.tensor(n, wide)]) for n in sizes])
        self.call(
            "optim_step", _probe.optim_step,
            *given, places, edges, rng.choice([1, 2]), measures=measures,
            averages=rng.choice([None, None, averages, (0.1, [None]), self.hostile()]),
        )  # fmt: skip

    def new_table(self) -> Any:
        """Make an ``optim_table``, with the objects that the caller of a table must keep alive."""
        kind = self.rng.choice(["adam", "sgd", "lion"])
        names = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": (), "lion": ("exp_avg",)}[kind]
        params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 0, 1025)][: self.rng.randint(1, 3)]
        state: dict[Any, Any] = {}
        for p in params:
            state[p] = {name: torch.zeros_like(p) for name in (*names, "average")}
            state[p]["step"] = torch.zeros(())
        counter, average = self.rng.choice(["step", None]), self.rng.choice(["average", None])
        groups: Any = [(params, counter, names, average)]
        places: Any = [(0, i, 0) for i in range(len(params))]
        core = self.call(
            "optim_table", _probe.optim_table,
            torch.Tensor, DTensor, groups, state, places, None,
        )  # fmt: skip
        return self.keep("table", Table(core, kind, params, state))

    def call_optim_table(self) -> None:
        table = self.some("table")
        table.change(self.rng, self.tensor, self.hostile)
        lists = [list(table.params)]
        count = self.call(
            "optim_table_read", _probe.optim_table_read, table.core, lists, table.state
        )
        if count < 0:
            return
        try:
            self.mischief()
            self.call("optim_table_squares", _probe.optim_table_squares, table.core, 0, 1)
            weight = self.rng.choice([None, 0.5, self.odd()])
            self.call(
                "optim_table_step", _probe.optim_table_step,
                table.core, 0, table.kind, self.rule, 2, weight,
            )  # fmt: skip
            which = self.rng.randrange(3)
            self.call("optim_table_changed", _probe.optim_table_changed, table.core, which)
        finally:
            if self.rng.random() < 0.95:
                _probe.optim_table_end(table.core)

    def call_table_loosely(self) -> None:
        """Makes a call on a table out of the usual order."""
        table = self.some("table")
        name = self.rng.choice(["end", "squares", "changed", "step"])
        args = {
            "end": [],
            "squares": [0, 1],
            "changed": [self.rng.choice([0, 1, 2, 3, -1])],
            "step": [0, table.kind, self.rule, 1, 0.5],
        }[name]
        function = getattr(_probe, f"optim_table_{name}")
        self.call(f"optim_table_{name}", function, table.core, *args)

    def call_optim_values(self) -> None:
        rng = self.rng
        n, first = rng.choice([0, 1, 255, 256, 700]), rng.choice([0, 1, 255, 2**40])
        scales = self.tensor(touched(first, n, BLOCK))
        edges = rng.choice([None, np.zeros((2, 3), np.float32), np.zeros(6, np.float32)])
        which = rng.randrange(2)
        block = rng.choice([1, 3, 256, 2**40])
        sums = self.tensor(touched(first, n, block), torch.float64)
        codes = self.tensor(n, torch.uint8)
        calls: dict[str, list[Any]] = {
            "optim_sum_squares": [[self.tensor(n), self.tensor(3)], rng.choice([1, 2])],
            "optim_block_squares": [self.tensor(n), first, block, sums, 1],
            "optim_quantise": [which, self.tensor(n), first, codes, scales, edges],
            "optim_dequantise": [which, self.tensor(n), first, codes, scales],
            "optim_edges_of": [which, self.tensor(n), first, edges],
        }
        name = rng.choice(list(calls))
        self.call(name, getattr(_probe, name), *calls[name])

    # --- activations ---------------------------------------------------------------------------

    def call_activation(self) -> None:
        n = self.rng.choice([0, 1, 255, 256, 700])
        dtype = self.rng.choice([torch.float32, torch.bfloat16, torch.float16])
        given = self.tensor(n, dtype), self.tensor(n, torch.int8), self.tensor(-(-n // BLOCK))
        name = self.rng.choice(["activation_pack", "activation_unpack"])
        self.call(name, getattr(_probe, name), *given, -1)

    def call_rows(self) -> None:
        codec, row = self.rng.choice(values.CODECS), self.rng.choice([1, 5, 300])
        size = self.call("row_codes_bytes", _probe.row_codes_bytes, codec, row)
        size = size if isinstance(size, int) else 16
        given = self.tensor(3 * row), self.tensor(3 * size, torch.uint8)
        shaped = [t.view(3, -1) if isinstance(t, torch.Tensor) and t.numel() == n else t
                  for t, n in zip(given, (3 * row, 3 * size), strict=True)]  # fmt: skip
        name = self.rng.choice(["encode_rows", "decode_rows"])
        self.call(name, getattr(_probe, name), codec, *shaped)

    # --- checkpoints ---------------------------------------------------------------------------

    def call_crc(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            data = values.arrays(rng)
            self.call("ckpt_crc32c", _probe.ckpt_crc32c, data, 0, plain=rng.random() < 0.5)
            self.call("ckpt_digest", _probe.ckpt_digest, data)
            return
        counts = [rng.randrange(4) for _ in range(rng.randrange(4))]
        parts = sum(counts) + (rng.random() < 0.1)
        self.call(
            "ckpt_combine", _probe.ckpt_combine, np.zeros(parts, "u4"),
            np.array([rng.choice([0, 1, 2**62, -1])] * parts, "i8"),
            np.array(counts, "i8"), np.zeros(len(counts), "u4"),
        )  # fmt: skip

    def call_header(self) -> None:
        data = bytearray(self.rng.choice(HEADERS))
        for _ in range(self.rng.randrange(4)):
            at = self.rng.randrange(len(data))
            data[at] = self.rng.choice(b'0123456789{}[]",:-\\.eu \x00\xff')
        bytes_ = self.rng.choice([24, 24, 2, 0, -1, 2**63 - 1])
        self.call("ckpt_header", _probe.ckpt_header, lambda: bytes(data), bytes_)

    def call_ranges(self) -> None:
        """Write or read a file. The memory is valid; offsets, lengths and types may be invalid."""
        rng = self.rng
        folder = self.folder()
        memory = np.zeros(rng.choice([1, 4096, 20_000]), "u1")
        at, rows, digests = 0, [], 0
        block = rng.choice([4096, 1, 100, 2**40])
        for _ in range(rng.randrange(4)):
            bytes_ = rng.choice([0, 1, 4, 4096, len(memory)])
            bytes_ = min(bytes_, len(memory))
            row = [memory.ctypes.data, at, bytes_, rng.choice([0, 4, 4095]), 0, 0]
            if rng.random() < 0.15:
                column = rng.choice([1, 3, 4, 5])
                row[column] = rng.choice([-1, 1, 3, 99, 2**31, 2**40, 2**62, 2**63 - 1])
                if row[4] != row[5]:
                    row[2] = min(row[2], 64)
                    row[0] = memory.ctypes.data if len(memory) >= 1024 else 0
            digests += touched(row[3], row[2], block) if row[3] >= 0 else 0
            rows.append(row)
            at += bytes_
        table = np.array(rows, "i8").reshape(-1, 6)
        path = folder / "file"
        if not path.exists():
            path.touch()
        out = np.zeros(min(digests, 10**6), "u4")
        self.log(f"{'  ' * self.depth}ranges {table.tolist()} of {len(memory)}, block {block}")
        if rng.random() < 0.2:
            target, most = np.zeros(len(memory), "u1"), len(memory)
            moves = [[memory.ctypes.data, target.ctypes.data, min(each[2], most)] for each in rows]
            moves += rng.choice([[], [[0, 0, 0]], [[0, 0, 1]], [[1, 1, -1]]])
            table = np.array(moves, "i8").reshape(-1, 3)
            self.call("ckpt_copy", _probe.ckpt_copy, rng.choice([table, table.reshape(-1)[1:]]))
        elif rng.random() < 0.5:
            flags = {key: rng.random() < 0.5 for key in ("direct", "skip_edges")}
            _probe.ckpt_write(str(path), table, block, out, no_sync=True, **flags)
        else:
            with path.open("rb") as file:
                fd = rng.choice([file.fileno()] * 5 + [-1, 2**31 - 1])
                _probe.ckpt_read(str(path), table, block, out, fd)

    def call_ranges_odd(self) -> None:
        """Make calls with arguments of other types, none of which is an address of memory."""
        path = str(self.folder() / "file")
        none = np.zeros((0, 6), "i8")
        name = self.rng.choice(["ckpt_write", "ckpt_read"])
        extra = [-1] if name == "ckpt_read" else []
        table = self.rng.choice([none, self.hostile(), None, np.zeros(6, "i8"), np.zeros(5, "i8")])
        self.log(f"{'  ' * self.depth}{name}")
        getattr(_probe, name)(
            self.mostly(path), table, self.mostly(4096), self.mostly(np.zeros(0, "u4")),
            *(self.mostly(each) for each in extra),
        )  # fmt: skip

    def call_rename(self) -> None:
        folder = self.folder()
        names = [folder / name for name in "ab"]
        for name in names:
            if self.rng.random() < 0.5:
                name.touch()
        self.call(
            "ckpt_rename", _probe.ckpt_rename, *map(str, names), exchange=self.rng.random() < 0.5
        )

    def folder(self) -> Path:
        made = getattr(self, "_folder", None)
        if made is None:
            made = self._folder = tempfile.TemporaryDirectory()
        return Path(made.name)

    # --- states on a disk ----------------------------------------------------------------------

    def new_disk(self) -> Any:
        pages = self.rng.choice([1, 3])
        buffers = [np.zeros(pages * PAGE, "u1") for _ in range(self.rng.randint(1, 3))]
        io = self.rng.choice(["threads", "threads", "auto", "io_uring"])
        direct = self.rng.random() < 0.5
        given = (str(self.folder()), 0, buffers, io, direct)
        return self.keep("disk", self.call("disk_open", _probe.disk_open, *given))

    def call_disk(self) -> None:
        rng, disk = self.rng, self.some("disk")
        name = rng.choice(["disk_grow", "disk_start", "disk_start", "disk_wait", "disk_info"])
        numbers = [0, PAGE, 2 * PAGE, 3 * PAGE, 1, -PAGE, 2**62, 2**63 - 1]
        weights = [8, 8, 4, 4, 1, 1, 1, 1]
        parts = [tuple(rng.choices(numbers, weights, k=3)) for _ in range(rng.randrange(4))]
        if rng.random() < 0.1:
            parts = [rng.choice([1, (), (1, 2), self.hostile()])]
        args: dict[str, list[Any]] = {
            "disk_grow": [rng.choice([PAGE, 4 * PAGE, 64 * PAGE, 0, 1, -1])],
            "disk_start": [rng.random() < 0.6, rng.choice([0, 0, 1, 2, 3, -1]), self.listed(parts)],
            "disk_wait": [rng.choice([0, 0, 1, 2, 3, -1])],
        }
        self.call(name, getattr(_probe, name), disk, *args.get(name, []))

    # --- places, plans, waits ------------------------------------------------------------------

    def call_places(self) -> None:
        tensors = [values.tensors(self.rng, 3) for _ in range(self.rng.randrange(4))]
        if self.rng.random() < 0.3:
            tensors.append(self.rng.choice([None, self.hostile(), 1]))
        found = self.call("places", _probe.places, tensors)
        other = self.rng.choice([found, found, b"", bytes(33), None])
        self.call("at_places", _probe.at_places, tensors, other)

    def call_plans(self) -> None:
        rng = self.rng
        needs = [
            (rng.choice([0, 1, 100, 2**62]), rng.random() < 0.5, rng.random() < 0.5, level)
            for level in (0, 1, 1, rng.choice([0, 2, -1, 2**31 - 1]))
        ]
        spec = ("w", rng.choice([0, 12, 2**60]), *["float32"] * 3, True)
        calls: dict[str, list[Any]] = {
            "plan_slots": [needs, rng.choice([0, 1, 5]), rng.random() < 0.5],
            "plan_reduce_slots": [rng.choice([1, 2]), True, rng.choice([8, 2**62]), 0],
            "plan_grad_slots": [8, rng.choice([64, 0, -1]), 2],
            "footprint": [
                [spec],
                rng.choice([1, 3, 10**6]),
                64,
                4096,
                4096,
                False,
                True,
                rng.random() < 0.5,
            ],
        }
        name = rng.choice(list(calls))
        self.call(name, getattr(_probe, name), *calls[name])

    def call_waits(self) -> None:
        rng = self.rng
        name = rng.choice(["set_timeout", "set_stalls", "board_open", "board_begin", "board_end"])
        short = rng.choice([0.05, 0.1, 0.0, -1.0, float("nan"), "x"])
        args: dict[str, list[Any]] = {
            "set_timeout": [short],
            "set_stalls": [rng.choice([0.01, 0.0, -1.0, float("nan")]), self.hostile()],
            "board_begin": [rng.choice(["a wait", "n" * 5000])],
        }
        self.log(f"{'  ' * self.depth}{name}")
        getattr(_probe, name)(*args.get(name, []))

    def call_absent_gpu(self) -> None:
        """Make calls for lanes and pinned memory of a GPU that does not exist, or of the simulated
        GPU."""
        rng = self.rng
        calls: dict[str, list[Any]] = {
            "pinned_new": [rng.choice([0, -1, 99]), rng.choice([0, 4096])],
            "lane_new": [rng.choice([0, -1, 99])],
            "set_stream_function": [rng.choice([lambda ordinal: 0, self.hostile()])],
        }
        of_lanes: dict[str, list[Any]] = {
            "lane_begin": [], "lane_mark": [], "lane_counts": [], "lane_join": [0],
            "lane_finish": [0, "w"], "lane_in": [0, 0, 0], "lane_out": [0, 0, 0],
        }  # fmt: skip
        name = rng.choice([*calls, *of_lanes])
        args = calls.get(name) or [object(), *of_lanes[name]]
        self.call(name, getattr(_probe, name), *args)


class Table:
    """An ``optim_table``, and the objects whose addresses the table keeps."""

    def __init__(self, core: Any, kind: str, params: list[Any], state: dict[Any, Any]) -> None:
        self.core, self.kind, self.params, self.state = core, kind, tuple(params), state

    def change(self, rng: random.Random, tensor: Any, hostile: Any) -> None:
        """Change gradients, values and states as programs do between two steps, and in worse
        ways."""
        for p in self.params:
            what = rng.randrange(12)
            if what < 6:
                p.grad = torch.ones_like(p)
            elif what == 6:
                p.grad = None
            elif what == 7:
                p.data = torch.ones(rng.choice([p.numel(), 7]))
            elif what == 8 and self.state.get(p):
                name = rng.choice(list(self.state[p]))
                self.state[p][name] = rng.choice([tensor(p.numel()), 1.0, hostile(), None])
            elif what == 9 and self.state.get(p):
                self.state[p].pop(rng.choice(list(self.state[p])))
            elif what == 10:
                self.state[p] = dict(self.state.get(p) or {})


def touched(first: int, n: int, block: int) -> int:
    """Return how many blocks a range touches."""
    return 0 if n == 0 else (first + n - 1) // block - first // block + 1
