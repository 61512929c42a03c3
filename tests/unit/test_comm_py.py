"""Tests of Comm as a Python type: one rank, callbacks, errors, and the choice of a communicator."""

from __future__ import annotations

import datetime
import gc
import inspect
import math
import multiprocessing
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fsdpc
from fsdpc import _C
from fsdpc._comm import bootstrap as _bootstrap


class Loopback:
    """Callbacks that record their calls and act as if the other ranks held the same data as this
    rank.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.calls: list[tuple] = []
        self.error: BaseException | None = None

    def record(self, *call) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def all_gather(self, memory, piece_bytes, what):
        self.record("all_gather", memory.nbytes, piece_bytes, what)
        pieces = memory.reshape(self.world, piece_bytes)
        pieces[:] = pieces[self.rank]

    def reduce_scatter(self, memory, piece_numel, dtype, what):
        self.record("reduce_scatter", memory.nbytes, piece_numel, dtype, what)
        whole = torch.from_numpy(memory).view(getattr(torch, dtype)).view(self.world, piece_numel)
        whole[self.rank] *= self.world

    def all_reduce(self, memory, numel, dtype, op, what):
        self.record("all_reduce", memory.nbytes, numel, dtype, op, what)

    def broadcast(self, memory, root, what):
        self.record("broadcast", memory.nbytes, root, what)
        memory[:] = 9

    def barrier(self, what):
        self.record("barrier", what)


@pytest.fixture
def loopback():
    target = Loopback(1, 3)
    return target, _C.Comm.c10d(1, 3, target)


# --- one rank --------------------------------------------------------------------------------


def test_self():
    comm = _C.Comm.self_()
    assert (comm.rank, comm.world, comm.kind, comm.closed) == (0, 1, "self", False)
    values = np.arange(5, dtype=np.float32)
    before = values.copy()
    comm.barrier()
    comm.agree("anything", "start")
    comm.all_gather(values)
    comm.reduce_scatter(values)
    for op in ("sum", "max", "min"):
        comm.all_reduce(values, op=op)
    comm.broadcast(values, root=0, what="values")
    assert np.array_equal(values, before)


def test_close():
    comm = _C.Comm.self_()
    assert repr(comm) == "<fsdpc Comm self, rank 0 of 1>"
    comm.close()
    comm.close()
    assert comm.closed and "closed" in repr(comm) and comm.world == 1
    for call in (
        comm.barrier,
        lambda: comm.agree(""),
        lambda: comm.all_reduce(np.ones(2)),
    ):
        with pytest.raises(fsdpc.StateError, match="closed"):
            call()


def test_shm_of_one_rank():
    comm = _C.Comm.shm(0, 1, "fsdpc-test-one", 5.0)
    assert (comm.kind, comm.world) == ("shm", 1)
    values = np.full(16, 3, np.float32)
    comm.all_reduce(values)
    comm.all_gather(values)
    assert values.tolist() == [3] * 16


@pytest.mark.parametrize(
    "args, error",
    [
        ((0, 0, "x", 1.0), ValueError),
        ((2, 2, "x", 1.0), ValueError),
        ((-1, 2, "x", 1.0), ValueError),
        ((0, 1, "x", 0.0), ValueError),
        ((0, 1, "", 1.0), ValueError),
        ((0, 1, "x", float("nan")), ValueError),
        ((0, 1, 5, 1.0), TypeError),
        ((0, 1, "x"), TypeError),
        ((0, 2**40, "x", 1.0), OverflowError),
    ],
)
def test_shm_arguments(args, error):
    with pytest.raises(error):
        _C.Comm.shm(*args)


def test_shm_peer_that_never_comes():
    with pytest.raises(fsdpc.CommTimeout, match="rank 1"):
        _C.Comm.shm(0, 2, "fsdpc-test-lonely", 0.2)


class Alarm(Exception):
    pass


def test_signal_handler_ends_a_wait():
    def ring(number, frame):
        raise Alarm("now")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Alarm, match="now"):
            _C.Comm.shm(0, 2, "fsdpc-test-alarm", 20.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_not_made_by_hand():
    with pytest.raises(TypeError):
        _C.Comm()
    with pytest.raises(TypeError):
        type("Sub", (_C.Comm,), {})
    with pytest.raises(TypeError):
        _C.Comm.world = 3


def test_properties_of_kinds(loopback):
    def properties(comm):
        return comm.one_memory, comm.names_absentees, comm.rounds_sums

    assert properties(_C.Comm.self_()) == (False, True, False)
    assert properties(_C.Comm.shm(0, 1, "fsdpc-test-kinds", 5.0)) == (True, True, False)
    assert properties(loopback[1]) == (False, False, False)


def test_text_of_a_deadline():
    text = _C.Comm.late_text(3, 0.5, "gather of unit a", [1, 2])
    limit = "(FSDPC_TIMEOUT sets this limit)"
    assert text == f"rank 3 waited 0.5 s in gather of unit a for ranks 1 and 2 {limit}"
    text = _C.Comm.late_text(3, 600, "gather", [], "; more")
    assert text == f"rank 3 waited 600 s in gather for the other ranks {limit}; more"
    text = _C.Comm.late_text(0, 1, "gather", range(1, 200))
    assert "for ranks 1, 2, 3, " in text and " and 183 more (" in text
    for bad in ([0, 1, "x"], [0, 1, "x", ["y"]], [0, 1, "x", 5]):
        with pytest.raises(TypeError):
            _C.Comm.late_text(*bad)
    assert _C.DEFAULT_TIMEOUT == 600
    assert _C.Comm.nccl.__text_signature__.count("timeout=600.0") == 1


# --- callbacks -------------------------------------------------------------------------------


def test_callbacks_get_what_was_asked(loopback):
    target, comm = loopback
    assert (comm.rank, comm.world, comm.kind) == (1, 3, "c10d")
    comm.all_gather(np.zeros(6, np.int16), "gather of unit a")
    comm.reduce_scatter(torch.zeros(9, dtype=torch.bfloat16), what="r")
    comm.all_reduce(np.zeros(4), op="max")
    comm.broadcast(torch.zeros(2, 2, dtype=torch.int64), root=2)
    comm.barrier("end")
    assert target.calls == [
        ("all_gather", 12, 4, "gather of unit a"),
        ("reduce_scatter", 18, 3, "bfloat16", "r"),
        ("all_reduce", 32, 4, "float64", "max", "all_reduce"),
        ("broadcast", 32, 2, "broadcast"),
        ("barrier", "end"),
    ]


def test_callbacks_work_on_the_memory(loopback):
    _, comm = loopback
    values = np.arange(6, dtype=np.float32)
    comm.all_gather(values)
    assert values.tolist() == [2, 3, 2, 3, 2, 3]
    values = torch.arange(6, dtype=torch.float16)
    comm.reduce_scatter(values)
    assert values[2:4].tolist() == [6, 9]
    values = np.zeros(3, np.uint8)
    comm.broadcast(values, root=0)
    assert values.tolist() == [9, 9, 9]


def test_callback_exception_is_the_cause(loopback):
    target, comm = loopback
    target.error = ZeroDivisionError("by 0\nsecond line")
    with pytest.raises(fsdpc.CommError, match="ZeroDivisionError: by 0") as caught:
        comm.all_reduce(np.zeros(2), what="norm")
    assert caught.value.__cause__ is target.error
    assert "norm" in str(caught.value) and "second line" not in str(caught.value)
    target.error = None
    with pytest.raises(fsdpc.CommError, match="by 0"):  # the communicator stays broken
        comm.barrier()
    assert len(target.calls) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt("now"), SystemExit(3)])
def test_callback_exits_pass(loopback, error):
    target, comm = loopback
    target.error = error
    with pytest.raises(type(error)) as caught:
        comm.barrier()
    assert caught.value is error
    target.error = None
    with pytest.raises(fsdpc.CommError, match=f"rank 1 gave up: .*{type(error).__name__}"):
        comm.barrier()


def test_missing_callback():
    comm = _C.Comm.c10d(0, 2, object())
    with pytest.raises(fsdpc.CommError, match="AttributeError") as caught:
        comm.barrier()
    assert isinstance(caught.value.__cause__, AttributeError)


def test_agree_over_callbacks(loopback):
    _, comm = loopback
    comm.agree("same text", "start")


def test_callbacks_are_released():
    target = Loopback(0, 2)
    gone = weakref.ref(target)
    comm = _C.Comm.c10d(0, 2, target)
    target.comm = comm  # a cycle through the communicator
    watch = weakref.ref(comm)
    del target
    gc.collect()
    assert gone() is not None
    del comm
    gc.collect()
    assert gone() is None and watch() is None


@pytest.mark.parametrize("args", [(0, 0), (2, 2), (-1, 2)])
def test_c10d_arguments(args):
    target = Loopback(0, 2)
    count = sys.getrefcount(target)
    with pytest.raises(ValueError):
        _C.Comm.c10d(*args, target)
    assert sys.getrefcount(target) == count


# --- arrays ----------------------------------------------------------------------------------


def test_refused_arrays(loopback):
    target, comm = loopback
    fixed = np.zeros(6)
    fixed.flags.writeable = False
    for array, error, text in [
        (np.zeros((3, 4)).T, ValueError, "not contiguous"),
        (fixed, ValueError, "read-only"),
        (b"abcdef", ValueError, "read-only"),
        (np.zeros(7), ValueError, "7 elements, which is not a multiple of 3 ranks"),
        (np.zeros(6, np.int32), TypeError, "can be reduced"),
        ([1.0, 2.0, 3.0], TypeError, "expected a tensor or an array, not list|array"),
    ]:
        with pytest.raises(error, match=text):
            comm.reduce_scatter(array)
    with pytest.raises(ValueError, match="op must be 'sum', 'max' or 'min', not 'mean'"):
        comm.all_reduce(np.zeros(3), op="mean")
    with pytest.raises(ValueError, match="root"):
        comm.broadcast(np.zeros(3), root=3)
    assert target.calls == []


def test_empty_arrays(loopback):
    _, comm = loopback
    for call in (comm.all_gather, comm.reduce_scatter, comm.all_reduce, comm.broadcast):
        call(np.zeros(0, np.float32))


def test_abort_breaks(loopback):
    target, comm = loopback
    comm.abort("ValueError: told so")
    with pytest.raises(fsdpc.CommError, match="told so"):
        comm.barrier()
    assert target.calls == []


# --- exceptions ------------------------------------------------------------------------------

BASES = {
    "CommError": (RuntimeError,),
    "PeerError": (_C.CommError,),
    "CommTimeout": (_C.CommError, TimeoutError),
    "MismatchError": (_C.CommError, ValueError),
    "StateError": (RuntimeError,),
    "OutOfMemoryError": (MemoryError,),
}


@pytest.mark.parametrize("name", BASES)
def test_exception_classes(name):
    kind = getattr(fsdpc, name)
    assert kind is getattr(_C, name)
    assert kind.__bases__ == BASES[name]
    assert kind.__module__ == "fsdpc" and kind.__doc__
    error = pickle.loads(pickle.dumps(kind("text")))
    assert type(error) is kind and error.args == ("text",)


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )


def test_import_is_silent_and_single():
    done = run_python("""
        import sys
        before = set(sys.modules)
        import fsdpc._C
        assert "torch" not in sys.modules
        del sys.modules["fsdpc._C"]
        try:
            import fsdpc._C
        except ImportError as error:
            print(error)
    """)
    assert (done.stdout.strip(), done.stderr) == ("fsdpc._C is already loaded in this process", "")


@pytest.mark.long
def test_objects_outlive_the_interpreter():
    done = run_python("""
        import atexit, numpy as np, fsdpc._probe as C, torch
        comm = C.Comm.shm(0, 1, "fsdpc-test-end", 5.0)
        shared = torch.utils.dlpack.from_dlpack(C.export_dlpack(np.zeros(4096)))
        class Calls:
            pass
        wire = C.Comm.c10d(0, 1, Calls())
        Calls.keep = (wire, shared)
    """)
    assert (done.returncode, done.stderr) == (0, "")


# --- documentation and stubs -----------------------------------------------------------------

METHODS = [
    "shm",
    "c10d",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "barrier",
    "agree",
    "abort",
    "close",
]


@pytest.mark.parametrize("name", METHODS)
def test_signatures_can_be_inspected(name):
    method = getattr(_C.Comm, name)
    assert inspect.signature(method)
    assert method.__doc__.strip()


def test_signatures_tell_the_truth():
    parameters = inspect.signature(_C.Comm.all_reduce).parameters
    assert list(parameters) == ["self", "array", "op", "what"]
    assert (parameters["op"].default, parameters["what"].default) == ("sum", "")


# --- the choice of a communicator ------------------------------------------------------------


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "1s"])
def test_bad_timeout(monkeypatch, text):
    monkeypatch.setenv("FSDPC_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"FSDPC_TIMEOUT.*{text}"):
        _bootstrap.read_timeout()


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf])
def test_bad_process_timeout(seconds):
    with pytest.raises(ValueError, match="set_timeout"):
        _C.set_timeout(seconds)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("layers.0", lambda flat, tree: flat.read([None])),
        ("layers.0", lambda flat, tree: flat.thaw(b"\x00")),
        ("the tree", lambda flat, tree: tree.announce(0, 0)),
        ("the tree", lambda flat, tree: tree.clip((None,), 2.0, 1.0, torch.zeros(2))),
    ],
)
def test_a_thread_waits_for_another_one_until_the_process_deadline(name, call):
    """The other thread is in a collective of its unit, so the unit and its tree are in use."""
    inside, leave = threading.Event(), threading.Event()

    class Calls:
        def all_gather(self, memory, piece_bytes, what):
            inside.set()
            assert leave.wait(60)

        barrier = reduce_scatter = all_reduce = broadcast = all_gather

    specs = [("w", 8, "float32", "float32", "float32", True)]
    flat = _C.FlatParameter("layers.0", _C.Comm.c10d(0, 2, Calls()), specs)
    tree = _C.Tree([flat], [0])
    reader = threading.Thread(target=lambda: flat.read([np.empty(8, np.float32)]))
    _C.set_timeout(0.1)
    try:
        reader.start()
        assert inside.wait(60)
        begin = time.monotonic()
        with pytest.raises(_C.StateError, match=f"{name}: another thread .*FSDPC_TIMEOUT"):
            call(flat, tree)
        assert time.monotonic() - begin < 30
    finally:
        _C.set_timeout(_C.DEFAULT_TIMEOUT)
        leave.set()
        reader.join()
        tree.close()


def test_timeout(monkeypatch):
    monkeypatch.delenv("FSDPC_TIMEOUT", raising=False)
    assert _bootstrap.read_timeout() == 600.0
    monkeypatch.setenv("FSDPC_TIMEOUT", "")
    assert _bootstrap.read_timeout() == 600.0
    monkeypatch.setenv("FSDPC_TIMEOUT", "2.5")
    assert _bootstrap.read_timeout() == 2.5


def test_the_deadline_ends_a_wait_before_torchs_own_does(monkeypatch, tmp_path):
    """torch's collectives end without naming a rank, so fsdpc's deadline must come first."""
    monkeypatch.setenv("FSDPC_TIMEOUT", "")
    limit = datetime.timedelta(seconds=20)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
    try:
        assert _bootstrap.read_timeout() == 18.0
        monkeypatch.setenv("FSDPC_TIMEOUT", "300")
        assert _bootstrap.read_timeout() == 300.0
    finally:
        dist.destroy_process_group()


def test_kind(monkeypatch):
    monkeypatch.delenv("FSDPC_COLLECTIVES", raising=False)
    assert _bootstrap._read_kind(None) == "auto"
    monkeypatch.setenv("FSDPC_COLLECTIVES", "c10d")
    assert _bootstrap._read_kind(None) == "c10d"
    assert _bootstrap._read_kind("shm") == "shm"
    monkeypatch.setenv("FSDPC_COLLECTIVES", "nccl")
    assert _bootstrap._read_kind(None) == "nccl"
    monkeypatch.setenv("FSDPC_COLLECTIVES", "mpi")
    with pytest.raises(
        ValueError, match="must be one of auto, shm, wire, c10d, nccl, but is 'mpi'"
    ):
        _bootstrap._read_kind(None)


def test_the_host_is_the_same_for_neighbours():
    here = _bootstrap.this_host()
    with multiprocessing.get_context("fork").Pool(1) as other:
        assert other.apply(_bootstrap.this_host) == here
