"""Tests of how the GPU benchmarks evaluate a profiler's trace and measured times."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gpu import alone, profile, report, run, timeline  # noqa: E402


def event(name: str, category: str, ts: float, dur: float, **args: object) -> dict:
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "tid": 1, "args": args}


def trace() -> list[dict]:
    """Return the trace of a job of 100 us: a matrix product of 40 us, a cast that is half hidden by
    the product, and one wait of the host. A pack, a fill and another wait begin after the job.
    """
    return [
        event(timeline.JOB, "user_annotation", 1000, 100),
        event("ampere_gemm", "kernel", 1010, 40, stream=7),
        event("fsdpc_cuda_cast", "kernel", 1040, 20, stream=13),
        event("fsdpc_cuda_pack", "kernel", 1100, 10, stream=14),
        event("Memset (Device)", "gpu_memset", 1120, 1, stream=7),
        event("cudaEventSynchronize", "cuda_runtime", 1050, 3),
        event("cuLaunchKernelEx", "cuda_driver", 1020, 1),
        event("cudaDeviceSynchronize", "cuda_runtime", 1101, 30),
        {"ph": "i", "name": "a mark", "ts": 1},
    ]


def test_work_and_waits_of_the_job():
    found = timeline.read(trace(), dry=False)
    assert [(one.name, one.stream, one.begin, one.end) for one in found.work] == [
        ("ampere_gemm", 7, 1010, 1050),
        ("fsdpc_cuda_cast", 13, 1040, 1060),
        ("fsdpc_cuda_pack", 14, 1100, 1110),
        ("Memset (Device)", 7, 1120, 1121),
    ]
    assert found.waits == 1  # the wait after the job does not count


def test_hidden_shares():
    shares = profile.shares(timeline.read(trace(), dry=False).work)
    assert shares["gather: cast"] == {"ms": 0.02, "count": 1, "hidden": 0.5}
    assert shares["pack"]["hidden"] == 0
    assert shares["compute"] == {"ms": 0.04, "count": 1}
    assert shares["copy, fill"]["count"] == 1


def test_busy_counts_overlaps_once():
    work = [timeline.Interval("a", 1, 0, 10), timeline.Interval("b", 2, 5, 12)]
    assert timeline.busy([*work, timeline.Interval("c", 1, 20, 21)]) == 13


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    profile.draw(timeline.read(trace(), dry=False).work, "caption", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_ratios_are_of_one_round():
    one = {
        "event_ms": {"fsdpc": [1.0, 4.0, 3.0], "fsdp2": [2.0, 4.0, 12.0]},
        "wall_ms": {"fsdpc": [1.0, 4.0, 3.0], "fsdp2": [2.0, 4.0, 12.0]},
        "batch": 1,
        "seq": 8,
    }
    figures = report.time_figures(one)["engines"]["fsdpc"]
    assert figures["of_fsdp2"]["median"] == 0.5
    assert figures["step_ms"]["median"] == 3.0


def test_failures_are_named():
    results = {
        "time": {"failures": {"fsdp2": "text"}},
        "memory": {"fsdpc": {"error": "no memory"}},
        "host": {"error": "late"},
    }
    made = report.step_report(results)
    texts = {"time, fsdp2": "text", "memory, fsdpc": "no memory", "host": "late"}
    assert made["failures"] == texts


def test_a_missing_gpu_is_reported_before_anything_is_built(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setattr(run, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(run, "missing", lambda dry: ["matplotlib is missing: no picture"])
    monkeypatch.setattr(run, "gpu_in_sight", lambda: False)
    with pytest.raises(SystemExit, match="torch finds no GPU here"):
        run.main()
    assert capsys.readouterr().out == "fsdpc: matplotlib is missing: no picture\n"
    assert not list(tmp_path.iterdir())


def part(name: str, code: str, **more: object) -> run.Part:
    return run.Part(name, [sys.executable, "-c", code], 60, **more)


@pytest.fixture
def folders(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(run, "LOGS", tmp_path)
    return tmp_path


def run_all(chosen: list[run.Part], folder: Path) -> list[run.Ended]:
    def save(ended: list[run.Ended]) -> None:
        run.keep(ended, folder, str(folder / "out"))

    return run.run_all(chosen, dict(os.environ), time.monotonic() + 60, True, save)


def test_a_part_that_fails_stops_no_other_and_says_why(folders, capsys):
    ended = run_all(
        [
            part("first", "raise ValueError('the reason')"),
            part("again", "import os; print(os.environ['X'])", after_failure_of="first",
                 env={"X": "anew"}),
            part("step", "print('figures')"),
            part("not_needed", "raise SystemExit(1)", after_failure_of="step"),
        ],
        folders,
    )  # fmt: skip
    assert [one.status for one in ended] == ["failed (1)", "ok", "ok", "not needed"]
    assert ended[1].lines == ["anew"]
    run.print_end(ended, folders)
    table = capsys.readouterr().out.splitlines()
    assert any(line.split(maxsplit=1) == ["first", "ValueError: the reason"] for line in table)
    log = (folders / "out" / run.ALL_LOGS).read_text()
    assert "=== first\nTraceback" in log and "=== again\nanew" in log
    ends = json.loads((folders / "out" / run.ENDS).read_text())["parts"]
    assert [one["status"] for one in ends] == ["failed (1)", "ok", "ok"]


def test_figures_of_an_older_run_are_not_shown(folders):
    (folders / "gpu_step.json").write_text(json.dumps({"loss_difference": 0.5}))
    without = [run.Ended(part("first", ""), "ok", 1.0)]
    assert run.facts(folders, without) == []
    own = run.Ended(part("step", "", results=("gpu_step.json",)), "ok", 1.0)
    assert run.facts(folders, [own]) == [("largest loss difference", "5.0e-01")]


def test_the_reason_of_tests_is_their_list_of_failures(folders):
    lines = ["a.py:1: in f", *(f"FAILED a.py::test_{k} - why" for k in range(9)), "9 failed in 1s"]
    found = run.reasons(run.Ended(part("tests", ""), "failed (1)", 1.0, lines))
    assert found[0] == "FAILED a.py::test_0 - why" and found[-1] == "... and 3 more"


def test_without_an_extension_nothing_else_runs(folders, monkeypatch):
    monkeypatch.setattr(run, "usable", lambda env, dry: False)
    chosen = [part("build", "raise SystemExit(1)"), part("first", "")]
    assert [one.status for one in run_all(chosen, folders)] == ["failed (1)", "left out: no build"]
    monkeypatch.setattr(run, "usable", lambda env, dry: True)
    assert [one.status for one in run_all(chosen, folders)] == ["ok", "ok"]


def test_results_that_a_part_sent_before_it_died_are_kept():
    class Process:
        exitcode = -11

        def join(self, seconds: float) -> None:
            pass

    ours, theirs = alone.mp.Pipe()
    theirs.send(("so far", {"tokens": {"1024": 1}}))
    assert alone.listen(ours, Process(), 0) == {"error": "no end after 0 s"} | {
        "tokens": {"1024": 1}
    }
    theirs.send(("so far", {"tokens": {"1024": 1, "4096": 2}}))
    theirs.close()
    found = alone.listen(ours, Process(), 5)
    assert found["tokens"] == {"1024": 1, "4096": 2} and "(-11)" in found["error"]
