"""Draw what each stream of a GPU does during a training step of fsdpc, and how much is hidden.

    python -m gpu.profile                   # prints; the picture goes to results/
    python -m gpu.profile --dry --tiny --picture /tmp/picture.png

Two steps of the model of step.py run under torch's profiler; the second step is drawn. A cast,
pack, sum or NCCL kernel is hidden while a kernel of another kind runs on another stream. With
--json the hidden shares are written to results/gpu_profile.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import common

from gpu import machine, report, step, timeline

# Prefix of a kernel's name -> the kernel's kind in the picture. The first matching prefix decides.
KINDS = (
    ("fsdpc_cuda_cast", "gather: cast"),
    ("fsdpc_cuda_pack", "pack"),
    ("fsdpc_cuda_reduce", "reduce"),
    ("fsdpc_cuda_norm", "norm"),
    ("fsdpc_cuda_clip", "norm"),
    ("fsdpc_cuda_scale", "norm"),
    ("nccl", "NCCL"),
    ("Memcpy", "copy, fill"),
    ("Memset", "copy, fill"),
    ("aten::copy_", "copy, fill"),
)
COLORS = {
    "compute": "#b8bcc4",
    "gather: cast": "#2a6fdb",
    "pack": "#e08a1e",
    "reduce": "#c2363b",
    "norm": "#8a5bc7",
    "NCCL": "#2f9e62",
    "copy, fill": "#8c6d4f",
}
MOVERS = ("gather: cast", "pack", "reduce", "NCCL")


def kind_of(name: str) -> str:
    """Return the kind that a kernel has in the picture."""
    return next((kind for begin, kind in KINDS if name.startswith(begin)), "compute")


def shares(work: list[timeline.Interval]) -> dict[str, Any]:
    """Return the milliseconds of each kind, and for ``MOVERS`` the share of them that is hidden."""
    found: dict[str, Any] = {}
    kinds = {kind: [one for one in work if kind_of(one.name) == kind] for kind in COLORS}
    for kind, own in kinds.items():
        if own:
            found[kind] = {"ms": timeline.busy(own) / 1e3, "count": len(own)}
        if own and kind in MOVERS:
            streams = {one.stream for one in own}
            beside = [
                one for one in work if kind_of(one.name) != kind and one.stream not in streams
            ]
            found[kind]["hidden"] = timeline.hidden(own, beside)
    return found


def busiest_stretch(work: list[timeline.Interval], share: float) -> tuple[float, float]:
    """Return the window in which the most kernels of ``MOVERS`` begin. Its length is `share` of the
    whole time.
    """
    begin, end = work[0].begin, max(one.end for one in work)
    length = (end - begin) * share
    starts = [one.begin for one in work if kind_of(one.name) in MOVERS] or [begin]
    counts = Counter(int((start - begin) // length) for start in starts)
    first = begin + counts.most_common(1)[0][0] * length
    return first, first + length


def draw(work: list[timeline.Interval], caption: str, path: Path) -> None:
    """Draw two charts with a lane for each stream: the whole step, and a stretch of the step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(14, 6), constrained_layout=True)
    whole = (work[0].begin, max(one.end for one in work))
    streams = sorted({one.stream for one in work}, key=lambda s: min_begin(work, s))
    windows = ((whole, "one step"), (busiest_stretch(work, 0.08), "a stretch of it"))
    for axis, (window, title) in zip(axes, windows, strict=True):
        draw_lanes(axis, work, streams, window)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("milliseconds")
    used = {kind_of(one.name) for one in work}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[k]) for k in COLORS if k in used]
    names = [kind for kind in COLORS if kind in used]
    figure.legend(handles, names, loc="outside upper right", ncols=len(names), fontsize=9)
    figure.suptitle(caption, fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def min_begin(work: list[timeline.Interval], stream: int) -> float:
    return min(one.begin for one in work if one.stream == stream)


def draw_lanes(
    axis: Any, work: list[timeline.Interval], streams: list[int], window: tuple[float, float]
) -> None:
    """Draw one lane per stream; times count from the beginning of the window."""
    first, last = window
    for lane, stream in enumerate(streams):
        for kind, color in COLORS.items():
            bars = [
                ((one.begin - first) / 1e3, (one.end - one.begin) / 1e3)
                for one in work
                if one.stream == stream
                and kind_of(one.name) == kind
                and one.end > first
                and one.begin < last
            ]
            axis.broken_barh(bars, (lane - 0.4, 0.8), color=color, linewidth=0)
    axis.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    axis.set_xlim(0, (last - first) / 1e3)
    axis.invert_yaxis()


def profile_steps(
    device: machine.Device, tiny: bool, tokens: int, engine: str
) -> timeline.Timeline:
    """Train a few steps, then profile two steps and return the timeline of the second."""
    from engines import build, random_batch

    work = step.workload(tokens, tiny, device.device)
    training = build(engine, work)
    batch = random_batch(work, 0)
    for _ in range(step.WARMUP_STEPS):
        training.step(batch)
    timeline.record(lambda: training.step(batch), device)  # warms the profiler up, too
    before = step.engine_waits(training.model)
    found = timeline.record(lambda: training.step(batch), device)
    waits = step.engine_waits(training.model) - before
    return timeline.Timeline(found.work, found.waits + waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--engine", default="fsdpc")
    parser.add_argument("--picture", default=str(common.RESULTS / "gpu_profile.png"))
    parser.add_argument("--tiny", action="store_true", help="a model of two small blocks")
    parser.add_argument("--dry", action="store_true", help="on the CPU in the GPU's place")
    parser.add_argument("--json", nargs="?", const="gpu_profile.json", metavar="PATH")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    tokens = step.TINY_TOKENS[-1] if args.tiny else args.tokens
    device = machine.open_device(args.dry)
    machine.start_group(device)
    run = {**common.describe_run(), **device.describe()}
    found = profile_steps(device, args.tiny, tokens, args.engine)
    if not found.work:
        raise SystemExit("the profiler saw no work on the GPU (is CUPTI there?)")
    figures = shares(found.work)
    head = {"benchmark": "gpu_profile", "engine": args.engine, "tokens": tokens, "run": run}
    result = {**head, "waits": found.waits, "kinds": figures}
    if args.json is not None:
        common.write_json(args.json, result)
    for _, titles, rows in report.profile_tables(result):
        common.print_table(titles, rows)
    print(f"waits of the host in the step: {found.waits}")
    try:
        caption = f"{args.engine}, {tokens:,} tokens; {run['device']}, torch {run['torch']}"
        draw(found.work, caption, Path(args.picture))
        print(f"picture: {args.picture}")
    except ImportError as error:
        print(f"no picture: {error}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
