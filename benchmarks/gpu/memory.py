"""Measure ways to free GPU memory and what they cost in time, and how fast checkpoints are saved.

    python -m gpu.memory                    # one rank, a GPT of a billion parameters, bf16
    python -m gpu.memory --only int8 --json
    python -m gpu.memory --dry --tiny       # the same lines without a GPU

Each choice trains the same model in a fresh process, with the same batch. "step" is measured by the
host's clock from an idle GPU until the GPU is idle again. "peak" is the peak of torch's allocated
memory plus what fsdpc maps outside of torch's allocator. "nothing" keeps all activations, gradients
and AdamW's states on the GPU; every other choice changes one thing. A "save" writes the model's
weights and AdamW's states; its figures are the seconds of the whole call, and the seconds for which
a save in the background blocks. DCP saves the same model, sharded by torch's fully_shard; DCP's
saves in the background need a group with a CPU backend.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import common

from gpu import machine, report, step
from gpu.alone import Tell, run_part

CHOICES = (
    "nothing",
    "checkpoint",
    "checkpoint 1/2",
    "int8",
    "activations to the host",
    "states to the host",
    "half of the states",
    "parameters to the host",
)
PART_SECONDS = 45
GB = 1e9


def changed(training: Any, choice: str) -> tuple[Any, Callable[[], AbstractContextManager[Any]]]:
    """Change one thing of a training; return the training and a context for its forward."""
    from fsdpc import activations, optim

    model = training.model
    if choice.startswith("checkpoint"):
        activations.checkpoint(model, ratio=0.5 if choice.endswith("1/2") else 1)
    elif choice == "int8":
        return training, lambda: activations.compress(model, "int8")
    elif choice == "activations to the host":
        return training, lambda: activations.offload(model)
    elif choice.endswith("states") or choice.startswith("states"):
        away = optim.Host(ratio=0.5 if choice.startswith("half") else 1)
        training.optimizer = optim.AdamW(model.parameters(), lr=1e-3, offload=away)
    return training, nullcontext


def build(choice: str, work: Any) -> tuple[Any, Callable[[], AbstractContextManager[Any]]]:
    """Build fsdpc's training of a choice; return the training and a context for its forward."""
    from engines import fsdpc
    from torch.distributed.fsdp import CPUOffload

    options = {"cpu_offload": CPUOffload(True)} if choice.startswith("parameters") else {}
    return changed(fsdpc(work, **options), choice)


def stepped(training: Any, batch: Any, around: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Take one step with only the forward inside the context, and return the loss."""
    from torch.nn import functional as F

    with around():
        logits = training.model(batch[0]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return loss.detach()


def choice_job(device: Any, options: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the milliseconds of each step, the peak memory and the losses of one choice."""
    from engines import random_batch

    work = step.workload(options["tokens"], options["tiny"], device.device)
    work = replace(work, checkpointing=False)
    training, around = build(options["choice"], work)
    batch, times, losses = random_batch(work, 7), [], []
    for turn in range(-2, options["rounds"]):
        if turn == 0:
            device.forget_peak()
        device.synchronize()
        begin = time.perf_counter()
        loss = stepped(training, batch, around)
        device.synchronize()
        if turn >= 0:
            times.append(1e3 * (time.perf_counter() - begin))
            losses.append(float(loss))
    own = step.engine_memory(training.model)
    mapped = sum(own.get(key, 0) for key in step.MAPPED)
    peak = device.memory()["peak_allocated"] + mapped
    return {"step_ms": times, "peak": peak, "losses": losses}


def save_job(device: Any, options: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the seconds of one engine's saves, and the seconds that its background saves block."""
    import torch.distributed.checkpoint as dcp
    from engines import build as engine
    from engines import random_batch
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from fsdpc import checkpoint

    work = step.workload(options["tokens"], options["tiny"], device.device)
    name = options["choice"]
    training = engine({"DCP": "fsdp2"}.get(name, "fsdpc"), work)
    training.step(random_batch(work, 7))
    parts = (training.model, training.optimizer)
    folder = tempfile.mkdtemp(prefix="fsdpc-gpu-save-", dir=options["folder"])

    def states() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(*parts), strict=True))

    found: dict[str, list[float]] = {"call": [], "blocked": []}
    try:
        for turn in range(options["rounds"]):
            for way in found:
                path = f"{folder}/{way}{turn}"
                device.synchronize()
                begin = time.perf_counter()
                if name == "DCP":
                    save = dcp.save if way == "call" else dcp.async_save
                    handle = save(states(), checkpoint_id=path)
                else:
                    handle = checkpoint.save(path, *parts, async_=way == "blocked")
                found[way].append(time.perf_counter() - begin)
                if way == "blocked":
                    (handle.result if name == "DCP" else handle.wait)()
                shutil.rmtree(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    count = sum(p.numel() for p in step.plain_on_meta(work).parameters())
    return {"bytes": 12 * count, **found}


def measure(args: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure every choice, then the saves. After each one, `save` gets all results so far."""
    options = {
        "tokens": step.TINY_TOKENS[-1] if args.tiny else args.tokens,
        **{key: getattr(args, key) for key in ("rounds", "tiny", "dry", "folder")},
    }
    jobs = [(name, choice_job, "choices") for name in CHOICES]
    jobs += [(name, save_job, "saves") for name in ("fsdpc", "DCP")]
    results: dict[str, Any] = {"tokens": options["tokens"], "choices": {}, "saves": {}}
    for name, job, kind in jobs:
        if args.only in name:
            results[kind][name] = run_part(job, {**options, "choice": name}, PART_SECONDS)
            save(results)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="choices whose name contains this")
    parser.add_argument("--tokens", type=int, default=8192, help="per step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where checkpoints go; default: the temporary folder")
    parser.add_argument("--tiny", action="store_true", help="a model of two small blocks")
    parser.add_argument("--dry", action="store_true", help="on the CPU in the GPU's place")
    parser.add_argument("--json", nargs="?", const="gpu_memory.json", metavar="PATH")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = machine.open_device(args.dry)
    head = {"benchmark": "gpu_memory", "rounds": args.rounds}
    head["run"] = {**common.describe_run(), **device.describe()}

    def save(results: dict[str, Any]) -> None:
        if args.json is not None:
            common.write_json(args.json, {**head, **report.memory_report(results)})

    found = report.memory_report(measure(args, save))
    for title, columns, rows in report.choice_tables(found):
        print(f"\n{title}")
        common.print_table(columns, rows)
    for name, text in found["failures"].items():
        print(f"\nfailed: {name}\n{text.strip()}")
    raise SystemExit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
