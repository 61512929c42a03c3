"""Tests of ``fsdpc doctor``: every line has a verdict, and every problem has a cure."""

from __future__ import annotations

import json
import os
import resource

from fsdpc.__main__ import main
from fsdpc.plan import doctor


def test_this_machine(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "ROUND_TRIP_BYTES", 1 << 20)
    monkeypatch.setattr(doctor, "SLOW", 0.0)  # so the check passes even on a busy machine
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 60.0)
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["checks"]}
    assert code == (0 if found["ok"] else 1)
    for name in (
        "python",
        "torch",
        "extension",
        "memory",
        "shared memory",
        "process watch",
        "open files",
        "file size",
        "processes",
        "stall tables",
        "processors",
        "interfaces",
        "NCCL",
        "two ranks",
    ):
        assert name in rows
    assert all(row["level"] in doctor.LEVELS for row in rows.values())
    assert all(row["cure"] for row in rows.values() if row["level"] != "ok")
    assert "can be read" in rows["stall tables"]["value"]
    assert rows["two ranks"]["level"] == "ok" and "values right" in rows["two ranks"]["value"]


def test_planted_faults_are_found(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib77")
    monkeypatch.setenv("FSDPC_TIMEOUT", "soon")
    monkeypatch.setenv("FSDPC_STALL", "-1")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "detail")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(os.cpu_count()))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    rows = {row.name: row for row in doctor.checks(round_trip=False)}
    levels = {name: row.level for name, row in rows.items()}
    for name in ("NCCL_SOCKET_IFNAME", "FSDPC_TIMEOUT", "FSDPC_STALL"):
        assert levels[name] == "error", name
    for name in ("TORCH_DISTRIBUTED_DEBUG", "threads", "open files", "file size", "processes"):
        assert levels[name] == "warning", name
    assert main(["doctor", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "-> seconds, such as FSDPC_TIMEOUT=600" in out


def test_warnings_count_with_strict(monkeypatch):
    monkeypatch.setattr(doctor, "checks", lambda _: [doctor.Check("a", "warning", "b", "c")])
    assert main(["doctor"]) == 0
    assert main(["doctor", "--strict"]) == 1


def test_a_check_that_fails_is_a_warning(monkeypatch):
    def broken():
        raise OSError("no such file")
        yield

    monkeypatch.setattr(doctor, "memory", broken)
    row = next(r for r in doctor.checks(round_trip=False) if "could not" in r.value)
    assert row.level == "warning" and row.name == "broken"


def test_wrong_values_of_a_round_trip_are_an_error(monkeypatch):
    monkeypatch.setattr(doctor, "ROUND_TRIP_BYTES", 1 << 20)
    monkeypatch.setattr(doctor, "_RANK", doctor._RANK.replace("== 3", "== 4"))
    rows = list(doctor.two_ranks())
    assert [r.level for r in rows] == ["error"]
    assert (
        "sums are wrong" in rows[0].value
        or "AssertionError" in rows[0].value
        or ("PeerError" in rows[0].value)
    )
