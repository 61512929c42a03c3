"""Time optimizer steps on a GPU: fsdpc's kernels beside torch's fused and foreach steps.

    python -m gpu.optim                      # one tensor of 128 Mi elements, and 2,000 of 4,096
    python -m gpu.optim --only AdamW --json
    python -m gpu.optim --dry --tiny         # the same lines without a GPU

All cases of one size and dtype take turns with the same parameters and gradients, and a ratio
divides two times of one round. "GPU" is the time between two events around several steps, divided
by their number. "host" is the time that the host needs to queue one step on an idle GPU. The bytes
of a step are the least that the step must move: it reads and writes parameters and states once, and
reads gradients once, or twice with clipping. A share divides a step's bytes per second by those of
torch's copy_ between two tensors on the same GPU; bytes read and written both count. "clip" is
a step with clipping by the global norm: fsdpc's `step_and_clip`, or torch's `clip_grad_norm_` and
fused step.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import nn

from fsdpc import optim
from gpu import machine, report
from gpu.kernels import MIB, timed

SIZES = {"big": (1, 128 * MIB), "small": (2000, 4096)}
TINY = {"big": (1, 4096), "small": (8, 64)}
STEPS_S = 20e-3  # so many steps run between two events that they take about this many seconds
COPY_BYTES = 1 << 30
Step = Callable[[], object]

# The dtype, the bytes per element that a step must move, and the case to compare with.
CASES: dict[str, tuple[str, float, str]] = {
    "fsdpc AdamW": ("float32", 28, "torch AdamW fused"),
    "torch AdamW fused": ("float32", 28, ""),
    "torch AdamW foreach": ("float32", 28, "torch AdamW fused"),
    "fsdpc AdamW, clip": ("float32", 32, "torch AdamW fused, clip"),
    "torch AdamW fused, clip": ("float32", 32, ""),
    "fsdpc SGD": ("float32", 20, "torch SGD fused"),
    "torch SGD fused": ("float32", 20, ""),
    "fsdpc Lion": ("float32", 20, "torch AdamW fused"),
    "fsdpc AdamMini": ("float32", 20, "torch AdamW fused"),
    "fsdpc AdamW8bit": ("float32", 16, "torch AdamW fused"),
    "fsdpc AdamW, bf16": ("bfloat16", 14, "torch AdamW fused, bf16"),
    "torch AdamW fused, bf16": ("bfloat16", 14, ""),
    "fsdpc AdamWBF16, bf16": ("bfloat16", 14, "torch AdamW fused, bf16"),
}


def make_step(name: str, params: list[nn.Parameter]) -> Step:
    """Return the step of a case on these parameters and their gradients."""
    library, kind = name.split(",")[0].split(" ")[:2]
    clip = name.endswith(", clip")
    options: dict[str, Any] = {"lr": 1e-5}
    if kind == "SGD":
        options["momentum"] = 0.9
    if library == "torch":
        how = name.split(",")[0].split(" ")[2]
        optimizer = getattr(torch.optim, kind)(params, **options, **{how: True})
        if clip:
            return lambda: (nn.utils.clip_grad_norm_(params, 1.0), optimizer.step())
        return optimizer.step
    if kind == "AdamMini":
        named = [(f"p{i}", p) for i, p in enumerate(params)]
        optimizer = optim.AdamMini(named, block=lambda name, shape: 4096, **options)
    else:
        optimizer = getattr(optim, kind)(params, **options)
    return (lambda: optimizer.step_and_clip(1.0)) if clip else optimizer.step


def host_seconds(device: machine.Device, step: Step) -> float:
    device.synchronize()
    begin = time.perf_counter()
    step()
    elapsed = time.perf_counter() - begin
    device.synchronize()
    return elapsed


def copy_rate(device: machine.Device, dry: bool) -> float:
    """Return the median bytes per second, read and written, of seven measurements of a copy."""
    source = torch.ones((1 << 16) if dry else COPY_BYTES // 8, device=device.device)
    target = torch.empty_like(source)
    rate = timed(device, [lambda: target.copy_(source)], STEPS_S)
    bytes_ = 2 * source.numel() * source.element_size()
    return bytes_ / common.spread([rate() for _ in range(7)])["median"]


def measure(
    device: machine.Device, count: int, numel: int, names: list[str], rounds: int, copy: float
) -> dict[str, Any]:
    """Measure all cases of one size; the cases of one dtype share their parameters."""
    found: dict[str, Any] = {}
    for dtype in dict.fromkeys(CASES[name][0] for name in names):
        chosen = [name for name in names if CASES[name][0] == dtype]
        of = {"dtype": getattr(torch, dtype), "device": device.device}
        params = [nn.Parameter(torch.randn(numel, **of)) for _ in range(count)]
        for param in params:
            param.grad = torch.randn_like(param) * 1e-3
        steps = {name: make_step(name, params) for name in chosen}
        values = common.interleave(
            {name: timed(device, [step], STEPS_S) for name, step in steps.items()}, rounds
        )
        host = {
            name: [host_seconds(device, step) for _ in range(rounds)]
            for name, step in steps.items()
        }
        for name in chosen:
            _, bytes_, peer = CASES[name]
            one = {
                "us": common.spread([1e6 * value for value in values[name]]),
                "host_us": common.spread([1e6 * value for value in host[name]]),
                "of_copy": common.spread(
                    [bytes_ * count * numel / value / copy for value in values[name]]
                ),
            }
            if peer in values:
                pairs = zip(values[name], values[peer], strict=True)
                one["of_peer"] = common.spread([a / b for a, b in pairs])
            found[name] = one
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU does at once")
    parser.add_argument("--dry", action="store_true", help="on the CPU in the GPU's place")
    parser.add_argument("--note", default="", help="kept in the JSON")
    parser.add_argument("--json", nargs="?", const="gpu_optim.json", metavar="PATH")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = machine.open_device(args.dry)
    names = [name for name in CASES if args.only in name]
    copy = copy_rate(device, args.dry)
    shapes = TINY if args.tiny else SIZES
    head = {
        "benchmark": "gpu_optim",
        "shapes": shapes,
        "note": args.note,
        "rounds": args.rounds,
        "run": {**common.describe_run(), **device.describe()},
        "copy_gbps": copy / 1e9,
    }
    sizes: dict[str, Any] = {}
    for size, (count, numel) in shapes.items():
        sizes[size] = measure(device, count, numel, names, args.rounds, copy)
        if args.json is not None:
            common.write_json(args.json, {**head, "sizes": sizes})
    for title, columns, rows in report.optim_tables({**head, "sizes": sizes}):
        print(f"\n{title}")
        common.print_table(columns, rows)


if __name__ == "__main__":
    main()
