"""Speed of the optimizers' steps on one thread, beside STREAM's triad and torch's own steps.

python benchmarks/bench_optim.py                     # print
python benchmarks/bench_optim.py --json              # and write results/optim.json
python benchmarks/bench_optim.py --only AdamW --numel 1000000
python benchmarks/bench_optim.py --only "^AdamW(, ave|$)" --steps 10m --name optim_average --json

"big" is one parameter of --numel elements; "small" is --tensors parameters of --small elements
each. All cases of one dtype share parameters, gradients and the states that have the same name,
because the speed of memory differs from place to place. Cases take turns in each round in one
process, and a share is a quotient within one round. Time is the thread's processor time. The bytes
of a step are the least that the step must move: it reads and writes parameters and states once, and
reads gradients once, or twice if it computes a norm. bitsandbytes' and torchao's 8-bit AdamW take
part if they are installed; torchao's is compiled by torch.compile in its first step. The triad
moves 12 bytes per element: a = b + s * c on float32 arrays of the same size. "in place" is the
memory rate that a step can reach: the rate of the step with the least arithmetic, SGD with momentum
on one large parameter (20 bytes per element).

"scaler, clip, cast" is a step with loss scaling (gradients are checked for infinities and divided
by the scale), the global norm, clipping and a copy of the parameters in bfloat16 for mixed
precision.

The last table shows whole training steps of bench_step.py's models on two ranks of fsdpc. The
optimizer is torch's fused AdamW, fsdpc's AdamW, or fsdpc's with an exponential average. --steps ""
leaves this table out.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import time
from collections.abc import Callable
from typing import Any

import bench_step
import common
import torch
from torch import nn

from fsdpc import _C, optim
from fsdpc.sharded_grad_scaler import ShardedGradScaler

MIN_SECONDS = 0.02  # the least time of one measurement
Call = Callable[[], Any]

F32, BF16 = torch.float32, torch.bfloat16
# What a case times: the step alone, the step with clipping, or the step with loss scaling, clipping
# and copies in bfloat16.
PLAIN, CLIP, SCALER = range(3)


def averaged(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Add an exponential average of the parameters to the optimizer."""
    optim.Average(optimizer)
    return optimizer


# By case: bytes that a step moves per parameter, dtype, a function that makes the optimizer, and
# what the case times.
STEPS: dict[str, tuple[float, torch.dtype, Callable[[Any], Any], int]] = {
    "AdamW": (28, F32, lambda p: optim.AdamW(p), PLAIN),
    "torch AdamW fused": (28, F32, lambda p: torch.optim.AdamW(p, fused=True), PLAIN),
    "torch AdamW foreach": (28, F32, lambda p: torch.optim.AdamW(p, foreach=True), PLAIN),
    "AdamW, average": (36, F32, lambda p: averaged(optim.AdamW(p)), PLAIN),
    "AdamW, clip": (32, F32, lambda p: optim.AdamW(p), CLIP),
    "torch AdamW fused, clip": (32, F32, lambda p: torch.optim.AdamW(p, fused=True), CLIP),
    "AdamW, scaler, clip, cast": (34, F32, lambda p: optim.AdamW(p), SCALER),
    "torch AdamW fused, scaler, clip, cast": (
        54,
        F32,
        lambda p: torch.optim.AdamW(p, fused=True),
        SCALER,
    ),
    "SGD momentum": (20, F32, lambda p: optim.SGD(p, momentum=0.9), PLAIN),
    "torch SGD fused": (20, F32, lambda p: torch.optim.SGD(p, momentum=0.9, fused=True), PLAIN),
    "Lion": (20, F32, lambda p: optim.Lion(p), PLAIN),
    "AdamW bf16": (14, BF16, lambda p: optim.AdamW(p), PLAIN),
    "torch AdamW fused bf16": (14, BF16, lambda p: torch.optim.AdamW(p, fused=True), PLAIN),
    "AdamWBF16, bf16": (14, BF16, lambda p: optim.AdamWBF16(p), PLAIN),
    "AdamWBF16, fp32": (20, F32, lambda p: optim.AdamWBF16(p), PLAIN),
    "AdamW8bit": (16.06, F32, lambda p: optim.AdamW8bit(p), PLAIN),
    "AdamMini": (24, F32, lambda p: optim.AdamMini(p, block=lambda *_: 1024), PLAIN),
}


def peer(module: str, name: str) -> Callable[[Any], Any] | None:
    """Return another library's optimizer, or None if the library is missing or does not load."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None


PEERS = {
    "bitsandbytes AdamW8bit": peer("bitsandbytes.optim", "AdamW8bit"),
    "torchao AdamW8bit": peer("torchao.optim", "AdamW8bit"),
}
STEPS |= {
    name: (16.06, F32, lambda p, make=make: make(p), PLAIN)
    for name, make in PEERS.items()
    if make is not None
}
# Pairs of a case and the case that its time is compared with, if both are measured.
RIVALS = {
    "AdamW": "torch AdamW fused",
    "AdamW, average": "AdamW",
    "AdamW, clip": "torch AdamW fused, clip",
    "AdamW, scaler, clip, cast": "torch AdamW fused, scaler, clip, cast",
    "SGD momentum": "torch SGD fused",
    "AdamW bf16": "torch AdamW fused bf16",
    "AdamWBF16, bf16": "torch AdamW fused bf16",
    "AdamW8bit": "bitsandbytes AdamW8bit",
}


@functools.cache
def parameters(dtype: torch.dtype, count: int, numel: int) -> list[nn.Parameter]:
    """Return parameters with gradients, which all cases of these sizes and dtype share."""
    made = []
    for _ in range(count):
        param = nn.Parameter(torch.randn(numel).to(dtype))
        param.grad = (torch.randn(numel) * 0.1).to(dtype)
        made.append(param)
    return made


STATES: dict[tuple[nn.Parameter, str, torch.dtype], torch.Tensor] = {}


def share_states(params: list[nn.Parameter], optimizer: Any) -> None:
    """Make an optimizer's states, and replace them by equally named states of earlier cases."""
    optimizer.step()
    for param in params:
        state = optimizer.state[param]
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                state[name] = STATES.setdefault((param, name, value.dtype), value)


def step_call(name: str, count: int, numel: int) -> Call:
    """Return a function that makes one step, with clipping or loss scaling if ``STEPS`` says so.

    torch clips the shared gradients in place. After the first clip the norm is near the limit, so
    that later clips hardly change the gradients.
    """
    _, dtype, make, beside = STEPS[name]
    params = parameters(dtype, count, numel)
    optimizer = make(params)
    share_states(params, optimizer)
    if beside == PLAIN:
        return optimizer.step
    ours = isinstance(optimizer, optim.AdamW)
    if beside == SCALER:
        return scaler_call(params, optimizer, ours)
    if ours:
        return lambda: optimizer.step_and_clip(1.0)

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return clip_and_step


def scaler_call(params: list[nn.Parameter], optimizer: Any, ours: bool) -> Call:
    """Return a step with loss scaling, clipping and copies of all parameters in bfloat16.

    torch divides the same gradients by the scale in place in each step. So the scale alternates
    between 2 and 1/2, and the gradients keep their size.
    """
    scaler = ShardedGradScaler("cpu", init_scale=2.0, growth_interval=1 << 30)
    scaler.scale(torch.zeros(()))  # creates the tensor that holds the scale
    copies = [torch.empty_like(param, dtype=BF16) for param in params]
    if ours:
        optimizer.write_copies(dict(zip(params, copies, strict=True)))

    def step() -> None:
        if ours:
            scaler.step(optimizer, max_norm=1.0)
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
        scaler.update(1 / scaler.get_scale())
        if not ours:
            with torch.no_grad():
                torch._foreach_copy_(copies, params)

    return step


def triad_call(count: int, numel: int) -> Call:
    """Return STREAM's triad on float32 arrays, computed by torch."""
    a, b, c = (torch.randn(count * numel) for _ in range(3))
    return lambda: torch.add(b, c, alpha=0.5, out=a)


def in_place_call(count: int, numel: int) -> Call:
    """Return the step with the least arithmetic, which reads and writes 20 bytes per element."""
    return step_call("SGD momentum", 1, count * numel)


def seconds(call: Call) -> float:
    """Return the processor seconds of one call; short calls are repeated and averaged."""
    done, start = 0, time.thread_time()
    while True:
        call()
        done += 1
        spent = time.thread_time() - start
        if spent >= MIN_SECONDS:
            return spent / done


def measure(names: list[str], count: int, numel: int, rounds: int) -> dict[str, Any]:
    """Return by case: ns per parameter, GB/s, shares of two memory rates, time / rival's time."""
    calls = {"triad": triad_call(count, numel), "in place": in_place_call(count, numel)}
    calls |= {name: step_call(name, count, numel) for name in names}
    for call in calls.values():  # warm-up: make the states and touch every page
        call()
        call()
    cases = {name: (lambda call=call: seconds(call)) for name, call in calls.items()}
    values = common.interleave(cases, rounds)
    total = count * numel
    triad, in_place = (
        [size * total / s for s in values[name]] for name, size in (("triad", 12), ("in place", 20))
    )
    results: dict[str, Any] = {
        name: {"GB/s": common.spread([rate / 1e9 for rate in rates])}
        for name, rates in (("triad", triad), ("in place", in_place))
    }
    for name in names:
        rates = [STEPS[name][0] * total / s for s in values[name]]
        found = {
            "ns": common.spread([s / total * 1e9 for s in values[name]]),
            "GB/s": common.spread([rate / 1e9 for rate in rates]),
            "of_triad": common.spread([r / t for r, t in zip(rates, triad, strict=True)]),
            "of_in_place": common.spread([r / t for r, t in zip(rates, in_place, strict=True)]),
        }
        rival = RIVALS.get(name)
        if rival in values:
            pairs = zip(values[name], values[rival], strict=True)
            found["of_torch"] = common.spread([mine / theirs for mine, theirs in pairs])
        results[name] = found
    return results


def show(title: str, results: dict[str, Any]) -> None:
    """Print one table."""
    triad, in_place = (results[name]["GB/s"]["median"] for name in ("triad", "in place"))
    print(f"\n{title}; triad {triad:.1f} GB/s, in place {in_place:.1f} GB/s")

    def text(entry: dict[str, Any], key: str) -> str:
        return f"{entry[key]['median']:.3f}" if key in entry else ""

    head = ["step", "ns / parameter", "GB/s", "x triad", "x in place", "time / other's"]
    keys = ("ns", "GB/s", "of_triad", "of_in_place", "of_torch")
    rows = [
        [name, *(text(entry, key) for key in keys)]
        for name, entry in results.items()
        if "ns" in entry
    ]
    common.print_table(head, rows)


def whole_steps(model: str, rounds: int) -> dict[str, Any]:
    """Return the slower rank's milliseconds of a training step by optimizer, and their ratios."""
    names = ["fsdpc-torch-fused", "fsdpc-optim", "fsdpc-optim-average"]
    found = bench_step.run_ranks(bench_step.time_job, 2, model, names, rounds)
    seconds = [found["seconds"][name] for name in names]
    losses = [found["losses"][name] for name in names[:2]]

    def ratio(mine: list[float], theirs: list[float]) -> dict[str, float]:
        return common.spread([a / b for a, b in zip(mine, theirs, strict=True)])

    return {
        **{
            name: common.spread([1e3 * value for value in values])
            for name, values in zip(names, seconds, strict=True)
        },
        "of_torch": ratio(seconds[1], seconds[0]),
        "average_of_without": ratio(seconds[2], seconds[1]),
        "average_cpu_of_without": ratio(*(found["cpu"][name] for name in names[:0:-1])),
        "loss_difference": max(abs(a - b) for a, b in zip(*losses, strict=True)),
    }


def show_steps(results: dict[str, Any]) -> None:
    """Print the table of whole steps."""
    print("\ntraining steps, 2 ranks")
    head = ["model", "torch fused, ms", "fsdpc.optim, ms", "time / torch's", "with average /"]
    keys = ("fsdpc-torch-fused", "fsdpc-optim", "of_torch", "average_of_without")
    rows = [
        [model, *(f"{entry[key]['median']:.3f}" for key in keys), f"{entry['loss_difference']:.1e}"]
        for model, entry in results.items()
    ]
    common.print_table([*head, "losses differ by"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=16 << 20)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--small", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--steps", help="models of whole training steps; 10m,85m, and with --only none"
    )
    parser.add_argument("--only", default="", help="cases with this expression in their names")
    parser.add_argument("--name", default="optim", help="of the file of results")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = common.describe_run(kept=options.json)
    result = {
        "run": run,
        "kernels": _C.kernel_names()[-1],
        "threads": 1,
    }
    names = [name for name in STEPS if re.search(options.only, name)]
    few = [name for name in names if "torch " in name + RIVALS.get(name, "")]
    for title, chosen, count, numel in (
        ("big", names, 1, options.numel),
        ("small", few, options.tensors, options.small),
    ):
        found = measure(chosen, count, numel, options.rounds)
        result[title] = {"tensors": count, "numel": numel, "cases": found}
        show(f"{title}: {count} x {numel} parameters", found)
    steps = ("" if options.only else "10m,85m") if options.steps is None else options.steps
    models = [model for model in steps.split(",") if model]
    result["steps"] = {model: whole_steps(model, 2 * options.rounds) for model in models}
    if models:
        show_steps(result["steps"])
    if options.json:
        common.write_json(f"{options.name}.json", result)


if __name__ == "__main__":
    main()
