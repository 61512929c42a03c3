"""Tests of the channel over which ranks with GPUs exchange messages of the host. In these tests,
the ranks are threads that use a store in this process.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fsdpc import _C
from fsdpc._comm.channel import LEFT, Channel

SERVER = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


class Counted:
    """A wrapper around a store. For each method, it counts the keys that the calls pass."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self._counts[name] += len(args[0]) if args and isinstance(args[0], list) else 1
            return call(*args)

        return counted


def run(world: int, body: Callable[[Channel], Any], timeout: float = 20) -> list[Any]:
    """Run ``body`` for each rank, in a thread and on a channel of that rank. Return for each rank
    what ``body`` returned or raised.
    """
    store = dist.HashStore()
    results: list[Any] = [None] * world

    def rank(number: int) -> None:
        try:
            results[number] = body(Channel(store, "t", number, world, timeout, "threads"))
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_get_all_in_rank_order_round_after_round(world):
    def body(channel: Channel) -> list[list[bytes]]:
        return [channel.gather(bytes([channel.rank]) * (turn + 1), "x") for turn in range(3)]

    wanted = [[bytes([rank]) * (turn + 1) for rank in range(world)] for turn in range(3)]
    assert run(world, body) == [wanted] * world


def test_the_store_does_work_that_grows_with_the_number_of_ranks():
    def keys(world: int) -> Counter[str]:
        counts: Counter[str] = Counter()

        def body(channel: Channel) -> None:
            channel._store = Counted(channel._store, counts)
            channel.gather(b"x", "x")
            channel.gather(b"y", "x")

        assert run(world, body) == [None] * world
        return counts

    for world in (4, 32):
        counts = keys(world)
        # Each rank sets one key. Rank 0 reads all of these keys and sets one more key, which the
        # other ranks read.
        assert counts["set"] == 2 * (world + 1)
        assert counts["multi_get"] + counts["get"] == 2 * (world + world - 1)
        assert counts["delete_key"] == world + 1


def test_a_rank_that_left_is_named():
    def body(channel: Channel) -> list[bytes]:
        channel.gather(b"", "first")
        if channel.rank == 2:
            channel.leave()
            return []
        return channel.gather(b"", "second")

    first, second, _ = run(3, body)
    assert {type(first), type(second)} == {_C.PeerError}
    assert any(f"rank 2 {LEFT}" in str(error) for error in (first, second))


def test_rank_0_that_came_and_left_before_it_collected_is_named():
    def body(channel: Channel) -> list[bytes]:
        if channel.rank == 0:
            channel._store.set("0/0", b"")
            channel.leave()
            return []
        return channel.gather(b"", "first")

    errors = run(3, body)[1:]
    assert [type(error) for error in errors] == [_C.PeerError] * 2
    assert any(f"rank 0 {LEFT}" in str(error) for error in errors)


@pytest.mark.parametrize("late", [0, 6, 15])
def test_a_rank_that_does_not_come_is_named_among_many(late):
    # Without this barrier, errors could also name a rank whose thread starts late.
    begun = threading.Barrier(15)

    def body(channel: Channel) -> list[bytes]:
        if channel.rank == late:
            return []
        begun.wait()
        return channel.gather(b"", "a unit")

    errors = [error for error in run(16, body, timeout=2) if error != []]
    assert len(errors) == 15
    timeouts = [error for error in errors if isinstance(error, _C.CommTimeout)]
    text = f"waited 2 s in a unit for rank {late} (FSDPC_TIMEOUT"
    assert timeouts and all(text in str(error) for error in timeouts)
    assert all(isinstance(error, (_C.CommTimeout, _C.PeerError)) for error in errors)


def test_a_store_that_is_gone_is_an_error_at_once_and_holds_nobody_up_at_exit():
    """The error comes at once, not after the timeout of the store. The store has the timeout of the
    process group, which may be half an hour.
    """
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        port = int(server.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
        channel = Channel(store, "test", 1, 2, timeout=30, name="test")
        server.kill()
    begun = time.monotonic()
    with pytest.raises(_C.CommError, match="store does not respond"):
        channel.gather(b"x", "a test")
    assert time.monotonic() - begun < 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdpc._comm.channel._EXIT_S", 1)
        channel.leave()
    assert time.monotonic() - begun < 20
    assert store.timeout == timedelta(seconds=60)
