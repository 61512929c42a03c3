"""Tests of calls that run in a thread while the caller waits, so that Ctrl-C can end the wait:
results, errors, and the wait after an interrupted wait.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from fsdpc._comm import interruptible


def test_a_call_runs_before_the_wait_returns_and_its_error_arrives():
    done = []
    interruptible.run(lambda: done.append(threading.current_thread().name), lambda: None)
    assert done == ["fsdpc-wait"]
    with pytest.raises(ZeroDivisionError):
        interruptible.run(lambda: 1 // 0, lambda: None)


@pytest.fixture
def interrupts():
    """Make Ctrl-C raise KeyboardInterrupt, because a background job of a shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_wait_after_an_interrupted_one_is_whole(interrupts):
    """The second wait lasts until the second call ends, even if the first call continues after its
    own wait was interrupted.
    """
    for obeys in (True, False):
        ends, ended = threading.Event(), []

        def call(ends=ends, ended=ended):
            ends.wait(20)
            ended.append("first")

        timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        patience = interruptible.PATIENCE_S
        interruptible.PATIENCE_S = patience if obeys else 0.1
        try:
            with pytest.raises(KeyboardInterrupt):
                interruptible.run(call, ends.set if obeys else lambda: None)
        finally:
            interruptible.PATIENCE_S = patience
        assert ended == (["first"] if obeys else [])

        def second(ends=ends, ended=ended):
            ends.set()
            time.sleep(0.2)  # the first call ends meanwhile
            ended.append("second")

        interruptible.run(second, lambda: None)
        assert sorted(ended) == ["first", "second"]
