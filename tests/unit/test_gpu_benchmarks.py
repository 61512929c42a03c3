"""What the GPU benchmarks make of a profiler's trace and of measured times, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_report  # noqa: E402
import profile_gpu  # noqa: E402
import run_gpu  # noqa: E402
import timeline  # noqa: E402


def event(name: str, category: str, ts: float, dur: float, **args: object) -> dict:
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "tid": 1, "args": args}


def trace() -> list[dict]:
    """A job of 100 us: a product of 40 us, a cast half beside it, a pack alone, a wait after it."""
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
    assert found.waits == 1  # not the one after the job


def test_hidden_shares():
    shares = profile_gpu.shares(timeline.read(trace(), dry=False).work)
    assert shares["gather: cast"] == {"ms": 0.02, "count": 1, "hidden": 0.5}
    assert shares["pack"]["hidden"] == 0
    assert shares["compute"] == {"ms": 0.04, "count": 1}
    assert shares["copy, fill"]["count"] == 1


def test_busy_counts_overlaps_once():
    work = [timeline.Interval("a", 1, 0, 10), timeline.Interval("b", 2, 5, 12)]
    assert timeline.busy([*work, timeline.Interval("c", 1, 20, 21)]) == 13


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    profile_gpu.draw(timeline.read(trace(), dry=False).work, "caption", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_ratios_are_of_one_round():
    one = {
        "event_ms": {"fsdpc": [1.0, 4.0, 3.0], "fsdp2": [2.0, 4.0, 12.0]},
        "wall_ms": {"fsdpc": [1.0, 4.0, 3.0], "fsdp2": [2.0, 4.0, 12.0]},
        "batch": 1,
        "seq": 8,
    }
    figures = gpu_report.time_figures(one)["engines"]["fsdpc"]
    assert figures["of_fsdp2"]["median"] == 0.5
    assert figures["step_ms"]["median"] == 3.0


def test_failures_are_named():
    results = {
        "time": {"failures": {"fsdp2": "text"}},
        "memory": {"fsdpc": {"error": "no memory"}},
        "host": {"error": "late"},
    }
    report = gpu_report.step_report(results)
    texts = {"time, fsdp2": "text", "memory, fsdpc": "no memory", "host": "late"}
    assert report["failures"] == texts


def test_no_gpu_is_said_before_anything_is_built(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["run_gpu.py"])
    monkeypatch.setattr(run_gpu, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(run_gpu, "missing", lambda dry: ["matplotlib is missing: no picture"])
    monkeypatch.setattr(run_gpu, "gpu_in_sight", lambda: False)
    with pytest.raises(SystemExit, match="torch finds no GPU here"):
        run_gpu.main()
    assert capsys.readouterr().out == "fsdpc: matplotlib is missing: no picture\n"
    assert not list(tmp_path.iterdir())
