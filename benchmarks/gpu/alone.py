"""Runs a part of a GPU benchmark in a process of its own, whose crash does not end other parts."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Tell = Callable[[dict[str, Any]], None]  # called with the results so far
Job = Callable[[Any, dict[str, Any], Tell], dict[str, Any]]


def child(job: Job, options: dict[str, Any], out: Connection) -> None:
    """Run ``job`` as the only rank on its GPU. Send ("so far", results) whenever the job calls
    ``tell(results)``, then ("end", results) with all results or with the error's text.
    """
    from gpu import machine

    warnings.filterwarnings("ignore")
    try:
        device = machine.open_device(options["dry"])
        if options["dry"]:
            import torch

            torch.set_num_threads(1)
        machine.start_group(device)
        result = job(device, options, lambda known: out.send(("so far", known)))
        out.send(("end", result))
    except BaseException:
        out.send(("end", {"error": traceback.format_exc(limit=-6)}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # does not wait for an engine's threads, which may never end


def run_part(job: Job, options: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run job(device, options, tell) in a fresh process with a deadline, and return its result.

    `options["dry"]` chooses the device. If the job fails, the result has the results that it passed
    to `tell` before, and the text of the error under the key "error".
    """
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(
        target=child, args=(job, options, theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        return listen(ours, process, seconds)
    finally:
        process.kill()
        process.join(20)


def listen(pipe: Connection, process: Any, seconds: float) -> dict[str, Any]:
    """Return what a part sends until its end or its deadline, and the error if there is one."""
    known: dict[str, Any] = {}
    until = time.monotonic() + seconds
    while pipe.poll(max(until - time.monotonic(), 0)):
        try:
            kind, result = pipe.recv()
        except EOFError:
            process.join(5)
            return {**known, "error": f"the process ended without a result ({process.exitcode})"}
        known = {**known, **result}
        if kind == "end":
            return known
    return {**known, "error": f"no end after {seconds} s"}
