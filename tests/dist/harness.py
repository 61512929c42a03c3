"""Run a function on several ranks of this host, quickly and with a deadline.

One process per pytest run, the root, has torch and fsdpc imported. Each process of pytest-xdist has
a template process. The template is forked from the root, imports test modules, and forks the ranks
of tests, which takes a few milliseconds per rank. Each file gets new ranks, so nothing that a file
does in a rank survives in the next file. No thread of pytest's own process is ever forked.

Items of one file that `@ranks` runs on the same number of ranks with the same environment share
their ranks. The ranks run one item after the other, each in a new process group. A third of an
item's time is work that a process does only once, and sharing saves this time. New ranks are forked
after an item that raised, that left one of its functions in a module, or that is `alone`.

Each rank has one intra-op thread, a gloo process group over a file store, a short FSDPC_TIMEOUT,
FSDPC_POISON=1 and its own log. The template watches the ranks: it collects their results, delivers
the signals that tests ask for, prints every Python stack when the deadline passes, and leaves no
process behind, even if pytest is killed.

    @ranks(2, 3)                          # once on 2 ranks, once on 3
    @pytest.mark.parametrize("bias", [True, False])
    def test_linear(rank, world, bias):   # runs in every rank; the test fails if any rank raises
        ...

    outcomes = run_ranks(function, 3, faults=True, phase="forward")   # ranks may die: list[Outcome]

Functions are found by module and name, so they must stand at the top level of a test module; their
arguments and results are pickled. A rank that has returned waits until all ranks have returned, so
that no rank sees another rank leave; a rank that raises ends at once.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import os
import pickle
import random
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

DEADLINE_S = float(os.environ.get("FSDPC_TEST_DEADLINE", "120"))
PEER_TIMEOUT_S = 30.0  # FSDPC_TIMEOUT of the ranks: below the deadline, so that ranks raise first
GRACE_S = 5.0  # how long the other ranks may go on after the first one failed
DUMP_S = 10.0  # how long a rank may take to begin to print its stacks before it is killed
DUMPED_S = 0.3  # how long a rank may take to print the rest of its stacks
TEMPLATE_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for GPUs must not start CUDA before the fork
}
# Modules that the root imports, so that not every rank has to import them.
LOADED_BY_RANKS = """
    encodings.ascii jitter fsdpc._fsdp2.module fsdpc.plan.report fsdpc._companions.foreign
    fsdpc._companions.runs fsdpc._companions.stepping torch.profiler._cupti_monitor
    torch.distributed.checkpoint.state_dict torch.distributed.checkpoint._fsspec_filesystem
    torch.utils.serialization.config
""".split()


class RankFailure(AssertionError):
    """A rank of a test raised, died or did not end in time; the text tells how each rank failed."""


@dataclasses.dataclass
class Outcome:
    """How one rank ended. Times are seconds of CLOCK_MONOTONIC, the same clock in all ranks."""

    rank: int
    value: Any = None
    error: str | None = None  # "Type: text" of the exception that left the function
    error_types: tuple[str, ...] = ()  # names of the exception's class and of the class's bases
    traceback: str = ""
    finished_at: float = 0.0  # when the function returned or raised
    exit_signal: int | None = None  # the signal that ended the process; None: no signal
    signalled_at: float | None = None  # when the signal of signal_rank() was sent; None: never
    stopped: bool = False  # SIGSTOP was sent to the rank, and no SIGCONT after it
    expired: bool = False  # the rank was still running at the deadline
    changed: bool = False  # a library still has a function or class that a test set in it
    log: str = ""

    @property
    def returned(self) -> bool:
        return self.error is None and self.exit_signal is None and not self.expired


# --- in the tests --------------------------------------------------------------------------------


def ranks(
    *worlds: int,
    timeout: float = DEADLINE_S,
    env: dict[str, str] | None = None,
    alone: bool = False,
):
    """Return a decorator that runs the test function on each rank, once per world size.

    The function gets `rank`, `world` and the arguments that pytest parametrises. An exception of
    any rank fails the test. `env` is set in the ranks before the function is called. With `alone`
    the test gets new ranks, which end with the test. A test needs `alone` if it changes or measures
    state of a process that outlives the test.
    """
    import pytest

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        kept = [p for name, p in signature.parameters.items() if name not in ("rank", "world")]
        world_parameter = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)

        def run(**arguments: Any) -> None:
            world = arguments.pop("world")
            run_ranks(wrapper, world, timeout=timeout, env=env, shared=not alone, **arguments)

        wrapper = functools.wraps(function)(run)
        del wrapper.__wrapped__  # pytest would look through it and ask for fixtures rank and world
        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[
                *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept),
                world_parameter,
            ]
        )
        wrapper.rank_function = function  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", worlds)(wrapper)

    return decorate


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *,
    timeout: float = DEADLINE_S,
    env: dict[str, str] | None = None,
    faults: bool = False,
    on_device: bool = True,
    shared: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Run `function(rank, world, **arguments)` on `world` ranks.

    Returns the ranks' return values, in rank order, and raises RankFailure if a rank did not
    return. With `faults=True` ranks may raise, die or be stopped: the result is list[Outcome], and
    only a rank that is still running at the deadline is a failure. With `on_device=False` the ranks
    have no simulated GPU, whatever `pytest --gpu` says. With `shared`, ranks of an earlier call may
    run this call, and later calls may run on these ranks.
    """
    environment = {
        "FSDPC_TIMEOUT": str(PEER_TIMEOUT_S),
        "FSDPC_POISON": os.environ.get("FSDPC_POISON", "1"),
        **(gpu_environment(function.__module__) if on_device else {}),
        **(env or {}),
        **host_environment(world, env or {}),
    }
    # If `new`, the call gets ranks of its own. A process can enter the network namespace of a host
    # only once, and shared ranks on a real GPU have not been tried.
    new = "MASTER_ADDR" in environment or os.environ.get("FSDPC_TEST_GPU") == "cuda"
    request = {
        "file": inspect.getfile(getattr(function, "rank_function", function)),
        "module": function.__module__,
        "function": function.__name__,
        "world": world,
        "timeout": timeout,
        "env": environment,
        "faults": faults,
        "shared": shared and not new,
        "on_device": on_device,
        "path": list(sys.path),
        "arguments": pickle.dumps(arguments),
    }
    outcomes = Template.instance().call(request)
    if faults and not any(o.expired for o in outcomes):
        return outcomes
    if not all(o.returned for o in outcomes):
        only_expired = all(o.returned or o.expired for o in outcomes)
        raise RankFailure(
            describe(outcomes, f"no end within {timeout:g} s" if only_expired else "a rank failed")
        )
    return [o.value for o in outcomes]


def gpu_environment(module: str = "") -> dict[str, str]:
    """Return what `pytest --gpu` adds to the environment of ranks that run a module's functions."""
    if os.environ.get("FSDPC_TEST_GPU") == "cuda":
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    if os.environ.get("FSDPC_TEST_GPU") != "sim":
        return {}
    import env
    from applies import UNWATCHED

    name = module.rpartition(".")[2]
    watched = name not in UNWATCHED and name in os.environ.get("FSDPC_TEST_WATCHED", name).split()
    watch = {} if watched else {"FSDPC_TEST_WATCH": "0"}
    return env.environment(**watch, SIMNCCL_RANK_ORDER="1")  # sums in rank order, as references do


def host_environment(world: int, env: dict[str, str]) -> dict[str, str]:
    """Return what `pytest --hosts N` adds to the environment: the ranks are on several hosts."""
    hosts = int(os.environ.get("FSDPC_TEST_HOSTS", "1"))
    if hosts == 1 or world == 1 or "FSDPC_TEST_PLACES" in env:
        return {}
    import on_hosts

    wanted = {"FSDPC_COLLECTIVES": "auto"} if env.get("FSDPC_COLLECTIVES") == "shm" else {}
    return {**on_hosts.environment_for(hosts, world), **wanted}


def describe(outcomes: list[Outcome], headline: str) -> str:
    """Describe what happened to the failed ranks; the rank that failed first comes first."""
    failed = [o for o in outcomes if not o.returned]
    failed.sort(key=lambda o: o.finished_at or float("inf"))
    lines = [f"{headline} ({len(failed)} of {len(outcomes)} ranks, first to fail first)"]
    lines += [f"rank {outcome.rank} {fate(outcome)}" for outcome in failed]
    for outcome in failed:
        lines.append(f"--- rank {outcome.rank} {fate(outcome)}")
        lines += [outcome.traceback] if outcome.error is not None else []
        if outcome.log.strip():
            lines.append(f"log of rank {outcome.rank}:\n{outcome.log.rstrip()[-6000:]}")
    return "\n".join(lines)


def fate(outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"raised {outcome.error}"
    return "was still running" if outcome.expired else f"died of signal {outcome.exit_signal}"


def template_environment() -> dict[str, str]:
    return {**os.environ, **TEMPLATE_ENV, "PYTHONPATH": os.pathsep.join(sys.path)}


class Root:
    """Handle of the process that templates are forked from.

    torch is imported only once for all processes of pytest-xdist. The root imports nothing before
    the first template is requested.
    """

    VARIABLE = "FSDPC_TEST_ROOT"  # environment variable: tells child processes the root's socket
    _process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # the kernel chooses the name, and there is no file
            listener.listen()
            cls._process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                pass_fds=[listener.fileno()],
                env=template_environment(),
                start_new_session=True,  # Ctrl-C reaches only pytest, which then closes its sockets
            )
            os.environ[cls.VARIABLE] = listener.getsockname().hex()
        atexit.register(cls.close)

    @classmethod
    def close(cls) -> None:
        if cls._process is not None:
            cls._process.kill()
            cls._process.wait()
            cls._process = None
            del os.environ[cls.VARIABLE]

    @classmethod
    def connect(cls) -> socket.socket:
        if cls.VARIABLE not in os.environ:
            cls.start()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(bytes.fromhex(os.environ[cls.VARIABLE]))
        return connection


class Template:
    """Handle of this process's template, kept until pytest ends."""

    _instance: Template | None = None

    @classmethod
    def instance(cls) -> Template:
        if cls._instance is not None and cls._instance.ended(0):
            cls.close()
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    @classmethod
    def close(cls) -> None:
        if cls._instance is not None:
            cls._instance.socket.close()
            if not cls._instance.ended(5):
                signal.pidfd_send_signal(cls._instance.process, signal.SIGKILL)
                cls._instance.ended(5)
            os.close(cls._instance.process)
            cls._instance = None

    def __init__(self) -> None:
        self.socket = Root.connect()
        self.socket.settimeout(DEADLINE_S)  # the first template waits for the imports of the root
        send(self.socket, pickle.dumps(template_environment()))
        self.process = os.pidfd_open(pickle.loads(receive(self.socket)))

    def ended(self, seconds: float) -> bool:
        return bool(select.select([self.process], [], [], seconds)[0])

    def call(self, request: dict[str, Any]) -> list[Outcome]:
        self.socket.settimeout(request["timeout"] + 60)
        try:
            send(self.socket, pickle.dumps(request))
            return [Outcome(**fields) for fields in pickle.loads(receive(self.socket))]
        except BaseException as error:  # Ctrl-C, too: closing the socket ends the ranks
            Template.close()
            if isinstance(error, (OSError, EOFError)):
                raise RankFailure(f"the template process ended or hung: {error!r}") from error
            raise


# --- in the ranks --------------------------------------------------------------------------------

_channel: socket.socket | None = None


def signal_rank(rank: int, number: int, after: float = 0.0) -> None:
    """Ask the template, from a rank, to send a signal to a rank after `after` seconds."""
    assert _channel is not None
    send(_channel, pickle.dumps(("signal", rank, int(number), after)))


def shorten_deadlines(seconds: float = 1.0, *, here: bool = True) -> None:
    """Collective. If `here`, limit this rank's waits in communicators of kind "shm" to `seconds`.

    The call first waits for all ranks, however slow they are. After the call, a long wait means
    that the test keeps a rank away. Other kinds of communicators keep FSDPC_TIMEOUT.
    """
    import torch.distributed as dist

    from fsdpc import _probe
    from fsdpc._comm import bootstrap

    dist.barrier()
    for comm in bootstrap._own_comms() if here else []:
        if comm.kind == "shm":
            _probe.set_deadline(comm, seconds)


def die() -> None:
    """End this rank with SIGKILL at once."""
    signal_rank(own_rank(), signal.SIGKILL)
    time.sleep(600)


def own_rank() -> int:
    return int(os.environ["RANK"])


def run_rank(channel: socket.socket, request: dict[str, Any], rank: int, folder: str) -> None:
    """Run the calls of a forked rank; this function never returns."""
    global _channel
    _channel = channel
    log = os.open(os.path.join(folder, f"log{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    before = Before() if request["shared"] else None
    while True:
        fields = fields_of(request, rank, folder)
        if before and "value" in fields:
            fields["changed"] = before.changed()
        sys.stdout.flush()
        sys.stderr.flush()
        send(channel, pickle.dumps(("report", fields)))
        if "error" in fields:
            os._exit(0)
        try:  # fails when the template closes the channel to end the rank
            request, folder = pickle.loads(receive(channel))
        except (EOFError, OSError):
            os._exit(0)
        assert before
        before.come_back()


def fields_of(request: dict[str, Any], rank: int, folder: str) -> dict[str, Any]:
    """Call the function once, and return the report for the template."""
    fields: dict[str, Any] = {"rank": rank}
    try:
        fields["value"] = call_function(request, rank, folder)
        fields["finished_at"] = time.monotonic()
        if "on_gpu" in sys.modules:  # host memory, as the template must not use CUDA
            fields["value"] = sys.modules["on_gpu"].in_host_memory(fields["value"])
        pickle.dumps(fields)
    except BaseException as error:
        fields.pop("value", None)
        fields["finished_at"] = time.monotonic()
        fields["error"] = f"{type(error).__name__}: {error}"
        fields["error_types"] = tuple(c.__name__ for c in type(error).__mro__)
        fields["traceback"] = traceback.format_exc()
        sys.excepthook(type(error), error, error.__traceback__)  # as if the error ended the process
    return fields


class Before:
    """The state of a rank before its first call; the rank restores it before each later call."""

    def __init__(self) -> None:
        import numpy

        self.environment, self.folder, self.hook = dict(os.environ), os.getcwd(), sys.excepthook
        self.drawn, self.numpy_drawn = random.getstate(), numpy.random.get_state()
        self.functions = functions_of_modules()

    def changed(self) -> bool:
        """Return whether a test's function or class has replaced one of `self.functions`."""
        return any(
            space.get(name) is not value and not of_library(space.get(name))
            for space, before in self.functions
            for name, value in before.items()
        )

    def come_back(self) -> None:
        import numpy
        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.excepthook = self.hook
        random.setstate(self.drawn)
        numpy.random.set_state(self.numpy_drawn)
        torch.set_grad_enabled(True)
        gc.collect()
        os.ftruncate(1, 0)  # the log
        os.lseek(1, 0, os.SEEK_SET)


def of_library(value: Any) -> bool:
    """Return whether a library, and not a test, defined the value.

    Libraries also replace their own functions, on first use.
    """
    if hasattr(value, "__code__"):
        return not value.__code__.co_filename.startswith(str(Path(__file__).parents[1]))
    return str(getattr(value, "__module__", "")).partition(".")[0] in ("fsdpc", "torch")


def functions_of_modules() -> list[tuple[Any, dict[str, Any]]]:
    """Return the namespaces that tests may change, each with its functions and classes by name."""
    import torch
    import torch.distributed as dist

    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "fsdpc"]
    spaces = [vars(m) for m in (*modules, torch, dist, torch.optim, os, time, shutil)]
    classes = {v for m in modules for v in vars(m).values() if isinstance(v, type)}
    spaces += [vars(c) for c in (*classes, torch.Tensor, torch.nn.Module, torch.optim.Optimizer)]
    return [(s, {name: v for name, v in s.items() if callable(v)}) for s in spaces]


def call_function(request: dict[str, Any], rank: int, folder: str) -> Any:
    world = request["world"]
    for name, value in request["env"].items():
        os.environ[name] = value
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = import_test_module(request["module"], request["file"])
    function = getattr(module, request["function"])
    function = getattr(function, "rank_function", function)
    store = None
    if "FSDPC_TEST_PLACES" in os.environ:
        import on_hosts

        store = on_hosts.store_of(rank, world)
    if store is None:
        store = dist.FileStore(os.path.join(folder, "store"), world)
    on_gpu = request["on_device"] and os.environ.get("FSDPC_TEST_GPU") == "cuda"
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    wait_for_connections(folder, rank, world)
    import jitter

    from fsdpc.plan import noticed

    # In a forked process, fsdpc measures the memory for each model in a way that takes 5 ms. With
    # this assignment, fsdpc takes the process for one that was not forked.
    noticed.PROCESS = os.getpid()
    layout = laid_out(os.environ.get("FSDPC_TEST_LAYOUT", "flat"))
    delays = jitter.delays_of(rank, module.__name__)
    with device_watch(request["faults"]), delays, layout, warnings.catch_warnings():
        run = functools.partial(
            function, rank=rank, world=world, **pickle.loads(request["arguments"])
        )
        if on_gpu:
            return sys.modules["on_gpu"].start(run)
        return run()


def wait_for_connections(folder: str, rank: int, world: int) -> None:
    """Wait until every rank is connected.

    Otherwise a rank that a test kills at once would make another rank's `init_process_group` fail.
    """
    Path(folder, f"connected{rank}").touch()
    waiting = {Path(folder, f"connected{other}") for other in range(world)}
    while waiting := {path for path in waiting if not path.exists()}:
        time.sleep(0.001)


@contextmanager
def laid_out(layout: str) -> Iterator[None]:
    """In layout "rows", give each rank whole rows of the parameters of new units.

    This applies only to units with use_orig_params.
    """
    from fsdpc._engine.unit import Unit

    before = Unit.__init__

    def init(self: Unit, *args: Any, **options: Any) -> None:
        rows = layout == "rows" and options["use_orig_params"]
        before(self, *args, **{"by_rows": rows, **options})

    Unit.__init__ = init
    try:
        yield
    finally:
        Unit.__init__ = before


def device_watch(faults: bool) -> AbstractContextManager[None]:
    """On the simulated GPU, declare what torch's operators touch, so that races fail the test."""
    if "FSDPC_LIBCUDA" not in os.environ:
        return nullcontext()
    import watch

    return watch.watched(drain=not faults)


def import_test_module(name: str, file: str) -> Any:
    """Import the test module under the name that pytest gave it, because pickles have that name."""
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None) == file:
        return module
    parent, _, child = name.rpartition(".")
    if parent:
        try:
            importlib.import_module(parent)
        except ImportError:
            pass
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# --- in the template process ---------------------------------------------------------------------


@dataclasses.dataclass
class RankProcess:
    rank: int
    pid: int
    channel: socket.socket
    end: int  # a file descriptor that is readable once the process has ended
    log: str
    received: bytearray = dataclasses.field(default_factory=bytearray)
    outcome: Outcome | None = None
    exited: bool = False
    exit_signal: int | None = None
    stopped: bool = False
    signalled_at: float | None = None
    story: str | None = None  # the rank's log, after the rank has ended


class World:
    """The ranks of one test, or of several tests one after the other, until the last rank ends."""

    kept: dict[Any, World] = {}  # common(last request) -> the World whose ranks wait for a request

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.processes: list[RankProcess] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ, None)
        self.folder = tempfile.mkdtemp(prefix="fsdpc-test-")
        self.calls = 0

    @classmethod
    def end_all(cls) -> None:
        for world in cls.kept.values():
            world.end()
        cls.kept.clear()

    def run(self, request: dict[str, Any]) -> list[Outcome]:
        self.request = request
        self.timers: list[tuple[float, int, int]] = []  # (when, rank, signal)
        self.first_failure = float("inf")
        deadline = time.monotonic() + request["timeout"]
        self.begin()
        while not self.finished():
            now = time.monotonic()
            if not request["faults"] and self.failed():
                deadline = min(deadline, self.first_failure + GRACE_S)
            if now >= deadline:
                self.dump_stacks()
                break
            due = min([deadline, *(when for when, _, _ in self.timers)])
            self.handle_events(max(0.0, due - now))
            self.fire_timers()
        outcomes = [p.outcome for p in self.processes]
        if request["shared"] and all(o and o.returned and not o.changed for o in outcomes):
            World.kept[common(request)] = self
        else:
            self.end()
        return [self.outcome(p) for p in self.processes]

    def begin(self) -> None:
        """Make the ranks call the function, in a new folder for this call."""
        self.calls += 1
        folder = os.path.join(self.folder, str(self.calls))
        os.mkdir(folder)
        if self.calls == 1:
            for rank in range(self.request["world"]):
                self.fork(rank, folder)
            return
        for process in self.processes:
            process.outcome = process.signalled_at = None
            process.channel.setblocking(True)
            with suppress(OSError):  # the rank has ended, which handle_events() will find out
                send(process.channel, pickle.dumps((self.request, folder)))
            process.channel.setblocking(False)

    def fork(self, rank: int, folder: str) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                self.control.close()
                for world in (self, *World.kept.values()):
                    world.selector.close()
                    for other in world.processes:
                        other.channel.close()
                        os.close(other.end)
                run_rank(theirs, self.request, rank, folder)
            finally:
                os._exit(70)
        theirs.close()
        ours.setblocking(False)
        process = RankProcess(
            rank, pid, ours, os.pidfd_open(pid), os.path.join(folder, f"log{rank}")
        )
        self.processes.append(process)
        self.selector.register(ours, selectors.EVENT_READ, process)
        self.selector.register(process.end, selectors.EVENT_READ, process)

    def finished(self) -> bool:
        stopped = self.request["faults"]  # only with faults does a stopped rank count as finished
        return all(p.outcome or p.exited or (stopped and p.stopped) for p in self.processes)

    def failed(self) -> bool:
        """Return whether a rank has failed; the other ranks then get GRACE_S to end and report."""
        if any(p.exited or (p.outcome and not p.outcome.returned) for p in self.processes):
            self.first_failure = min(self.first_failure, time.monotonic())
            return True
        return False

    def handle_events(self, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            if key.data is None:
                if not self.control.recv(1, socket.MSG_PEEK):
                    self.end()
                    os._exit(0)
                continue
            more = self.read(key.data)
            # The rank has ended. A process that the rank has forked may keep the channel open.
            if key.fd == key.data.end:
                while more:
                    more = self.read(key.data)
                self.reap(key.data)

    def read(self, process: RankProcess) -> bool:
        """Read messages of a rank. Return whether there may be more now."""
        if process.exited:
            return False
        try:
            data = process.channel.recv(1 << 20)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:
            self.reap(process)
            return False
        process.received += data
        while len(process.received) >= 8:
            (size,) = struct.unpack_from("<Q", process.received)
            if len(process.received) < 8 + size:
                break
            message = bytes(process.received[8 : 8 + size])
            del process.received[: 8 + size]
            self.handle_message(process, pickle.loads(message))
        return True

    def handle_message(self, process: RankProcess, message: tuple[Any, ...]) -> None:
        if message[0] == "signal":
            _, rank, number, after = message
            self.timers.append((time.monotonic() + after, rank, number))
        else:
            process.outcome = Outcome(**message[1])

    def fire_timers(self) -> None:
        now = time.monotonic()
        for timer in [t for t in self.timers if t[0] <= now]:
            self.timers.remove(timer)
            _, rank, number = timer
            process = self.processes[rank]
            if process.exited:
                continue
            process.signalled_at = time.monotonic()
            os.kill(process.pid, number)
            if number in (signal.SIGSTOP, signal.SIGCONT):
                process.stopped = number == signal.SIGSTOP

    def reap(self, process: RankProcess) -> None:
        if process.exited:
            return
        for each in (process.channel, process.end):
            self.selector.unregister(each)
        _, status = os.waitpid(process.pid, 0)
        process.exited = True
        if os.WIFSIGNALED(status):
            process.exit_signal = os.WTERMSIG(status)

    def dump_stacks(self) -> None:
        running = [p for p in self.processes if not p.outcome and not p.exited]
        sizes = {process.log: log_size(process) for process in running}
        for process in running:
            os.kill(process.pid, signal.SIGCONT)
            os.kill(process.pid, signal.SIGUSR1)
        until = time.monotonic() + DUMP_S
        while time.monotonic() < until and any(log_size(p) == sizes[p.log] for p in running):
            time.sleep(0.02)
        time.sleep(DUMPED_S)
        for process in running:
            process.outcome = Outcome(process.rank, expired=True)

    def end(self) -> None:
        for process in self.processes:
            if not process.exited and not (process.outcome and process.outcome.returned):
                os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.channel.close()
            os.close(process.end)
        deadline = time.monotonic() + 5
        for process in self.processes:
            while not process.exited and time.monotonic() < deadline:
                pid, _ = os.waitpid(process.pid, os.WNOHANG)
                process.exited = pid != 0
                if not process.exited:
                    time.sleep(0.001)
            if not process.exited:
                os.kill(process.pid, signal.SIGKILL)
                self.reap(process)
        self.selector.close()
        for process in self.processes:
            process.story = read_log(process)
        shutil.rmtree(self.folder, ignore_errors=True)

    def outcome(self, process: RankProcess) -> Outcome:
        outcome = process.outcome or Outcome(
            process.rank, exit_signal=process.exit_signal, stopped=process.stopped
        )
        if process.outcome is None and process.exit_signal is None and not process.stopped:
            outcome.error = "SystemExit: the process ended without a result"
        outcome.signalled_at = process.signalled_at
        outcome.log = read_log(process) if process.story is None else process.story
        return outcome


def common(request: dict[str, Any]) -> Any:
    """Return what two calls must have in common to run on the same ranks."""
    return request["world"], tuple(sorted(request["env"].items())), request["on_device"]


def read_log(process: RankProcess) -> str:
    try:
        return Path(process.log).read_text(errors="replace")
    except OSError:
        return ""


def log_size(process: RankProcess) -> int:
    try:
        return os.path.getsize(process.log)
    except OSError:
        return 0


def root_main(fd: int) -> None:
    """Run the root: fork a template for each connection, until pytest ends."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=fd)
    connection, _ = listener.accept()
    import_for_templates()
    signal.signal(signal.SIGCHLD, reap_templates)
    while True:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            template_main(connection)
            os._exit(0)
        connection.close()
        connection, _ = listener.accept()


def reap_templates(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def import_for_templates() -> None:
    gc.disable()  # collections would take a tenth of the time of the imports
    import torch
    import torch._dynamo  # takes seconds; else each rank's first optimizer imports it
    import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
    import torch.distributed.fsdp  # noqa: F401

    torch.set_num_threads(1)
    if os.environ.get("FSDPC_TEST_GPU") == "cuda":
        sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))
        import on_gpu

        on_gpu.prepare()
    try:
        import fsdpc

        for name in fsdpc.__all__:  # loads what the package loads on first use
            getattr(fsdpc, name)
        for name in LOADED_BY_RANKS:
            with suppress(ModuleNotFoundError):  # only some versions of torch have the module
                importlib.import_module(name)
    except ImportError:
        traceback.print_exc()  # the tests that need fsdpc fail in their ranks and give the reason
    if os.environ.get("FSDPC_TEST_GPU") != "cuda":
        importlib.import_module("warm").up()
    gc.enable()
    gc.collect()
    gc.freeze()


def template_main(control: socket.socket) -> None:
    """Run the template: answer each request with a list of outcomes, until pytest ends."""
    die_with_parent()
    os.setsid()
    environment = pickle.loads(receive(control))
    os.environ.clear()
    os.environ.update(environment)
    use_huge_pages()
    send(control, pickle.dumps(os.getpid()))
    file = ""
    while True:
        try:
            request = pickle.loads(receive(control))
        except (EOFError, OSError):
            return World.end_all()
        if request["file"] != file:
            World.end_all()
            file = request["file"]
        sys.path[:] = request["path"]
        importlib.invalidate_caches()
        import_for_all(request)
        gc.freeze()  # else a collection in a rank would write to, and so copy, all objects of torch
        world = World.kept.pop(common(request), None) if request["shared"] else None
        outcomes = (world or World(control)).run(request)
        try:
            send(control, pickle.dumps([dict(vars(o)) for o in outcomes]))
        except OSError:
            return


def use_huge_pages() -> None:
    """Move this process's memory into huge pages, if the kernel has MADV_COLLAPSE.

    The page tables of small pages are most of what the fork and the end of a rank cost.
    """
    size, madv_collapse = 2 << 20, 25
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, end = -(-begin // size) * size, end // size * size
        if access == "rw-p" and inode == "0" and begin < end:
            madvise(begin, end - begin, madv_collapse)  # fails for memory that nothing has used yet


def import_for_all(request: dict[str, Any]) -> None:
    """Import the test module and its LOADED_BY_RANKS before the ranks are forked."""
    try:
        module = import_test_module(request["module"], request["file"])
        for name in getattr(module, "LOADED_BY_RANKS", ()):
            importlib.import_module(name)
    except Exception:
        traceback.print_exc()  # the ranks import the module again, and report the error


def die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(struct.pack("<Q", len(data)) + data)


def receive(sock: socket.socket) -> bytes:
    (size,) = struct.unpack("<Q", receive_exactly(sock, 8))
    return receive_exactly(sock, size)


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(1 << 20, size - len(parts)))
        if not part:
            raise EOFError("the other side closed the connection")
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    sys.modules["harness"] = sys.modules["__main__"]  # for `import harness` in ranks
    root_main(int(sys.argv[1]))
