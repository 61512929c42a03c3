"""Measure memory and step time for each way to checkpoint or compress activations.

python benchmarks/bench_activations.py               # print
python benchmarks/bench_activations.py --json        # and write results/activations.json
python benchmarks/bench_activations.py --blocks 4 --width 256 --heads 4 --seq 256
python benchmarks/bench_activations.py --curves 400 --blocks 6 --width 384 --heads 6 --seq 256 \
    --batch 2 --json                                 # and results/activations_curves.json
python benchmarks/bench_activations.py --picture docs/activations.svg

A step is a forward and a backward of the example's GPT without sharding, in float32 on one thread.
Each choice runs in a fresh process, in which malloc returns freed memory to the system at once.
"kept" is the growth of resident memory during the forward of the last step. "peak" is the largest
growth since the start of the last step, sampled every 2 ms. "seconds" is the least processor time
of a step. "of_plain" columns are relative to the first choice, "plain". --curves trains with plain,
INT8 and bfloat16 activations from equal weights on equal batches, two runs at a time. The training
text is the sources of Python's standard library, and the printed losses are in bits per byte.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import common
import torch
from tqdm import tqdm

from fsdpc.activations import checkpoint, compress

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import gpt  # noqa: E402

CHOICES: dict[str, tuple[dict[str, Any] | None, str | None]] = {
    "plain": (None, None),
    "ratio 1/4": ({"ratio": "1/4"}, None),
    "ratio 1/2": ({"ratio": "1/2"}, None),
    "ratio 1": ({"ratio": 1}, None),
    "matmul": ({"policy": "matmul"}, None),
    "int8": (None, "int8"),
    "bf16": (None, "bf16"),
    "ratio 1/2, int8": ({"ratio": "1/2"}, "int8"),
    "ratio 1/2, bf16": ({"ratio": "1/2"}, "bf16"),
    "ratio 1, int8": ({"ratio": 1}, "int8"),
    "matmul, int8": ({"policy": "matmul"}, "int8"),
}


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak(threading.Thread):
    """A thread that samples the resident memory and keeps the maximum until ``stop`` is called."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ended = 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.002):
            self.most = max(self.most, resident())

    def stop(self) -> int:
        """End the thread and return the largest resident memory in bytes."""
        self.ended.set()
        self.join()
        return self.most


def built(name: str, options: argparse.Namespace) -> tuple[gpt.GPT, str | None]:
    """Return the model with the choice's checkpointing, and the dtype into which saved tensors are
    compressed (None: they are not compressed).
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = gpt.GPTConfig(
        width=options.width, layers=options.blocks, heads=options.heads, context=options.seq
    )
    model = gpt.GPT(config)
    how, dtype = CHOICES[name]
    if how is not None:
        checkpoint(model, blocks=gpt.Block, **how)
    return model, dtype


def one(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure one choice in this process."""
    model, dtype = built(name, options)
    tokens = torch.randint(256, (options.batch, options.seq))
    result: dict[str, float] = {}
    for _ in range(options.steps):
        peak, before, start = Peak(), resident(), time.process_time()
        with compress(model, dtype) if dtype else nullcontext():
            loss = model(tokens).square().mean()
        result["kept_mb"] = (resident() - before) / 1e6
        loss.backward()
        seconds = time.process_time() - start
        result["seconds"] = min(seconds, result.get("seconds", seconds))
        result["peak_mb"] = (peak.stop() - before) / 1e6
        del loss
    return result


def in_fresh_process(name: str, arguments: list[str]) -> dict[str, float]:
    """Run ``one`` in a process whose malloc maps each block of 64 KiB or more with mmap. Freeing
    such a block unmaps it.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, *arguments, "--one", name]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if ended.returncode:
        raise SystemExit(f"{name} failed:\n{ended.stderr}")
    return json.loads(ended.stdout.splitlines()[-1])


def losses(name: str, options: argparse.Namespace) -> list[float]:
    """Train with a choice and return the loss of each step in bits per byte."""
    import train_gpt

    model, dtype = built(name, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data, _ = train_gpt.read_corpus()
    rng = torch.Generator().manual_seed(1)
    found = []
    for step in tqdm(range(options.curves), desc=name, mininterval=10):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 20)
        batch = train_gpt.draw_batch(data, options.batch, options.seq, rng, torch.device("cpu"))
        with compress(model, dtype) if dtype else nullcontext():
            loss = train_gpt.loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()) * train_gpt.BITS)
    return found


def curves(options: argparse.Namespace) -> None:
    """Print the ``losses`` of three choices and, with --json, write them."""
    run = common.describe_run(kept=options.json)
    names = ("plain", "int8", "bf16")
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, fresh, common.end_with_parent) as pool:
        found = dict(zip(names, pool.map(losses, names, [options] * len(names)), strict=True))
    rows = []
    for name, values in found.items():
        last = sum(values[-50:]) / len(values[-50:])
        plain = found["plain"][-50:]
        apart = max(abs(a - b) for a, b in zip(values[-50:], plain, strict=True))
        rows.append([name, f"{values[0]:.4f}", f"{last:.4f}", f"{apart:.4f}"])
    common.print_table(["choice", "first", "mean of the last 50", "largest gap to plain"], rows)
    if options.json:
        sizes = {k: getattr(options, k) for k in ("blocks", "width", "heads", "seq", "batch")}
        content = {"run": run, "sizes": sizes, "bits_per_byte": found}
        common.write_json("activations_curves.json", content)


def picture(path: str) -> None:
    """Draw results/activations.json and activations_curves.json as one SVG."""
    pyplot = common.pyplot()
    cases = json.loads((common.RESULTS / "activations.json").read_text())["cases"]
    trained = json.loads((common.RESULTS / "activations_curves.json").read_text())["bits_per_byte"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    names = list(cases)[::-1]
    places = range(len(names))
    left.barh(places, [cases[n]["peak_mb"] for n in names], color="#aed6f1", label="peak")
    left.barh(places, [cases[n]["kept_mb"] for n in names], color="#1b4f72", label="kept")
    for place, name in zip(places, names, strict=True):
        text = f"{cases[name]['time_of_plain']:.2f} x time"
        left.text(cases[name]["peak_mb"] + 8, place, text, va="center", fontsize=8)
    left.set_yticks(places, names)
    left.set_xlim(0, 1.25 * max(entry["peak_mb"] for entry in cases.values()))
    left.set_xlabel("MB above the start of the step")
    left.legend(loc="lower right", frameon=False)
    for (name, values), style in zip(trained.items(), ("-", "--", ":"), strict=True):
        means = [sum(values[max(0, i - 19) : i + 1]) / min(20, i + 1) for i in range(len(values))]
        right.plot(range(1, len(values) + 1), means, style, label=name)
    right.set_xlabel("step")
    right.set_ylabel("bits per byte, mean of 20 steps")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one", choices=CHOICES, help="measure one choice in this process")
    parser.add_argument("--curves", type=int, default=0, help="train this many steps instead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", metavar="FILE", help="only draw the results that are there")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first step also imports and allocates")
    if options.picture:
        picture(options.picture)
        return
    if options.curves:
        curves(options)
        return
    if options.one:
        common.end_with_parent()
        print(json.dumps(one(options.one, options)))
        return
    run = common.describe_run(kept=options.json)
    arguments = [argument for argument in sys.argv[1:] if argument != "--json"]
    found = {name: in_fresh_process(name, arguments) for name in tqdm(CHOICES)}
    for entry in found.values():
        entry["kept_of_plain"] = entry["kept_mb"] / found["plain"]["kept_mb"]
        entry["time_of_plain"] = entry["seconds"] / found["plain"]["seconds"]
    columns = ["kept_mb", "kept_of_plain", "peak_mb", "seconds", "time_of_plain"]
    rows = [[name, *(f"{entry[c]:.2f}" for c in columns)] for name, entry in found.items()]
    common.print_table(["choice", *columns], rows)
    if options.json:
        sizes = {k: getattr(options, k) for k in ("blocks", "width", "heads", "seq", "batch")}
        common.write_json("activations.json", {"run": run, "sizes": sizes, "cases": found})


if __name__ == "__main__":
    main()
