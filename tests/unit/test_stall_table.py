"""Tests of the table of ranks that stand still, of boards, and of torchrun's error file, in one
process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from fsdpc import _C
from fsdpc._comm import board
from fsdpc._comm.board import Process, Status, open_board, own_status, status_of, users_line
from fsdpc._comm.error_file import follows, write_error_file
from fsdpc._comm.table import TABLE_BYTES, Row, causes, report
from fsdpc._comm.verdict import Group, read_stall


def rows(*statuses: Status) -> list[Row]:
    return [Row(rank, 100 + rank, each) for rank, each in enumerate(statuses)]


WAITS = Status(
    "sleeps", "gather of unit a, forward", 31.0, "release of unit a, forward", "t.py:4 in f"
)
OTHER = Status("sleeps", "reduce of unit b, backward", 31.0)
OUTSIDE = Status("runs", "", 32.0, "gather of unit a, forward", "t.py:9 in data")
STOPPED = Status("stopped", "gather of unit a, forward", 31.0)
DEAD = Status("dead")


@pytest.mark.parametrize(
    ("statuses", "late", "expected"),
    [
        ((WAITS, OUTSIDE, WAITS), [], [1]),
        ((WAITS, STOPPED, OUTSIDE), [], [1]),
        ((DEAD, STOPPED, OUTSIDE), [], [0]),
        ((WAITS, WAITS, OTHER), [], [2]),
        ((WAITS, WAITS, WAITS), [1], [1]),
        ((WAITS, OUTSIDE, OUTSIDE), [1], [1, 2]),
    ],
)
def test_causes(statuses, late, expected):
    assert causes(rows(*statuses), late) == expected


def test_report_names_the_cause_first_and_groups_many_ranks():
    text = report(rows(WAITS, OUTSIDE), [1])
    first, head, *lines = text.strip().splitlines()
    assert first == (
        "the cause: rank 1 (pid 101) computes outside of fsdpc's waits, at t.py:9 in data"
    )
    assert head.split() == ["rank", "pid", "state", "for", "where", "line"]
    assert lines[1].startswith("* 1") and "after gather of unit a, forward" in lines[1]
    many = report(rows(*[WAITS] * 499, OUTSIDE, *[WAITS] * 500), [499])
    assert "0-498, 500-999" in many and len(many) <= TABLE_BYTES
    assert len(many.strip().splitlines()) == 4


def test_the_users_line_is_outside_of_fsdpc_torch_and_pythons_library():
    ours = (os.path.join(os.path.dirname(_C.__file__), "fsdp.py"), 1, "forward")
    standard = (os.path.join(os.path.dirname(os.__file__), "queue.py"), 2, "get")
    mine = ("/home/me/train.py", 3, "step")
    assert users_line([ours, standard, mine]) == "train.py:3 in step"
    assert users_line([ours, standard]) == "queue.py:2 in get"
    assert users_line([]) == ""


CHILD = """
import sys, time
from fsdpc import _C
from fsdpc._comm.board import open_board
open_board()
_C.board_begin("gather of unit a")
print("ready", flush=True)
sys.stdin.readline()
import faulthandler
faulthandler.unregister(_C.board_open()[1])
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child():
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_another_process_is_looked_at_in_every_state(child):
    """The process is examined while it runs, while it is stopped, when it has no handler for the
    signal, and when it is dead.
    """
    process = Process.find(child.pid)
    found = status_of(process, 5.0)
    assert (found.state in ("sleeps", "runs"), found.waits) == (True, "gather of unit a")
    assert found.line in ("<string>:7 in <module>", "<string>:8 in <module>")  # still in print
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    stopped = status_of(process, 5.0)
    assert (stopped.state, stopped.waits) == ("stopped", "gather of unit a")
    os.kill(child.pid, signal.SIGCONT)
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "ready\n"
    found = status_of(process, 5.0)
    assert found.state in ("sleeps", "runs") and found.line == ""
    descriptor = board.open_descriptor(child.pid)
    assert descriptor is not None
    number = board._HEAD.unpack(os.pread(descriptor, board._HEAD.size, 0))[1]
    os.close(descriptor)
    os.kill(child.pid, number)  # the signal is ignored, so a signal that comes late does no harm
    assert status_of(process, 5.0).state in ("sleeps", "runs")
    child.kill()
    child.wait()
    assert status_of(process, 5.0) == Status("dead")


@pytest.mark.long
def test_a_signal_that_the_user_has_is_left_alone():
    program = (
        "import signal; n = signal.SIGRTMIN + 11; signal.signal(n, lambda *_: print('mine'));"
        "from fsdpc._comm.board import open_board; from fsdpc import _C; open_board();"
        "print(_C.board_open()[1] - n); signal.raise_signal(n)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\nmine\n", done.stderr


def test_one_verdict_for_all_who_ask():
    open_board()
    group = Group("t", 0, [os.getpid()], 30.0)
    other = Group("t", 0, [os.getpid()], 30.0)
    assert group.verdict(False, []) is None
    first = group.verdict(True, [0])
    assert first is not None and first[0] == [0]
    _C.board_begin("something else")
    try:
        assert other.verdict(True, [5]) == first == other.verdict(False, [])
        assert own_status().waits == "something else"
    finally:
        _C.board_end()


def test_read_stall(monkeypatch):
    monkeypatch.setenv("FSDPC_STALL", "0")
    assert read_stall() == float("inf")
    monkeypatch.setenv("FSDPC_STALL", "2.5")
    assert read_stall() == 2.5
    for wrong in ("-1", "soon", "nan"):
        monkeypatch.setenv("FSDPC_STALL", wrong)
        with pytest.raises(ValueError, match="FSDPC_STALL must be a number of seconds"):
            read_stall()


def test_error_file(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr("fsdpc._comm.error_file.time.time", lambda: 1000.9)
    write_error_file(ValueError("the data set is empty"))
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: the data set is empty"
    assert message["extraInfo"]["timestamp"] == "1000"
    write_error_file(KeyError("later"))
    assert "later" not in path.read_text()
    path.unlink()
    wrapped = RuntimeError("training failed")
    wrapped.__cause__ = _C.PeerError("rank 1 died")
    assert follows(wrapped) and not follows(ValueError())
    write_error_file(wrapped)
    assert json.loads(path.read_text())["message"]["extraInfo"]["timestamp"] == "1001"
