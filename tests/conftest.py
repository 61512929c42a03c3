"""Options, hooks and fixtures of pytest that all Python tests share."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `import combinations`
sys.path.insert(0, str(HERE / "simgpu" / "python"))  # for `import simgpu`
sys.path.insert(0, str(HERE / "gpu"))  # for `import on_gpu`
sys.path.insert(0, str(HERE / "dist"))  # for `from harness import ranks`
sys.path.insert(0, str(HERE / "conformance"))  # for `from suite import Cases`
sys.path.insert(0, str(HERE / "fuzz"))  # for `import runs`

# ORDER is the order in which the folders run. The files of LONGEST come first in their folders. The
# longest tests begin first, so that all processes of pytest-xdist end at about the same time.
ORDER = "clients parity fuzz fault conformance dist gpu kernels unit".split()
LONGEST = "test_with_compile.py test_two_models.py test_nccl.py test_optim_memory.py".split()

ENGINES = {"fsdpc": "fsdpc", "torch": "torch.distributed.fsdp"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine",
        choices=sorted(ENGINES),
        default="fsdpc",
        help="what the multi-rank tests wrap models with: fsdpc, or torch's own FSDP as a check of "
        "the tests themselves (it fails where it has the faults that fsdpc must not have)",
    )
    parser.addoption(
        "--gpu",
        choices=["none", "sim", "cuda"],
        default="none",
        help="cuda: tensors of the ranks lie on GPU 0, which they share (tests/gpu/on_gpu.py). sim:"
        " fsdpc shards the ranks' CPU models on a simulated GPU (make simlibs), watches what "
        "torch's operators touch there, and fails tests in which accesses race",
    )
    parser.addoption(
        "--layout",
        choices=["flat", "rows"],
        default="flat",
        help="rows: every unit with use_orig_params is cut between the rows of its parameters",
    )
    parser.addoption(
        "--hosts",
        type=int,
        default=1,
        help="on how many hosts the ranks of a test are: network namespaces, which need root, or "
        "hosts in name only (tests/dist/on_hosts.py)",
    )
    parser.addoption(
        "--jitter",
        metavar="SEED",
        help="random ranks are late before random modules, autograd nodes and optimizer steps, "
        "drawn from the seed; no result may change",
    )
    parser.addoption(
        "--combinations",
        choices=["all", "pairs", "each"],
        default=os.environ.get("FSDPC_TEST_COMBINATIONS", "all"),
        help="which items of a test of several ranks run: the product of its axes, items in which "
        "every two values of two axes occur together, or items in which every value occurs",
    )


def pytest_configure(config: pytest.Config) -> None:
    from conformance_table import Table

    config.pluginmanager.register(Table())
    os.environ["FSDPC_TEST_COMBINATIONS"] = config.getoption("--combinations")  # for the harness
    os.environ["FSDPC_TEST_LAYOUT"] = config.getoption("--layout")  # for the harness
    os.environ["FSDPC_TEST_HOSTS"] = str(config.getoption("--hosts"))
    if config.getoption("--jitter") is not None:
        os.environ["FSDPC_TEST_JITTER"] = config.getoption("--jitter")  # for the harness
    if config.getoption("--gpu") == "sim":
        import env

        if env.missing():
            raise pytest.UsageError(f"--gpu sim: {env.missing()}")
    if config.getoption("--gpu") != "none":
        os.environ["FSDPC_TEST_GPU"] = config.getoption("--gpu")  # for the harness
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        from harness import Root

        Root.start()  # one root process for all processes of pytest-xdist


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests without garbage collection, which would take a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.parent.name in ("conformance", "clients"):
        item.add_marker("long")


@pytest.hookimpl(trylast=True)  # after -k and -m have removed items
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gpu") != "none":
        from applies import reason_to_skip

        for item in items:
            reason = reason_to_skip(item.path.relative_to(HERE).as_posix(), item.name)
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"on a GPU: {reason}"))
    if os.environ.get("FSDPC_TEST_AGAIN") and config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            item.add_marker(run_again(item.path))
    from combinations import choose

    kept = choose(items, config.getoption("--combinations"))
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    in_parts = hasattr(config, "workerinput")  # pytest-xdist's
    items[:] = sorted(kept, key=lambda item: run_order(item.path)) if in_parts else kept


def run_again(path: Path) -> pytest.MarkDecorator:
    """Return the mark that runs a test once more after a failure that a slow machine may explain.

    A slow machine may explain every failure of a test that kills or stops ranks. In other tests it
    may explain only a harness deadline that has passed, or a failed connection of gloo.
    """
    slow = [r"RankFailure.*no end within", r"Gloo connectFullMesh failed"]
    return pytest.mark.flaky(reruns=1, only_rerun=None if kills_ranks(path) else slow)


@functools.cache
def kills_ranks(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return path.parent.name == "fault" or any(
        w in text for w in ("faults=True", "SIGSTOP", ".kill(")
    )


def run_order(path: Path) -> tuple[int, bool]:
    folder = path.parent.name
    return ORDER.index(folder) if folder in ORDER else len(ORDER), path.name not in LONGEST


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> str:
    """Return the name of the module that FullyShardedDataParallel is imported from."""
    return ENGINES[request.config.getoption("--engine")]


@pytest.fixture(scope="session", autouse=True)
def _template_process():
    yield
    if "harness" in sys.modules:
        sys.modules["harness"].Template.close()
    if "on_hosts" in sys.modules:
        sys.modules["on_hosts"].remove()
