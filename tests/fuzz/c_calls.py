"""Random calls of the extension, with valid and odd arguments. No call may end in a signal or hang.

``python tests/fuzz/c_calls.py --calls 100000 --seed 1`` makes the calls in forked processes, one
batch in each. A process that dies of a signal, stops making calls, or sees a SystemError is
reported with its seed and its last calls. ``--replay SEED`` runs that batch again in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import c_values as values
import numpy as np
import torch
from c_companions import Companions

from fsdpc import _probe

BATCH = 250
SHORT_S = 0.08  # the timeout, in seconds, of every communicator made here
KINDS = ("comm", "flat", "tree", "hook", "plan", "table", "disk")
STUCK_S = 60.0  # a process that makes no call for so many seconds counts as hung
TYPES = (_probe.Comm, _probe.FlatParameter, _probe.Tree, _probe.Hook)
SYSTEM_ERROR_STATUS = 77


class Callbacks:
    """The callbacks of a c10d communicator, which act as if all ranks sent what this rank sends.
    Each callback also runs ``mischief``."""

    def __init__(self, mischief: Callable[[], None]) -> None:
        self._mischief = mischief

    def all_gather(self, array: np.ndarray, piece_bytes: int, what: str) -> None:
        for begin in range(piece_bytes, len(array), piece_bytes):
            array[begin : begin + piece_bytes] = array[:piece_bytes]
        self._mischief()

    def reduce_scatter(self, *args: Any) -> None:
        self._mischief()

    all_reduce = broadcast = barrier = reduce_scatter


class Flying(Callbacks):
    """``Callbacks`` with sends and receives. Each receive gets what this rank sends."""

    flies = True

    def post(self, moves: list[tuple[np.ndarray, int, bool]], tag: int, what: str) -> object:
        self._mischief()
        return moves

    def land(self, moves: Any, skip: bytes | None, what: str) -> None:
        self._mischief()
        sent = [memory for memory, _, send in moves if send]
        for memory, peer, send in moves:
            if not send and not (skip and skip[peer]):
                memory[:] = next((m for m in sent if len(m) == len(memory)), 0)

    def give_up(self, moves: Any) -> None:
        self._mischief()


@dataclass
class Caller(Companions):
    """A source of random calls from a seed. It keeps objects that calls have returned, as arguments
    of later calls."""

    seed: int
    log: Callable[[str], None]
    rng: random.Random = field(init=False)
    pool: dict[str, list[Any]] = field(init=False)
    lists: list[list[Any]] = field(default_factory=list)
    depth: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.pool = {kind: [] for kind in KINDS}

    # --- objects -----------------------------------------------------------------------------

    def keep(self, kind: str, made: Any) -> Any:
        several = self.pool[kind]
        several.append(made)
        if len(several) > 6:
            several.pop(self.rng.randrange(len(several)))
        return made

    def some(self, kind: str) -> Any:
        if not self.pool[kind] or self.rng.random() < 0.05:
            return getattr(self, f"new_{kind}")()
        return self.rng.choice(self.pool[kind])

    def name(self) -> str:
        return f"fuzz-{os.getpid()}-{self.seed}-{self.rng.randrange(10**9)}"

    def new_comm(self) -> Any:
        kind = self.rng.randrange(6)
        if kind < 3:
            made = _probe.Comm.self_()
        elif kind == 3:
            made = _probe.Comm.shm(0, 1, self.name(), SHORT_S)
        elif kind == 4:
            made = _probe.Comm.c10d(0, self.rng.choice([1, 2]), self.callbacks())
        else:
            made = self.pair_of_comms()[0]
        return self.keep("comm", made)

    def pair_of_comms(self) -> list[Any]:
        name = self.name()
        made = self.together([lambda r=r: _probe.Comm.shm(r, 2, name, 0.3) for r in range(2)])
        for comm in made:
            if isinstance(comm, BaseException):
                raise comm
            self.keep("comm", comm)
        return made

    def new_flat(self) -> Any:
        specs = self.by_rows(self.rng.choice(values.ALL_SPECS))
        made = _probe.FlatParameter(
            f"unit{self.number}",
            self.rng.choice([_probe.Comm.self_, lambda: self.some("comm")])(),
            specs,
            divide=self.rng.choice([1.0, 2.0]),
            reshard=self.rng.random() < 0.7,
            foreign=self.rng.random() < 0.1,
        )
        if self.rng.random() < 0.7:
            self.bind(made, specs)
        return self.keep("flat", made)

    def bind(self, flat: Any, specs: list[Any]) -> None:
        """Bind a unit to new tensors, as a sharded module does."""
        full = [torch.zeros(spec[1], requires_grad=spec[5]) for spec in specs]
        params = [torch.nn.Parameter(torch.zeros(1), requires_grad=spec[5]) for spec in specs]
        module: dict[str, Any] = {}
        sites = [(module, spec[0], i, params[i]) for i, spec in enumerate(specs)]
        seen = [
            (params[i], torch.zeros(spec[1]) if spec[5] else None, (i,))
            for i, spec in enumerate(specs)
        ]
        flat.bind(full, sites, seen, [0] if self.rng.random() < 0.5 else list(range(len(specs))))

    def new_tree(self) -> Any:
        flats = [self.new_flat() for _ in range(self.rng.randrange(1, 4))]
        made = _probe.Tree(
            flats,
            [0] + [1] * (len(flats) - 1),
            torch=self.torch_functions(),
            poison=self.rng.random() < 0.5,
        )
        return self.keep("tree", made)

    def torch_functions(self) -> Any:
        if self.rng.random() < 0.3:
            return None
        return (
            torch.Tensor,
            self.rng.choice([torch.is_grad_enabled, lambda: True, self.hostile()]),
            self.rng.choice([lambda: -1, lambda: 0, self.hostile()]),
            self.rng.choice([lambda: False, lambda: True, self.hostile()]),
            self.rng.choice([lambda params: True, lambda params: False, self.hostile()]),
            self.rng.choice([lambda call: None, lambda call: call(), self.hostile()]),
            self.rng.choice([lambda params: None, self.hostile()]),
            self.rng.choice([lambda tensors, numbers: None, self.hostile()]),
            self.rng.choice([lambda tensors: None, self.hostile()]),
            self.rng.choice([lambda args, kwargs: (args, kwargs or {}), self.hostile()]),
            self.rng.choice([lambda output, begin, end: output, self.hostile()]),
            self.rng.choice([{}, {object: self.hostile(), values.Hostile: object()}]),
            self.rng.choice([lambda: None, lambda: 1, self.hostile()]),
            self.rng.choice([lambda output: [], lambda output: output, self.hostile()]),
            self.rng.choice([lambda: None, self.hostile()]),
            self.rng.choice([{}, {"_is_profiler_enabled": True}]),
            self.rng.choice([torch.profiler.record_function, self.hostile()]),
        )

    def new_hook(self) -> Any:
        kind = self.rng.choice(["pre_forward", "post_forward", "pre_backward", "input_done"])
        made = self.some("flat").hook(kind)
        if self.rng.random() < 0.3:
            made = self.some("flat").hook("grad", self.rng.choice([0, 0, 1, -1, 5, 2**31 - 1]))
        return self.keep("hook", made)

    def new_plan(self) -> Any:
        return self.keep(
            "plan", _probe.kernel_pack_plan([(4, 0, "float32"), (3, 64, "float16")], 128)
        )

    # --- arguments ---------------------------------------------------------------------------

    def hostile(self) -> Any:
        return values.Hostile(self.rng, self.mischief)

    def odd(self) -> Any:
        rng = self.rng
        kind = rng.randrange(14)
        if kind < 3:
            return values.numbers(rng)
        if kind < 5:
            return values.texts(rng)
        if kind < 7:
            return values.arrays(rng)
        if kind == 7:
            return self.hostile()
        if kind == 8:
            return self.listed([self.odd() for _ in range(rng.randrange(3))])
        if kind == 9:
            return rng.choice([None, (), {}, int, lambda *args: None, torch.Tensor, object()])
        if kind == 10:
            return self.some(rng.choice(list(self.pool)))
        if kind == 11:
            return self.listed([self.hostile(), values.arrays(rng), None])
        return values.nested(rng, lambda: rng.choice([values.tensors(rng, 3), self.hostile(), 1]))

    def listed(self, made: list[Any]) -> list[Any]:
        """Return the list. ``mischief`` may then change the list while C code reads it."""
        self.lists.append(made)
        del self.lists[:-8]
        return made

    def callbacks(self) -> Callbacks:
        return self.rng.choice([Callbacks, Flying])(self.mischief)

    def mischief(self) -> None:
        """Changes a list, forgets objects or makes a call, in the middle of another call."""
        if self.depth > 2 or self.rng.random() < 0.4:
            return
        self.depth += 1
        try:
            what = self.rng.randrange(4)
            if what == 0 and self.lists:
                self.rng.choice(self.lists).clear()
            elif what == 1 and self.lists:
                self.rng.choice(self.lists).extend([None] * 50)
            elif what == 2:
                self.pool[self.rng.choice(list(self.pool))].clear()
                gc.collect(0)
            else:
                self.one_call()
        finally:
            self.depth -= 1

    def mostly(self, sound: Any) -> Any:
        """Return ``sound`` (a value, or the result of a function) in most cases, and an odd value
        in others."""
        if self.rng.random() < 0.12:
            return self.odd()
        made = sound() if callable(sound) else sound
        return self.listed(made) if isinstance(made, list) else made

    def full_tensors(self, flat: Any) -> list[Any]:
        params = flat.layout()["params"]
        of = {"float64": np.float64, "float16": np.float16, "uint8": np.uint8}
        segments = flat.layout()["segments"]
        return [
            self.rng.choice(
                [
                    np.zeros(p["numel"], of.get(segments[p["segment"]]["storage"], np.float32)),
                    torch.zeros(p["numel"]),
                    bytes(4 * p["numel"]),
                    None,
                    values.arrays(self.rng),
                    self.hostile(),
                ]
            )
            for p in params
        ]

    # --- calls -------------------------------------------------------------------------------

    def call(self, what: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call ``function`` with arguments that went through ``mostly``. In a few calls, leave out
        or add an argument."""
        given = [self.mostly(arg) for arg in args]
        named = {key: self.mostly(value) for key, value in keywords.items()}
        if self.rng.random() < 0.03:
            given = given[:-1]
        if self.rng.random() < 0.02:
            given.append(self.odd())
        self.log(f"{'  ' * self.depth}{what}{short(given)}{short(named) if named else ''}")
        return function(*given, **named)

    def method(self, kind: str, name: str, *args: Any, **keywords: Any) -> Any:
        owner = self.some(kind)
        return self.call(f"{kind}.{name}", getattr(owner, name), *args, **keywords)

    def one_call(self) -> None:
        self.number += 1
        names = [name for name in dir(self) if name.startswith("call_")]
        name = self.rng.choice(names)
        try:
            getattr(self, name)()
        except SystemError as error:
            if "returned" in str(error) or "bad argument" in str(error) or "style" in str(error):
                self.log(f"SystemError: {error}")
                os._exit(SYSTEM_ERROR_STATUS)
        except (Exception, KeyboardInterrupt):
            pass

    def together(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """Run each call in a separate thread; return the results and errors."""
        results: list[Any] = [None] * len(calls)

        def run(i: int) -> None:
            try:
                results[i] = calls[i]()
            except BaseException as error:
                if isinstance(error, SystemError):
                    self.log(f"SystemError in a thread: {error}")
                results[i] = error

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def call_two_threads(self) -> None:
        if self.depth == 0 and self.rng.random() < 0.3:
            self.log("two threads")
            self.depth += 1
            try:
                self.together([lambda: [self.one_call() for _ in range(4)]] * 2)
            finally:
                self.depth -= 1

    def call_close_while_in_use(self) -> None:
        """Close a tree while another thread is in a hook or in a wait."""
        if self.depth or self.rng.random() < 0.5:
            return
        tree = self.some("tree")
        hooks = [hook for hook in self.pool["hook"]][:3]
        self.log("close while in use")
        self.together([lambda: [hook(None, ()) for hook in hooks], tree.close])

    def call_pair(self) -> None:
        """Make the same collective on two ranks, which are threads."""
        if self.depth or self.rng.random() < 0.7:
            return
        pair = self.pair_of_comms()
        name = self.rng.choice(["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
        arrays = [np.ones(self.rng.choice([8, 8, 8, 6]), np.float32) for _ in pair]
        self.log(f"pair.{name}")
        both = zip(pair, arrays, strict=True)
        self.together([lambda c=c, a=a: getattr(c, name)(a) for c, a in both])

    def call_pair_of_units(self) -> None:
        if self.depth or self.rng.random() < 0.8:
            return
        pair = self.pair_of_comms()
        self.log("pair of units")
        flats = self.together(
            [lambda c=c: _probe.FlatParameter("u", c, values.SPECS) for c in pair]
        )

        def use(flat: Any, slow: bool) -> None:
            _probe.gather(flat)
            if slow:
                time.sleep(0.01)
            _probe.reduce(flat, [np.ones(12, np.float32), None])
            _probe.release(flat)
            flat.read([np.zeros(12, np.float32), None])

        found = [flat for flat in flats if isinstance(flat, _probe.FlatParameter)]
        self.together([lambda f=f, i=i: use(f, i == 0) for i, f in enumerate(found)])
        for flat in found:
            self.keep("flat", flat)

    def call_forked_peer(self) -> None:
        """Make collectives with a peer in a forked process, which may leave early."""
        if self.depth or self.rng.random() < 0.9:
            return
        name, calls = self.name(), self.rng.randrange(3)
        self.log(f"forked peer of {calls} calls")
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            try:
                comm = _probe.Comm.shm(1, 2, name, 0.5)
                for _ in range(calls):
                    comm.all_reduce(np.ones(8, np.float32))
            finally:
                os._exit(0)
        try:
            comm = self.keep("comm", _probe.Comm.shm(0, 2, name, 0.5))
            for _ in range(2):
                comm.all_reduce(np.ones(8, np.float32))
        finally:
            _, status = os.waitpid(pid, 0)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGALRM:
                self.log("the forked peer died of a signal")
                os.abort()

    def call_comm_make(self) -> None:
        made = self.rng.randrange(5)
        if made == 0:
            self.keep("comm", self.call("Comm.self_", _probe.Comm.self_))
        elif made == 1:
            rank, world = self.rng.choice([(0, 1), (0, 2), (1, 2), (5, 3), (-1, 1)])
            if world == 2 and self.rng.random() < 0.8:
                return  # the call would wait until the timeout
            name = self.name()
            made = self.call(
                "Comm.shm", lambda r, w, n: _probe.Comm.shm(r, w, n, 0.05), rank, world, name
            )
            self.keep("comm", made)
        elif made == 2:
            timeout = self.rng.choice([0.0, -1.0, float("nan"), "x", None, self.hostile()])
            self.log(f"Comm.shm timeout {timeout!r:.20}")
            _probe.Comm.shm(0, 1, self.name(), timeout)
        elif made == 3:
            world = self.rng.choice([1, 1, 2, 3])
            callbacks = self.rng.choice([self.callbacks(), self.hostile(), None, 1])
            self.keep("comm", self.call("Comm.c10d", _probe.Comm.c10d, 0, world, callbacks))
        else:
            args = (0, 1, bytes(128), bytes(128), 0)
            self.call("Comm.nccl", _probe.Comm.nccl, *args, "n", 0.1, None)

    def call_comm_collective(self) -> None:
        name = self.rng.choice(["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
        array = values.arrays(self.rng)
        extra = {"all_reduce": ["max"], "broadcast": [0]}.get(name, [])
        self.method("comm", name, array, *extra, what="w")

    def call_comm_other(self) -> None:
        name = self.rng.choice(
            [
                "barrier",
                "agree",
                "abort",
                "fail",
                "close",
                "staged",
                "late_text",
                "set_hosts",
                "set_numbers",
            ]
        )
        args = {
            "barrier": [],
            "close": [],
            "staged": [0],
            "set_hosts": [
                self.rng.choice([[0, 1], [0, 1], [0, 0], [0], [2**40, 1], "ab", None]),
                self.name(),
                SHORT_S,
            ],
            "late_text": [0, 1.5, "w", self.listed([1, self.rng.choice([2, -1, 2**40])])],
        }.get(name, ["t"])
        if name in ("abort", "fail", "close") and self.rng.random() < 0.7:
            return
        self.method("comm", name, *args)

    def call_attributes(self) -> None:
        owner = self.some(self.rng.choice(["comm", "flat", "tree", "hook"]))
        self.log(f"attributes of {type(owner).__name__}")
        for name in dir(type(owner)):
            if not name.startswith("__"):
                try:
                    got = getattr(owner, name)
                    if isinstance(got, np.ndarray) and got.dtype != object:
                        got[:1000].sum()  # only the start, because a wrong size may be gigabytes
                        got[:1] = 1
                except SystemError:
                    raise
                except Exception:
                    pass
        repr(owner), hash(owner)

    def call_set_attribute(self) -> None:
        kind = self.rng.choice(["flat", "flat", "tree"])
        names = {
            "flat": ["name", "sync", "shown", "on_unattached", "after_backward", "on_changed"]
            + ["on_kept", "on_moved", "on_values", "comm_hook", "observed", "members_left"]
            + ["reshards", "keeps", "divide"],
            "tree": ["before_end", "before_pass", "on_thaw", "observer", "step_unit", "phase"],
        }[kind]
        name, owner = self.rng.choice(names), self.some(kind)
        value = self.mostly(lambda: self.rng.choice([self.hostile(), lambda: True, None, "n"]))
        self.log(f"{kind}.{name} = {type(value).__name__}")
        if self.rng.random() < 0.05:
            delattr(owner, name)
        setattr(owner, name, value)

    def call_functions(self) -> None:
        name = self.rng.choice(
            [
                "tensor_info",
                "export_dlpack",
                "kernel_names",
                "cuda_device",
                "cuda_waits",
                "cuda_memory",
            ]
            + ["nccl_stall", "nccl_note_others", "nccl_id", "nccl_version", "cuda_allocated"]
            + ["set_cuda_allocator", "stand_in", "get_num_threads", "cuda_image_bytes"]
        )
        array = values.arrays(self.rng)
        args = {
            "tensor_info": [array, self.rng.choice(["any", "torch", "methods"]), 2],
            "export_dlpack": [array],
            "cuda_device": [0],
            "cuda_waits": [0],
            "cuda_memory": [0],
            "cuda_allocated": [0],
            "nccl_stall": [lambda: self.some("comm")],
            "nccl_note_others": [lambda: self.some("comm"), "t"],
            "set_cuda_allocator": [0, None, None],
        }.get(name, [])
        got = self.call(name, getattr(_probe, name), *args)
        if name == "export_dlpack" and self.rng.random() < 0.7:
            torch.utils.dlpack.from_dlpack(got).view(-1)[:1].fill_(1)

    def call_threads(self) -> None:
        _probe.set_num_threads(self.rng.choice([1, 2, 3, 0, -1, "x", 2**70]))

    def call_layout(self) -> None:
        world = self.rng.choice([1, 2, 3, 1000])
        self.call(
            "layout", _probe.layout, self.specs(), world, self.rng.choice([64, 4, 4096]), True
        )

    def specs(self) -> Any:
        specs = [list(spec) for spec in self.by_rows(self.rng.choice(values.ALL_SPECS))]
        if self.rng.random() < 0.4:
            spec = self.rng.choice(specs)
            spec[self.rng.randrange(len(spec))] = self.odd()
        return [tuple(spec) for spec in specs]

    def by_rows(self, specs: Any) -> Any:
        """Return the specs. In some cases cut them between rows, and give some of the cut specs
        codecs."""
        if self.rng.random() < 0.7:
            return specs
        cut = [(*s[:6], self.rng.choice([1, 3, s[1] or 1, -1])) for s in specs]
        codecs = self.rng.choices(values.CODECS, k=self.rng.choice([0, 0, 1, 2]))
        return [(*s, *codecs) for s in cut]

    def call_kernels(self) -> None:
        rng = self.rng
        one, other = rng.choice(values.DTYPES), rng.choice(values.DTYPES)
        n = rng.choice([0, 1, 4, 8])
        dst, src = values.arrays(rng), values.arrays(rng)
        if rng.random() < 0.6:
            dst, src, one, other = np.zeros(n, "f4"), np.zeros(n, "f4"), "float32", "float32"
        where = rng.choice(values.KERNELS) if rng.random() < 0.3 else rng.choice([None, "plain"])
        name = rng.choice(["kernel_cast", "kernel_accumulate", "reduce", "norm2", "scale_by"])
        if name.startswith("kernel_"):
            self.call(name, getattr(_probe, name), dst, one, src, other, 1.0, where)
        elif name == "reduce":
            sources = [src, self.hostile(), None, src][: rng.randrange(5)]
            self.call(
                "kernel_reduce", _probe.kernel_reduce, dst, one, sources, other, kernels=where
            )
        elif name == "norm2":
            self.call("kernel_norm2", _probe.kernel_norm2, src, other, where)
        else:
            self.call("kernel_scale_by", _probe.kernel_scale_by, dst, one, np.ones(1), where)

    def call_codec(self) -> None:
        rng = self.rng
        codec, rows, row = rng.choice(values.CODECS), rng.choice([0, 1, 3]), rng.choice([1, 5, 300])
        size = self.call("codec_bytes", _probe.codec_bytes, codec, rows, row)
        data, dtype = values.arrays(rng), rng.choice(values.DTYPES)
        coded = np.zeros(size if isinstance(size, int) else rng.choice([0, 16, 64]), "u1")
        if rng.random() < 0.6:
            data, dtype = np.zeros((rows, row), "f4"), "float32"
        row = row if rng.random() < 0.8 else self.odd()
        name = rng.choice(["codec_encode", "codec_decode", "codec_round", "codec_sum"])
        if name == "codec_round":
            out, other = np.zeros((rows, 5), "f4"), rng.choice(values.DTYPES)
            self.call(name, _probe.codec_round, codec, data, dtype, row, out, other)
        elif name == "codec_sum":
            where, sums = rng.choice(values.KERNELS), np.zeros(5, "f4")
            more = (rng.choice([0, 1, self.odd()]), coded, sums, "float32", where)
            self.call(name, _probe.codec_sum, codec, data, dtype, row, *more)
        else:
            function = _probe.codec_encode if name == "codec_encode" else _probe.codec_decode
            self.call(name, function, codec, data, dtype, row, coded)

    def call_pack(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            bytes_ = rng.choice([128, 64, 0, 2**40])
            targets = [
                (4, 0, "float32"),
                (rng.choice([3, -1, 2**62]), rng.choice([64, 3]), "float16"),
            ]
            self.keep("plan", self.call("pack_plan", _probe.kernel_pack_plan, targets, bytes_))
            return
        src = [np.zeros(4, "f4"), rng.choice([None, np.zeros(3, "f2"), self.hostile()])]
        self.call(
            "pack", _probe.kernel_pack, lambda: self.some("plan"), np.zeros(128, "u1"), src, 1.0
        )

    def call_flat_make(self) -> None:
        made = self.call(
            "FlatParameter", _probe.FlatParameter, "u", lambda: self.some("comm"), self.specs,
            lambda: self.rng.choice([None, None, self.some("comm")]), 1.0, True, False,
        )  # fmt: skip
        self.keep("flat", made)

    def call_flat_alone(self) -> None:
        for _ in range(self.rng.randrange(1, 5)):
            alone = ["gather", "gather", "release"]
            name = self.rng.choice([*alone, "enter_forward"])
            name = self.rng.choice(
                [name, name, "leave_forward", "forward_failed", "unbind", "layout"]
                + ["unshard", "reshard"]
            )
            try:
                if name in alone:
                    self.call(name, getattr(_probe, name), self.some("flat"))
                else:
                    self.method("flat", name)
            except SystemError:
                raise
            except Exception:
                continue

    def call_flat_reduce(self) -> None:
        flat = self.some("flat")
        self.call("reduce", _probe.reduce, flat, lambda: self.full_tensors(flat), False)

    def call_flat_values(self) -> None:
        flat = self.some("flat")
        count = len(flat.layout()["params"])
        name = self.rng.choice(
            ["write", "read", "read", "grad_norm", "scale_grads", "read_blocks", "write_blocks"]
        )
        tensors = self.full_tensors(flat)
        args = {
            "write": [self.rng.randrange(count), tensors[0], self.rng.random() < 0.4],
            "read": [tensors, self.rng.random() < 0.4],
            "grad_norm": [bytes(self.rng.choice([count, 1])), 2.0],
            "scale_grads": [bytes([1] * count), 2.0],
        }.get(name, [[12] * count, tensors])
        self.call(f"flat.{name}", getattr(flat, name), *args)

    def call_flat_views(self) -> None:
        flat, i = self.some("flat"), self.rng.choice([0, 1])
        name = self.rng.choice(["shard_part", "grad_part", "shard_segment", "grad_segment"])
        if self.rng.random() < 0.3:
            numel = flat.layout()["params"][0]["numel"]
            capsule = self.call("flat.full_param", flat.full_param, 0, (numel,))
        else:
            capsule = self.call(f"flat.{name}", getattr(flat, name), i)
        if self.rng.random() < 0.7:
            torch.utils.dlpack.from_dlpack(capsule).view(-1)[:1].fill_(0)

    def call_flat_hooked(self) -> None:
        flat = self.some("flat")
        count = len(flat.layout()["params"])
        name = self.rng.choice(
            "grad_bits pack_grads take_sums adopt_grads thaw renew_grads note_full".split()
        )
        reduce_bytes = flat.layout()["reduce_bytes"]
        args = {
            "pack_grads": [torch.zeros(reduce_bytes, dtype=torch.uint8)],
            "take_sums": [[torch.zeros(flat.layout()["segments"][0]["piece_numel"])], bytes(count)],
            "thaw": [bytes([1] * len(flat.layout()["segments"]))],
            "renew_grads": [[self.rng.choice([None, torch.zeros(3)]) for _ in range(count)]],
        }.get(name, [])
        self.call(f"flat.{name}", getattr(flat, name), *args)

    def call_flat_bind(self) -> None:
        flat = self.some("flat")
        count = len(flat.layout()["params"])
        full = [self.rng.choice([None, torch.zeros(3), self.hostile()]) for _ in range(count)]
        dictionary: dict[Any, Any] = {self.hostile(): 1} if self.rng.random() < 0.3 else {}
        site = (dictionary, self.mostly("w"), self.mostly(0), self.odd())
        seen = (self.mostly(lambda: torch.zeros(3)), self.mostly(None), self.mostly(lambda: (0,)))
        self.call(
            "flat.bind", flat.bind, full, [site], [seen], self.listed([0, self.hostile()][:1])
        )

    def call_replace(self) -> None:
        name = self.rng.choice(["replace_param", "replace_grad", "replace_full", "place_param"])
        if name == "place_param":
            self.method("flat", name, 0, {}, "w")
        else:
            self.method("flat", name, 0, lambda: values.tensors(self.rng, 3))

    def call_flat_hook(self) -> None:
        kind = self.rng.choice(
            ["pre_forward", "post_forward", "pre_backward", "input_done", "grad"]
        )
        made = self.method("flat", "hook", kind, self.rng.choice([0, 1, -1]))
        self.keep("hook", made)

    def call_hook(self) -> None:
        hook = self.some("hook")
        inside = values.nested(self.rng, lambda: values.tensors(self.rng, 3))
        output = values.nested(self.rng, self.odd) if self.rng.random() < 0.5 else inside
        shapes: list[Any] = [(), (None,), (None, (inside,)), (None, (inside,), output)]
        args = self.rng.choice(shapes + [(output,), (torch.zeros(3),)])
        self.log(f"{'  ' * self.depth}{hook!r}{short(args)}")
        if self.rng.random() < 0.1:
            hook(*args, odd=self.odd())
        hook(*args)

    def call_pass(self) -> None:
        """Call the hooks of one unit in the order of a step, sometimes with another call in
        between."""
        flat = self.rng.choice(self.pool["flat"] or [self.new_flat()])
        grad = torch.zeros(3, requires_grad=True)
        output = [grad * 2, (grad + 1)[:]]
        self.log(f"{'  ' * self.depth}pass of {flat.name!r:.40}")
        flat.hook("pre_forward")(None, (grad,))
        self.mischief()
        flat.hook("post_forward")(None, (grad,), self.listed(output))
        self.mischief()
        if self.rng.random() < 0.5 and output:
            sum(o.sum() for o in output).backward()
        flat.hook("pre_backward")(None)
        flat.hook("grad", 0)(None)
        flat.hook("input_done")(None)

    def call_tree_make(self) -> None:
        flats = self.listed([self.some("flat") for _ in range(self.rng.randrange(3))])
        if self.rng.random() < 0.1:
            flats.append(self.hostile())
        depths = self.listed([0] * len(flats))
        made = self.call(
            "Tree", _probe.Tree, flats, depths, self.torch_functions, 0, False,
            self.rng.choice([0, 1, 3]), 0, False, False,
        )  # fmt: skip
        self.keep("tree", made)

    def call_tree(self) -> None:
        name = self.rng.choice(
            ["memory", "trace", "clear_trace", "defer_reduces", "forget", "clip", "detach"]
            + ["references", "share_grads", "announce", "before_hook", "meet"]
        )
        args = {
            "clip": [(None,), 2.0, 1.0, lambda: torch.zeros(2, dtype=torch.float64)],
            "share_grads": [self.rng.choice([(0,), (0, 1), (), (5,), (-1,)])],
            "announce": [self.rng.choice([0, 1, -1]), self.rng.choice([0, 1, -1, 9])],
            "before_hook": [self.rng.choice([0, 1, -1]), self.rng.choice(["hook", "", "%s", 1])],
        }
        if self.rng.random() < 0.1:
            name = "close"
        self.method("tree", name, *args.get(name, []))

    def call_find(self) -> None:
        """Find objects that only the garbage collector can find: the tree that a unit made for
        itself, and hooks."""
        found = [o for o in gc.get_objects() if isinstance(o, TYPES)]
        for o in list(found[:20]):
            found += [r for r in gc.get_referents(o) if isinstance(r, TYPES)]
        if found:
            one = self.rng.choice(found)
            kinds = zip(TYPES, ["comm", "flat", "tree", "hook"], strict=True)
            self.keep(next(kind for type_, kind in kinds if type(one) is type_), one)
            self.log(f"found {type(one).__name__}")

    def call_drop(self) -> None:
        several = self.pool[self.rng.choice(list(self.pool))]
        if several:
            several.pop(self.rng.randrange(len(several)))
        if self.rng.random() < 0.3:
            gc.collect()


def short(given: Any) -> str:
    def one(value: Any) -> str:
        if isinstance(value, (int, float, str, bytes, type(None))):
            return f"{value!r:.40}"
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}[{len(value)}]"
        if isinstance(value, np.ndarray):
            return f"array({value.dtype}, {value.shape}, {value.flags.writeable})"
        return type(value).__name__

    if isinstance(given, dict):
        return str({key: one(value) for key, value in given.items()})
    return "(" + ", ".join(one(value) for value in given) + ")"


# --- processes -----------------------------------------------------------------------------------


def run_batch(seed: int, calls: int, log: Callable[[str], None]) -> None:
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda *args: None
    threading.excepthook = lambda *args: None
    sys.setswitchinterval(1e-5)
    caller = Caller(seed, log)
    while caller.number < calls:
        caller.one_call()
    log("end of the batch")
    for several in caller.pool.values():
        several.clear()
    gc.collect()


@dataclass
class Fault:
    seed: int
    how: str
    last: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.how}\n{self.last}"


def fork_batch(seed: int, calls: int, folder: Path) -> Fault | None:
    """Run a batch in a forked process. Return None if the process ended without a fault."""
    path = folder / f"{seed}.log"
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            faulthandler.enable(file)
            faulthandler.register(signal.SIGUSR1, file, chain=False)
            os.chdir(folder)  # some calls write files with random names
            run_batch(
                seed, calls, lambda text: os.write(file, text.encode(errors="replace") + b"\n")
            )
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    how = watch(pid, path)
    if how is None:
        path.unlink()
        return None
    text = path.read_text(errors="replace") if path.exists() else ""
    return Fault(seed, how, text[-6000:])


def watch(pid: int, path: Path) -> str | None:
    grown, size = time.monotonic(), -1
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        now = path.stat().st_size if path.exists() else 0
        if now != size:
            grown, size = time.monotonic(), now
        if time.monotonic() - grown > STUCK_S:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(1)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"no call in {STUCK_S:g} s"
        time.sleep(0.01)
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.WEXITSTATUS(status)
    return None if code == 0 else f"exit status {code}"


def run(calls: int, seed: int, seconds: float = float("inf")) -> tuple[int, list[Fault]]:
    """Make calls in batches until their number or the time is reached. Return the number of calls
    and the faults."""
    begun, made, faults = time.monotonic(), 0, []
    with tempfile.TemporaryDirectory() as folder:
        while made < calls and time.monotonic() - begun < seconds:
            fault = fork_batch(seed, min(BATCH, calls - made), Path(folder))
            faults += [fault] if fault else []
            made += BATCH
            seed += 1
    return made, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=int, help="the seed of one batch, in this process")
    parser.add_argument("--verbose", action="store_true", help="print faults as they come")
    options = parser.parse_args()
    if options.replay is not None:
        faulthandler.enable()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            run_batch(options.replay, BATCH, lambda text: print(text, flush=True))
        return 0
    made, faults, seed = 0, 0, options.seed
    while made < options.calls:
        done, some = run(min(BATCH * 10, options.calls - made), seed)
        made, seed, faults = made + done, seed + 10, faults + len(some)
        for fault in some:
            print(fault, flush=True)
        print(f"{made} calls, {faults} faults", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
