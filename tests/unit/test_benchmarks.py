"""Tests of what all benchmarks share: a result names the commit that was measured, and ranks end
when the benchmark ends.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAM = """
import sys, time
sys.path.insert(0, {folder!r})
from bench_step import run_ranks, start_rank

def job(rank, world, folder, out):
    start_rank(rank, world, folder)
    import os
    os.write(1, b"%d\\n" % os.getpid())  # at once: ranks write to one pipe
    time.sleep(60)

if __name__ == "__main__":
    run_ranks(job, 2)
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_benchmark(tmp_path: Path, number: signal.Signals):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(folder=str(BENCHMARKS)))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        ranks = [int(program.stdout.readline()) for _ in range(2)]
        assert all(map(running, ranks))
        program.send_signal(number)
        program.wait(60)
    until = time.monotonic() + 10
    while any(map(running, ranks)) and time.monotonic() < until:
        time.sleep(0.02)
    left = [pid for pid in ranks if running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_results_are_not_kept_without_a_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import common

    monkeypatch.delenv("FSDPC_COMMIT", raising=False)
    monkeypatch.setattr(common, "commit", lambda: "unknown")
    assert common.describe_run()["commit"] == "unknown"
    with pytest.raises(SystemExit, match="not a git checkout.*set FSDPC_COMMIT"):
        common.describe_run(kept=True)


def test_results_have_a_row_per_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    common = importlib.import_module("common")
    results = list((BENCHMARKS / "results").glob("*.json"))
    assert results
    for path in results:
        text = path.read_text()
        content = json.loads(text)
        assert text == common.by_rows(content) + "\n", path.name
        assert json.loads(common.by_rows([content] * 2)) == [content] * 2
    assert common.by_rows({"a": [1] * 500, "b": [{"c": 1}] * 99}).count("\n") == 103
