"""Figures and tables of GPU benchmarks: medians, quartiles, and ratios within a round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import common

Table = tuple[str, list[str], list[list[str]]]  # title, head, rows
MOVES = ("gather", "prefetch", "pack", "reduce")
GB = 1e9


def step_report(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Turn the results of step.py's parts into figures; parts that did not run are left out."""
    report: dict[str, Any] = {"failures": failures(results)}
    time = results.get("time", {})
    if "tokens" in time:
        report.update({key: time[key] for key in ("parameters", "layers", "width", "losses")})
        report["loss_difference"] = difference(list(time["losses"].values()))
        report["tokens"] = {tokens: time_figures(one) for tokens, one in time["tokens"].items()}
    memory = {name: one for name, one in results.get("memory", {}).items() if "error" not in one}
    if memory:
        report["memory"] = memory
    if "seconds" in results.get("host", {}):
        report["host"] = host_figures(results["host"])
    if "counted" in results.get("counts", {}):
        report["counts"] = count_figures(results["counts"])
    return report


def failures(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the texts of errors. A key is the name of a part, or "part, engine"."""
    found = {}
    for part, result in results.items():
        if part == "memory":
            texts = {name: one["error"] for name, one in result.items() if "error" in one}
        else:
            texts = result.get("failures", {})
        if "error" in result:
            found[part] = result["error"]
        found.update({f"{part}, {name}": text for name, text in texts.items()})
    return found


def difference(curves: list[list[float]]) -> float:
    """Return the largest difference between any two engines' losses of one step."""
    return max((max(column) - min(column) for column in zip(*curves, strict=True)), default=0.0)


def time_figures(one: dict[str, Any]) -> dict[str, Any]:
    """Return spreads for one number of tokens, and ratios to FSDP2 and `local` within rounds."""
    engines = {}
    for name, events in one["event_ms"].items():
        engines[name] = {
            "step_ms": common.spread(events),
            "wall_ms": common.spread(one["wall_ms"][name]),
        }
        for base in ("fsdp2", "local"):
            if base in one["event_ms"]:
                pairs = zip(events, one["event_ms"][base], strict=True)
                engines[name][f"of_{base}"] = common.spread([a / b for a, b in pairs])
    return {"batch": one["batch"], "seq": one["seq"], "engines": engines}


def host_figures(host: dict[str, Any]) -> dict[str, Any]:
    """Return milliseconds until backward returns, and us per unit above the bare module's time."""
    floor, found = host["seconds"].get("bare"), {}
    for name, seconds in host["seconds"].items():
        found[name] = {"host_ms": common.spread([1e3 * value for value in seconds])}
        if floor:
            pairs = zip(seconds, floor, strict=True)
            extra = [1e6 * (a - b) / host["units"] for a, b in pairs]
            found[name]["us_per_unit"] = common.spread(extra)
    return {"units": host["units"], "engines": found}


def count_figures(counts: dict[str, Any]) -> dict[str, Any]:
    """Return launches per unit above the bare module's, the host's waits, bytes per parameter."""
    counted, engines = counts["counted"], {}
    floor = counted.get("bare", {}).get("launches")
    for name, one in counted.items():
        engines[name] = {"launches": one["launches"], "host_waits": one["waits"]}
        if floor is not None:
            engines[name]["launches_per_unit"] = (one["launches"] - floor) / counts["units"]
    found = {"units": counts["units"], "engines": engines}
    if counts["trace"]:
        moved = sum(counts["trace"].get(op, {"bytes": 0})["bytes"] for op in MOVES)
        own = counted.get("fsdpc", {}).get("own_kernels", 0)
        found["fsdpc_kernels_per_unit"] = own / counts["units"]
        found["fsdpc_bytes_per_parameter"] = moved / counts["parameters"]
        found["fsdpc_trace"] = counts["trace"]
    return found


# --- tables ---------------------------------------------------------------------------------------


def figure(values: dict[str, float] | None, digits: int) -> str:
    """Format a median with its quartiles."""
    if values is None:
        return "-"
    median, low, high = (f"{values[key]:,.{digits}f}" for key in ("median", "q1", "q3"))
    return f"{median} ({low}..{high})"


def step_tables(report: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of one result of step.py for which the result has figures."""
    for tokens, one in report.get("tokens", {}).items():
        rows = [
            [
                name,
                figure(values["step_ms"], 1),
                figure(values["wall_ms"], 1),
                figure(values.get("of_fsdp2"), 3),
                figure(values.get("of_local"), 3),
                f"{1e3 * int(one['batch']) * one['seq'] / values['step_ms']['median']:,.0f}",
            ]
            for name, values in one["engines"].items()
        ]
        head = ["engine", "step, ms", "by the host's clock", "x fsdp2", "x local", "tokens/s"]
        yield f"{int(tokens):,} tokens a step", head, rows
    if "memory" in report:
        yield memory_table(report["memory"])
    if "host" in report:
        rows = [
            [name, figure(one["host_ms"], 2), figure(one.get("us_per_unit"), 1)]
            for name, one in report["host"]["engines"].items()
        ]
        head = ["engine", "forward + backward, ms", "us per unit over the bare module"]
        yield f"host time, {report['host']['units']} small units", head, rows
    if "counts" in report:
        rows = [
            [
                name,
                str(one["launches"]),
                f"{one['launches_per_unit']:.2f}" if "launches_per_unit" in one else "-",
                str(one["host_waits"]),
            ]
            for name, one in report["counts"]["engines"].items()
        ]
        head = ["engine", "pieces of work", "per unit over the bare module", "waits of the host"]
        yield "one forward and backward of the small units", head, rows


def memory_table(memory: dict[str, dict[str, Any]]) -> Table:
    """Return a table of peaks in GB. `peak` is the peak of torch's allocated memory plus what fsdpc
    maps outside of torch's allocator; `in use` is the growth of the whole device's used memory.
    """
    keys = ("peak", "peak_allocated", "mapped", "peak_reserved", "in_use")
    rows = [[name, *(f"{one[key] / GB:.2f}" for key in keys)] for name, one in memory.items()]
    tokens = max(one["tokens"] for one in memory.values())
    head = ["engine", "peak, GB", "of it torch's", "mapped beside", "torch reserved", "in use"]
    return f"memory at {tokens:,} tokens a step", head, rows


def memory_report(results: dict[str, Any]) -> dict[str, Any]:
    """Return spreads of memory.py's steps and saves, and step times / the first choice's time."""
    choices, saves, failed = {}, {}, {}
    both = {**results["choices"], **results["saves"]}
    failed = {name: one["error"] for name, one in both.items() if "error" in one}
    first = next((one for one in results["choices"].values() if "error" not in one), None)
    for name, one in results["choices"].items():
        if name not in failed and first is not None:
            base = common.spread(first["step_ms"])["median"]
            choices[name] = {
                "step_ms": common.spread(one["step_ms"]),
                "of_first": common.spread([ms / base for ms in one["step_ms"]]),
                "peak": one["peak"],
                "losses": one["losses"],
            }
    for name, one in results["saves"].items():
        if name not in failed:
            saves[name] = {key: common.spread(one[key]) for key in ("call", "blocked")}
            saves[name]["bytes"] = one["bytes"]
    return {**results, "choices": choices, "saves": saves, "failures": failed}


def choice_tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of memory.py: one of choices that free memory, and one of saves."""
    rows = [
        [
            name,
            figure(one["step_ms"], 1),
            figure(one["of_first"], 2),
            f"{one['peak'] / GB:.2f}",
            f"{one['losses'][-1]:.3f}",
        ]
        for name, one in result["choices"].items()
    ]
    head = ["choice", "step, ms", "x the first", "peak, GB", "last loss"]
    yield f"{result['tokens']:,} tokens a step", head, rows
    rows = [
        [
            name,
            f"{one['bytes'] / GB:.2f}",
            figure(one["call"], 2),
            f"{one['bytes'] / GB / one['call']['median']:.2f}",
            figure(one["blocked"], 2),
        ]
        for name, one in result["saves"].items()
    ]
    if rows:
        head = ["save", "GB", "the call, s", "GB/s", "in the background: blocks, s"]
        yield "checkpoints of weights and AdamW's states", head, rows


def kernel_tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the table of kernels.py: shares of the copy's speed by size."""
    sizes = result["sizes_mib"]
    names = list(next(iter(sizes.values()))["kernels"])
    rows = [["copy, GB/s", *(f"{one['copy_gbps']['median']:,.0f}" for one in sizes.values())]]
    for name in names:
        found = [one["kernels"].get(name) for one in sizes.values()]
        rows.append([name, *(f"{one['of_copy']['median']:.2f}" if one else "-" for one in found)])
    yield "share of a copy's speed", ["kernel", *(f"{size} MiB" for size in sizes)], rows


def optim_tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield one table of optim.py per size: times, shares of a copy's speed, ratios to torch."""
    head = ["step", "GPU, us", "host, us", "x copy", "x torch fused"]
    for size, found in result["sizes"].items():
        rows = [
            [
                name,
                figure(one["us"], 0),
                figure(one["host_us"], 0),
                f"{one['of_copy']['median']:.2f}",
                figure(one.get("of_peer"), 2),
            ]
            for name, one in found.items()
        ]
        count, numel = result["shapes"][size]
        copy = f"a copy moves {result['copy_gbps']:,.0f} GB/s"
        yield f"{count:,} x {numel:,} elements; {copy}", head, rows


def profile_tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the table of profile.py: the kernels of each kind, and which share was hidden."""
    rows = [
        [kind, str(one["count"]), f"{one['ms']:.2f}", percent(one.get("hidden"))]
        for kind, one in result["kinds"].items()
    ]
    yield f"{result['tokens']:,} tokens", ["kind", "kernels", "ms", "hidden"], rows


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def print_step(report: dict[str, Any]) -> None:
    """Print all tables, the largest difference of losses, and the errors."""
    for title, head, rows in step_tables(report):
        print(f"\n{title}")
        common.print_table(head, rows)
    if "loss_difference" in report:
        print(f"\nlargest difference of the first losses: {report['loss_difference']:.1e}")
    bytes_per = report.get("counts", {}).get("fsdpc_bytes_per_parameter")
    if bytes_per is not None:
        print(f"fsdpc moves {bytes_per:.1f} bytes per parameter by its trace")
    for what, text in report["failures"].items():
        print(f"\nfailed: {what}\n{text.strip()}")


# --- the short table of run.py ----------------------------------------------------------------


def facts(
    step: dict[str, Any], kernels: dict[str, Any], profile: dict[str, Any]
) -> list[tuple[str, str]]:
    """Return the names and texts of the most important figures that were measured."""
    rows = [*kernel_facts(kernels), *step_facts(step)]
    for kind, one in profile.get("kinds", {}).items():
        if one.get("hidden") is not None:
            rows.append((f"hidden, {kind}", f"{100 * one['hidden']:.0f} % of {one['ms']:.2f} ms"))
    return rows


def kernel_facts(kernels: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the kernels' speeds at the largest size as shares of the copy's, the lowest first."""
    sizes = kernels.get("sizes_mib", {})
    if not sizes:
        return []
    size = max(sizes, key=float)
    shares = {name: one["of_copy"]["median"] for name, one in sizes[size]["kernels"].items()}
    copy = sizes[size]["copy_gbps"]["median"]
    rows = [(f"copy, {size} MiB", f"{copy:,.0f} GB/s")]
    rows += [
        (f"{name}, {size} MiB", f"{100 * share:.0f} % of the copy")
        for name, share in sorted(shares.items(), key=lambda item: item[1])
    ]
    return rows


def step_facts(step: dict[str, Any]) -> list[tuple[str, str]]:
    """Return step times, memory, host time and launches, with all engines on each line."""

    def side_by_side(values: dict[str, float], digits: int) -> str:
        return ", ".join(f"{name} {value:,.{digits}f}" for name, value in values.items())

    rows = []
    for tokens, one in step.get("tokens", {}).items():
        times = {name: values["step_ms"]["median"] for name, values in one["engines"].items()}
        rows.append((f"step, {int(tokens):,} tokens, ms", side_by_side(times, 1)))
    memory = step.get("memory", {})
    for key, text in (("peak", "peak memory"), ("in_use", "device memory in use")):
        if memory:
            peaks = {name: one[key] / GB for name, one in memory.items()}
            rows.append((f"{text}, GB", side_by_side(peaks, 2)))
    hosts = step.get("host", {}).get("engines", {})
    per_unit = {n: v["us_per_unit"]["median"] for n, v in hosts.items() if "us_per_unit" in v}
    counts = step.get("counts", {})
    launches = {
        name: one["launches_per_unit"]
        for name, one in counts.get("engines", {}).items()
        if "launches_per_unit" in one
    }
    for name, values in (("host us per unit", per_unit), ("launches per unit", launches)):
        if values:
            rows.append((name, side_by_side({k: v for k, v in values.items() if k != "bare"}, 1)))
    if "fsdpc_bytes_per_parameter" in counts:
        rows.append(("bytes per parameter, fsdpc", f"{counts['fsdpc_bytes_per_parameter']:.1f}"))
    if "loss_difference" in step:
        rows.append(("largest loss difference", f"{step['loss_difference']:.1e}"))
    rows += [("failed", f"{what}: {text.strip().splitlines()[-1]}")
             for what, text in step.get("failures", {}).items()]  # fmt: skip
    return rows
