"""Functions that run the fuzzer's cases on ranks, and judge the cases. The ranks run cases until a
case is neither ok nor invalid.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import math
import os
import re
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cases
import harness
import jitter
import on_hosts
import programs
import sides
import torch
import torch.distributed as dist
from habits import REFUSED
from kinds import STATE
from trees import Cut, describe

PEER_TIMEOUT_S = 15.0  # the deadline of a wait for another rank
CASE_TIMEOUT_S = 40.0  # the limit of a whole case, after which the rank prints its stacks and ends
BATCH = 100
WHOLE = Cut()
BAD = ("WRONG", "HUNG", "CRASHED")
ENGINE = {"CommTimeout"}  # types of errors that a rank raises when its deadline has passed
LEFT = {"PeerError"}  # types of errors that a rank raises when another rank has failed before


@dataclasses.dataclass
class Result:
    number: int
    outcome: str
    text: str = ""
    story: str = ""


# --- in the ranks --------------------------------------------------------------------------------


def run_batch(
    rank: int,
    world: int,
    *,
    seed: int,
    numbers: list[int],
    cut: Cut,
    folder: str,
    patch: str = "",
    until: float = math.inf,
) -> None:
    """Run cases one after the other until the time `until` of the monotonic clock. The outcome of a
    case is written before the next case begins.
    """
    STATE.rank = rank
    if patch:
        import faults

        getattr(faults, patch)(rank)
    groups = hybrid_groups(rank, world)
    warnings.simplefilter("ignore")
    gc.collect()
    gc.freeze()
    with open(os.path.join(folder, f"rank{rank}"), "w") as file:
        for number in numbers:
            if until < math.inf and not sides.agree(time.monotonic() < until):
                return
            print(f"begin {number}", file=file, flush=True)
            faulthandler.dump_traceback_later(CASE_TIMEOUT_S, exit=True)
            outcome, text, story = run_case(f"{seed}:{number}", cut, world, groups)
            faulthandler.cancel_dump_traceback_later()
            line = json.dumps(
                {
                    "number": number,
                    "outcome": outcome,
                    "text": text,
                    "story": story,
                    "time": time.monotonic(),
                }
            )
            print(line, file=file, flush=True)
            if outcome not in ("ok", "invalid"):
                os._exit(0)  # ranks may be at different places, so new ranks run the other cases


def hybrid_groups(rank: int, world: int) -> Any:
    if world != 4:
        return None
    inner = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    outer = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return inner[rank // 2], outer[rank % 2]


def run_case(seed: str, cut: Cut, world: int, groups: Any) -> tuple[str, str, str]:
    import traceback

    case = cases.draw_case(seed, cut, world)
    for name, slots in (("GATHER", case.config.gather_slots), ("REDUCE", case.config.reduce_slots)):
        os.environ.pop(f"FSDPC_{name}_SLOTS", None)
        if slots:
            os.environ[f"FSDPC_{name}_SLOTS"] = str(slots)
    for p in case.model.parameters():
        if not p.requires_grad:
            p.was_frozen = True
    try:
        expected = programs.run(sides.Plain(case, sides.copied(case.model)))
    except sides.Abandoned:
        return "invalid", "", ""
    except Exception as error:
        sides.agree(False)
        return "invalid", normalised(error), ""
    finite = all(bool(v.isfinite().all()) for _, values in expected for v in values.values())
    if not sides.agree(finite):
        return "invalid", "" if finite else "values that are not finite", ""
    try:
        late = jitter.jittered(seed, STATE.rank, 0.3) if case.config.jitter else nullcontext()
        with late:
            if case.config.in_place:
                case.model_before = sides.copied(case.model)
                side: Any = sides.InPlace(case, case.model, groups)
            else:
                side = sides.Sharded(case, case.model, groups)
            got = programs.run(side)
    except Exception as error:
        kind = type(error).__name__
        outcome = "HUNG" if kind in ENGINE else "left" if kind in LEFT else "refused"
        return outcome, normalised(error), traceback.format_exc()
    low = case.config.param != "" or "compressed" in case.features
    text = difference(got, expected, low)
    del got, side
    gc.collect()
    return ("WRONG", text, text) if text else ("ok", "", "")


def difference(got: Any, expected: Any, low: bool) -> str:
    """Return "" if the records are equal, else the first record that differs. NaN never equals
    anything."""
    if [label for label, _ in got] != [label for label, _ in expected]:
        return f"records differ: {[g for g, _ in got][:60]}"
    for (label, values), (_, others) in zip(got, expected, strict=True):
        if REFUSED in values:
            continue
        if values.keys() != others.keys():
            return f"{label}: names differ: {sorted(values.keys() ^ others.keys())[:6]}"
        text = compare(values, others, low)
        if text:
            return f"{label}: {text}"
    return ""


# In fp32, the values of the two sides differ only by the order of sums, and a few steps amplify the
# differences. In low precision, a parameter that differs in its last bit may be rounded to another
# value of the compute type.
def compare(values: dict[str, Any], others: dict[str, Any], low: bool) -> str:
    rtol = 0.15 if low else 1e-3
    largest = [o.double().abs().max() for o in others.values() if o.numel()]
    scale = float(torch.stack(largest).max()) if largest else 0.0
    for name, value in values.items():
        other = others[name]
        if value.shape != other.shape:
            return f"{name}: shape {tuple(value.shape)}, expected {tuple(other.shape)}"
        if not value.numel():
            continue
        a, b = value.double(), other.double()
        limit = (
            rtol * torch.maximum(b.abs().max(), torch.tensor((0.3 if low else 0.01) * scale)) + 1e-6
        )
        gap = (a - b).abs()
        if not bool((gap <= limit).all()):
            nan = bool(torch.isnan(a).any())
            return (
                f"{name}: {'NaN' if nan else f'off by {float(gap.max() / max(scale, 1e-12)):.2g}'}"
                f" ({int((~(gap <= limit)).sum())} of {value.numel()} elements)"
            )
    return ""


def normalised(error: Exception) -> str:
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    text = re.sub(r"body[\w.]*|_fsdp_wrapped_module[\w.]*|\bc\d[\w.]*|0x[0-9a-f]+", "~", text)
    return re.sub(r"\d+", "N", text)[:220]


# --- in the driver -------------------------------------------------------------------------------


def run_numbers(
    seed: int,
    numbers: list[int],
    cut: Cut,
    config: cases.Config,
    *,
    timeout: float | None = None,
    patch: str = "",
    until: float = math.inf,
) -> Iterator[Result]:
    """Run cases that need the same kind of ranks. After a case that is neither ok nor invalid,
    start new ranks."""
    left = list(numbers)
    while left and time.monotonic() < until:
        folder = tempfile.mkdtemp(prefix="fsdpc-fuzz-")
        try:
            outcomes = harness.run_ranks(
                run_batch,
                config.world,
                faults=True,
                timeout=CASE_TIMEOUT_S * 2 + 10 * len(left),
                env=environment(config, timeout),
                seed=seed,
                numbers=left,
                cut=cut,
                folder=folder,
                patch=patch,
                until=until,
            )
            results = collect(Path(folder), config.world, left, outcomes)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        yield from results
        if not results and time.monotonic() < until:
            raise RuntimeError("no case ran: " + outcomes[0].log[-3000:])
        left = left[len(results) :]


def environment(config: cases.Config, timeout: float | None) -> dict[str, str]:
    over_a_wire = "auto" if config.hosts else "wire" if config.flies else "c10d"
    return {
        **(on_hosts.counted_as(config.hosts) if config.hosts else {}),
        "FSDPC_COLLECTIVES": "auto" if config.collectives == "shm" else over_a_wire,
        "FSDPC_POISON": os.environ.get("FSDPC_POISON", "1"),
        "FSDPC_TIMEOUT": str(timeout or PEER_TIMEOUT_S),
    }


def collect(folder: Path, world: int, numbers: list[int], outcomes: list[Any]) -> list[Result]:
    """Return the results of the cases, up to the first case that is neither ok nor invalid,
    inclusive."""
    lines, begun = [], set()
    for rank in range(world):
        file = folder / f"rank{rank}"
        text = file.read_text().splitlines() if file.exists() else []
        begun |= {int(line.split()[1]) for line in text if line.startswith("begin ")}
        lines.append({r["number"]: r for r in map(json.loads, (t for t in text if t[0] == "{"))})
    results = []
    for number in filter(begun.__contains__, numbers):
        found = [of_rank.get(number) for of_rank in lines]
        result = judge(number, found, outcomes)
        results.append(result)
        if result.outcome not in ("ok", "invalid"):
            break
    return results


def judge(number: int, found: list[dict[str, Any] | None], outcomes: list[Any]) -> Result:
    present = sorted((f for f in found if f), key=lambda f: f["time"])
    signalled = [o for o, f in zip(outcomes, found, strict=True) if f is None and o.exit_signal]
    if signalled and not any(o.expired for o in outcomes):
        numbers = ", ".join(f"rank {o.rank}: signal {o.exit_signal}" for o in signalled)
        return Result(number, "CRASHED", numbers, signalled[0].log[-4000:])
    for outcome in ("WRONG", "HUNG"):
        for f in present:
            if f["outcome"] == outcome:
                return Result(number, outcome, f["text"], f["story"])
    for f in present:
        if f["outcome"] == "refused":
            return Result(number, "refused", f["text"], f["story"])
    if len(present) < len(found):
        logs = "\n".join(
            f"rank {o.rank}: {o.error}\n{o.log[-2500:]}"
            for o, f in zip(outcomes, found, strict=True)
            if f is None
        )
        return Result(number, "HUNG", "a rank did not come to an end", logs)
    for f in present:
        if f["outcome"] != "ok":
            return Result(number, f["outcome"], f["text"], f["story"])
    return Result(number, "ok")


class Summary:
    def __init__(self, seed: int) -> None:
        self.seed, self.begun = seed, time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.texts: dict[tuple[str, str], list[int]] = {}

    def add(self, result: Result) -> None:
        self.outcomes[result.outcome] += 1
        if result.outcome != "ok":
            # Errors that differ in numbers only count as the same fault.
            key = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", result.text)[:160]
            self.texts.setdefault((result.outcome, key), []).append(result.number)

    def line(self) -> str:
        return ", ".join(
            f"{self.outcomes[k]} {k}"
            for k in ("ok", "invalid", "refused", *BAD)
            if self.outcomes[k]
        )

    def table(self) -> str:
        seconds = time.monotonic() - self.begun
        total = sum(self.outcomes.values())
        lines = [
            f"\n{total} cases of seed {self.seed} in {seconds:.0f} s "
            f"({60 * total / max(seconds, 1e-9):.0f} a minute): {self.line()}"
        ]
        order = {"CRASHED": 0, "HUNG": 1, "WRONG": 2, "refused": 3, "invalid": 4}
        for (outcome, text), numbers in sorted(
            self.texts.items(), key=lambda i: (order.get(i[0][0], 9), -len(i[1]))
        ):
            shown = " ".join(map(str, numbers[:3]))
            lines.append(f"  {outcome:8} {len(numbers):4} x  {text or '(no text)'}  [{shown}]")
        return "\n".join(lines)


def fuzz(
    seed: int,
    numbers: list[int],
    cut: Cut = WHOLE,
    world: int = 0,
    minutes: float = 0.0,
    each: Any = None,
    batch: int = BATCH,
) -> Summary:
    """Run cases in batches; all cases of a batch need the same kind of ranks. Ctrl-C ends the run
    with a summary."""
    summary = Summary(seed)
    until = time.monotonic() + 60 * minutes if minutes else math.inf
    try:
        for config, members in batches(seed, numbers, cut, world, batch):
            for result in run_numbers(seed, members, cut, config, until=until):
                summary.add(result)
                if each:
                    each(result, summary)
    except KeyboardInterrupt:
        print("\nended by Ctrl-C")
    return summary


def batches(
    seed: int, numbers: list[int], cut: Cut, world: int, size: int
) -> Iterator[tuple[cases.Config, list[int]]]:
    """Yield groups of up to `size` cases that need the same number of ranks and the same
    collectives."""
    waiting: dict[tuple[Any, ...], list[int]] = {}
    for n in numbers:
        config = cases.config_of(f"{seed}:{n}", cut.without, world)
        kind = (config.world, config.collectives, config.flies, config.hosts)
        members = waiting.setdefault(kind, [])
        members.append(n)
        if len(members) == size:
            yield config, members[:]
            members.clear()
    for members in waiting.values():
        if members:
            yield cases.config_of(f"{seed}:{members[0]}", cut.without, world), members


# --- smaller -------------------------------------------------------------------------------------


def outcome_of(seed: int, number: int, cut: Cut, world: int = 0, times: int = 2) -> Result:
    config = cases.config_of(f"{seed}:{number}", cut.without, world)
    for _ in range(times):
        result = next(run_numbers(seed, [number], cut, config))
        if result.outcome not in ("ok", "invalid"):
            break
    return result


def shrink(seed: int, number: int, cut: Cut, wanted: Result, world: int = 0) -> Cut:
    """Try to leave out each operation, node, unit and feature, one after the other. A part stays
    left out if the outcome is the same without the part. Return the cut."""
    case = cases.draw_case(f"{seed}:{number}", cut, world)
    steps = (
        [("ops", i) for i in range(12)]
        + [("nodes", i) for i in range(case.nodes)]
        + [("units", i) for i in range(case.nodes)]
    )
    steps += [
        ("without", name)
        for name in (*cases.SWITCHES, *cases.STYLES)
        if name in case.features or name in cases.SWITCHES
    ]
    for field, item in steps:
        smaller = cut.also(**{field: {item}})
        got = outcome_of(seed, number, smaller, world)
        same = got.outcome == wanted.outcome and (
            wanted.outcome != "refused" or got.text[:50] == wanted.text[:50]
        )
        if same:
            cut = smaller
            print(f"  without {field} {item}: still {got.outcome}")
    return cut


def show_case(seed: int, number: int, cut: Cut, world: int = 0) -> str:
    case = cases.draw_case(f"{seed}:{number}", cut, world)
    lines = [
        f"case {number} of seed {seed}: {case.config}",
        f"width {case.width}, rows {case.rows}, optimizer {case.optimizer}",
        describe(case.model),
    ]
    return "\n".join(
        [*lines, *(f"op {i}: {op.name} {op.arguments}" for i, op in enumerate(case.ops))]
    )
