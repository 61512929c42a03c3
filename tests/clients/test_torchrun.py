"""Tests that torchrun's summary names the rank that raised, or the rank that was stopped."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from fsdpc import CommTimeout, FullyShardedDataParallel as FSDP

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pids = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    model = FSDP(nn.Sequential(*[FSDP(nn.Linear(8, 8)) for _ in range(3)]))
    try:
        for step in range(3):
            loss = model(torch.ones(2, 8)).sum()
            if step == 1 and rank == 2:
                if sys.argv[1] == "raise":
                    raise ValueError("the data set is empty")
                os.kill(os.getpid(), signal.SIGSTOP)
            loss.backward()
    except CommTimeout:
        os.kill(pids[2], signal.SIGCONT)  # or torchrun waits half a minute for it
        raise

main()
"""


def summary_of(how, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
    done = subprocess.run(
        [*command, str(program), how],
        env={**os.environ, "FSDPC_TIMEOUT": "8", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.partition("Root Cause (first observed failure)")[2]


@pytest.mark.parametrize("how", ["raise", "stop"])
def test_root_cause(how, tmp_path):
    cause = summary_of(how, tmp_path)
    if how == "raise":
        assert "rank      : 2 (local_rank: 2)" in cause, cause
        assert "ValueError: the data set is empty" in cause, cause
    else:
        assert "CommTimeout" in cause, cause
        assert "the cause: rank 2 (pid" in cause and "is stopped (SIGSTOP" in cause, cause
