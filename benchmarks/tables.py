"""Print benchmarks/results/*.json as Markdown tables, or with --write put them into README.md.

python benchmarks/tables.py            # prints the tables
python benchmarks/tables.py --write    # replaces the tables in benchmarks/README.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from gpu import report
from namespaces import bytes_per_second

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return one table in Markdown; the first column is text, the other columns are figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(values: dict | None, digits: int) -> str:
    """Format a median with its quartiles."""
    if values is None:
        return "-"
    median, low, high = (f"{values[key]:,.{digits}f}" for key in ("median", "q1", "q3"))
    return f"{median} ({low}..{high})"


def run_line(result: dict) -> str:
    """Return a line with the machine, torch, date and commit of a result, and its note if any."""
    run = result.get("run", result)
    parts = [run["machine"], f"torch {run['torch']}", run["date"], f"commit {run['commit']}"]
    parts += [result["note"]] if result.get("note") else []
    return f"*{'; '.join(parts)}*"


def step_tables(result: dict) -> str:
    """Return the tables of one result of bench_step.py: steps, and host time if it was measured."""
    title = f"### Training step, {result['model']}"
    sizes = "2 ranks"
    if "seq" in result:
        sizes = f"2 ranks, batch {result['batch_per_rank']} x {result['seq']} bytes each"
    blocks = [title, f"{sizes}, one thread per rank. {run_line(result)}"]
    engines = result["engines"]
    if any("step_ms" in engine for engine in engines.values()):
        blocks.append(
            markdown(
                ["engine", "step, ms", "x local", "cpu, ms", "tokens/s", "memory, MB", "peak, MB"],
                (step_row(name, engine) for name, engine in engines.items()),
            )
        )
        blocks.append(
            "Largest difference between the engines' losses in the first steps: "
            f"{result['loss_difference']:.1e}."
        )
    if any("host_us_per_unit" in engine for engine in engines.values()):
        blocks.append(
            markdown(
                ["engine", "forward + backward, ms", "us per unit over the plain module"],
                (host_row(name, engine) for name, engine in engines.items()),
            )
        )
    return "\n\n".join(blocks)


def step_row(name: str, engine: dict) -> list[str]:
    """Return one engine's row: times, ratio, speed, and the memory above the baseline."""
    memory = engine.get("memory_mb")
    above = [
        f"{memory[key] - memory['baseline']:,.0f}" if memory else "-" for key in ("steady", "peak")
    ]
    return [
        name,
        figure(engine.get("step_ms"), 1),
        figure(engine.get("ratio"), 3),
        figure(engine.get("cpu_ms"), 1),
        f"{engine['tokens_per_second']:,.0f}" if "tokens_per_second" in engine else "-",
        *above,
    ]


def host_row(name: str, engine: dict) -> list[str]:
    """Return one engine's row of host time."""
    return [
        name,
        figure(engine.get("host_ms"), 2),
        figure(engine.get("host_us_per_unit"), 1) if name != "local" else "0",
    ]


def comm_tables(result: dict) -> str:
    """Return the table of bench_comm.py: microseconds, and the most important ratios."""
    rows = []
    for row in result["rows"]:
        ways = (figure(row["us"][way], 0) for way in ("floor", "direct", "gloo"))
        ratios = (figure(row[key], 2) for key in ("direct_over_floor", "gloo_over_direct"))
        rows.append([f"{row['operation']}, {size_text(row['bytes'])}", *ways, *ratios])
    head = ["collective, 2 ranks", "floor, us", "fsdpc, us", "gloo, us", "x floor", "gloo / fsdpc"]
    return "\n\n".join(["### Collectives", run_line(result), markdown(head, rows)])


def size_text(count: int) -> str:
    """Format a number of bytes as KiB or MiB."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def kernel_tables(result: dict) -> str:
    """Return the table of bench_kernels.py: each kernel's best share of memcpy's speed."""
    sizes = result["sizes_mib"]
    names = list(next(iter(sizes.values()))["kernels"])
    rows = [
        [name, *(kernel_cell(size["kernels"].get(name)) for size in sizes.values())]
        for name in names
    ]
    head = ["kernel, x memcpy", *(f"{float(size):g} MiB" for size in sizes)]
    speeds = ["memcpy, GB/s", *(f"{size['memcpy_gbps']['median']:.1f}" for size in sizes.values())]
    return "\n\n".join(["### Kernels", run_line(result), markdown(head, [speeds, *rows])])


def kernel_cell(by_table: dict | None) -> str:
    """Return the largest share of memcpy's speed that one kernel reaches among fsdpc's kernel
    tables (plain C, AVX2 and so on). Torch's own share does not count.
    """
    shares = [
        figures["of_memcpy"]["median"]
        for name, figures in (by_table or {}).items()
        if name != "torch"
    ]
    return f"{max(shares):.2f}" if shares else "-"


def gpu_tables(result: dict) -> str:
    """Return the tables of a result of the programs in gpu/."""
    run = result["run"]
    where = f"*{run['device']}, driver {run['driver']}, CUDA {run['cuda']}, NCCL {run['nccl']}*"
    title, tables = {
        "gpu_step": ("Training step on a GPU", report.step_tables),
        "gpu_kernels": ("CUDA kernels", report.kernel_tables),
        "gpu_optim": ("Optimizer steps on a GPU", report.optim_tables),
        "gpu_memory": ("What frees memory on a GPU", report.choice_tables),
        "gpu_profile": ("Streams of a training step on a GPU", report.profile_tables),
    }[result["benchmark"]]
    blocks = [f"### {title}", f"{where}; {run_line(result)}"]
    for name, head, rows in tables(result):
        blocks += [f"{name}:", markdown(head, rows)]
    if result["benchmark"] == "gpu_profile":
        blocks.append("![streams of the GPU in a training step](results/gpu_profile.png)")
    return "\n\n".join(blocks)


def checkouts_tables(result: dict) -> str:
    """Return the table of checkouts.py."""
    names = ("step_ms", "cpu_ms", "step_to_local", "host_us_per_unit")
    rows = [
        [
            f"{model}, {name}",
            *(figure(sides[side].get(name), 2) for side in ("old", "new", "ratio")),
        ]
        for model, sides in result["models"].items()
        for name in names
    ]
    title = f"### Checkouts: {result['old']} and {result['new']}, {result['rounds']} rounds"
    return "\n\n".join([title, run_line(result), markdown(["", "old", "new", "new / old"], rows)])


def checkpoint_tables(result: dict) -> str:
    """Return the tables of bench_checkpoint.py."""
    if "units" in result:
        return many_table(result)
    if "every" in result:
        return every_table(result)
    peaks = {name: f"{mb:.0f}" for name, mb in result["peak_mb"].items()}
    rows = [
        [name, figure(case["s"], 2), figure(case["ratio"], 2), peaks.get(name, "-")]
        for name, case in result["cases"].items()
    ]
    parts = ("blocking_s", "step_beside_s", "durable_s")
    beside = [
        [name, *(figure(figures[part], 2) for part in parts)]
        for name, figures in result["background"].items()
    ]
    beside.append(["no save", "-", figure(result["step_s"], 2), "-"])
    return "\n\n".join(
        [
            f"### Checkpoints, {result['model']}, {result['bytes'] / 1e9:.2f} GB",
            f"2 ranks, one thread per rank. {run_line(result)}",
            markdown(["", "s", "x plain", "peak, MB"], rows),
            markdown(["in the background", "blocking, s", "step, s", "durable, s"], beside),
        ]
    )


def every_table(result: dict) -> str:
    """Return the table of bench_checkpoint.py --every."""
    names = ("step", "saved", "blocked")
    rows = [
        [
            kind,
            *(figure(steps[name], 3) for name in names),
            figure(result["ratio"][kind], 3),
            f"{result['peak_mb'][kind]:.0f}",
        ]
        for kind, steps in result["every"].items()
    ]
    heads = ["parameters that train", "step, s", "with its save, s", "of it the call, s", "ratio"]
    heads.append("peak of one save, MB")
    text = f"2 ranks, one thread per rank. {run_line(result)}"
    title = f"### A save at every step: {result['model']}"
    return "\n\n".join([title, text, markdown(heads, rows)])


def many_table(result: dict) -> str:
    """Return the table of bench_checkpoint.py --model many."""
    rows = [
        [
            name,
            figure(took, 3),
            figure(result["cpu_s"].get(name), 3),
            f"{result['peak_mb'][name]:.0f}" if name in result["peak_mb"] else "-",
        ]
        for name, took in result["seconds"].items()
    ]
    title = f"### Checkpoints of {result['parameters']:,} parameters in {result['units']:,} units"
    text = f"2 ranks, one thread per rank. {run_line(result)}"
    return "\n\n".join([title, text, markdown(["", "s", "cpu, s", "peak, MB"], rows)])


def optim_tables(result: dict) -> str:
    """Return the tables of bench_optim.py."""
    blocks = []
    for title in ("big", "small"):
        part = result[title]
        cases = part["cases"]
        columns = [("ns", "ns per parameter", 2), ("GB/s", "GB/s", 1), ("of_triad", "x triad", 2)]
        memory = f"triad {figure(cases['triad']['GB/s'], 1)} GB/s"
        if "in place" in cases:
            columns.append(("of_in_place", "x in place", 2))
            memory += f", in place {figure(cases['in place']['GB/s'], 1)} GB/s"
        columns.append(("of_torch", "time / other's", 2))
        rows = [
            [name, *(figure(case.get(key), digits) for key, _, digits in columns)]
            for name, case in cases.items()
            if "ns" in case
        ]
        head = ["step", *(title for _, title, _ in columns)]
        blocks += [
            f"### Optimizer steps, {part['tensors']} x {part['numel']:,} parameters",
            f"One thread; {memory}. {run_line(result)}",
            markdown(head, rows),
        ]
    if steps := result.get("steps"):
        keys = ("fsdpc-torch-fused", "fsdpc-optim", "of_torch", "average_of_without")
        keys += ("average_cpu_of_without",)
        rows = [[name, *(figure(case.get(key), 2) for key in keys)] for name, case in steps.items()]
        head = ["model", "torch's fused AdamW, ms", "fsdpc.optim.AdamW, ms", "time / torch's"]
        head += ["with an average / without", "the same, processor time"]
        blocks += [
            "### Training steps by their optimizer",
            f"fsdpc, 2 ranks, one thread per rank. {run_line(result)}",
            markdown(head, rows),
        ]
    return "\n\n".join(blocks)


def activations_tables(result: dict) -> str:
    """Return the table of bench_activations.py."""
    sizes = ", ".join(f"{name} {value}" for name, value in result["sizes"].items())
    keys = ("kept_mb", "kept_of_plain", "peak_mb", "time_of_plain")
    rows = [
        [name, *(f"{case[key]:,.2f}" for key in keys)] for name, case in result["cases"].items()
    ]
    head = ["choice", "kept, MB", "x plain", "peak, MB", "time / plain"]
    title = f"### Activations: {sizes}"
    return "\n\n".join([title, run_line(result), markdown(head, rows)])


def activation_curve_tables(result: dict) -> str:
    """Return the table of the last losses of bench_activations.py --curves."""
    sizes = ", ".join(f"{name} {value}" for name, value in result["sizes"].items())
    last = 50  # number of steps whose mean loss is in the table
    rows = [
        [name, str(len(curve)), f"{sum(curve[-last:]) / last:.3f}"]
        for name, curve in result["bits_per_byte"].items()
    ]
    head = ["activations", "steps", f"bits per byte, last {last} steps"]
    return "\n\n".join(
        [f"### Loss with packed activations: {sizes}", run_line(result), markdown(head, rows)]
    )


def curve_tables(result: dict) -> str:
    """Return the table of the last losses of bench_curves.py."""
    cases = result["cases"]
    first = "AdamW" if "AdamW" in cases else "float32"
    base = cases[first]

    def cells(case: dict, key: str, like: bool = True) -> list[str]:
        share = f"{100 * (case[key] / base[key] - 1):+.2f} %" if like else "other bytes"
        return [f"{case[key]:.4f}", share]

    def validation(case: dict) -> list[str]:
        bytes_ = [each.get("validation_bytes") for each in (case, base)]
        return cells(case, "validation", bytes_[0] == bytes_[1])

    for case in cases.values():
        points = case["bits_per_byte"]
        case["fifth"] = statistics.mean(points[-(len(points) // 5) :])
    rows = [
        [name, f"{case['last']:.4f}", *cells(case, "fifth"), *validation(case)]
        for name, case in cases.items()
    ]
    beside = f"against {first}"
    head = ["bits per byte", "last 20 steps", "last fifth", beside, "validation", beside]
    sizes = ", ".join(f"{k} {result[k]}" for k in ("ranks", "steps", "layers", "width", "batch"))
    of = "optimizers" if first == "AdamW" else f"codes, {result['model']}"
    title = f"### Training curves of {of}: {sizes}"
    runs = list(dict.fromkeys(run_line(case["run"]) for case in cases.values()))
    return "\n\n".join([title, "  \n".join(runs), markdown(head, rows)])


def offload_tables(result: dict) -> str:
    """Return the table of bench_offload.py."""
    keys = (("ns_per_parameter", 1), ("gb_per_s", 2), ("of_raw", 2))
    rows = [
        [name, *(figure(case.get(key), digits) for key, digits in keys)]
        for name, case in result["cases"].items()
    ]
    head = ["states on a disk", "ns per parameter", "GB/s", "x raw read + write"]
    title = f"### Optimizer states on a disk, {result['sizes']['parameters']:,} parameters"
    return "\n\n".join([title, run_line(result), markdown(head, rows)])


def hosts_tables(result: dict) -> str:
    """Return the table of bench_hosts.py, which has one row per engine and case."""
    rows = []
    for case in result["cases"]:
        place = f"{case['model']}, {'+'.join(map(str, case['ranks']))}, {case['rate']}"
        if case.get("delay_ms"):
            place += f", {case['delay_ms']:g} ms"
        rows += [[place, *row] for row in host_rows(case)]
        rows.append([place, "a gather's share of the line", *6 * ["-"], f"{case['line']:.0%}"])
    head = [
        "hosts",
        "engine",
        "step, s",
        "x local",
        "x fsdp2",
        "x floor",
        "wire busy",
        "exposed, s",
    ]
    coded = "fsdpc2-int8" in result["cases"][0]
    title = "### Steps of ranks on several hosts"
    title += ", weights and gradients in fewer bits" if coded else ""
    runs = list(dict.fromkeys(run_line(case["run"]) for case in result["cases"]))
    return "\n\n".join([title, "  \n".join(runs), markdown([*head, "sent, x parameters"], rows)])


def host_rows(case: dict) -> list[list[str]]:
    """Return one row for each engine. "x floor" divides the step's time by the larger of two times:
    that of the unsharded step, and that of two gathers and one reduce-scatter at the link's rate.
    "wire busy" is the share of the step that a host's sent bytes take at the link's rate. "exposed"
    is the step's time minus the unsharded step's time.
    """
    seconds = case["bytes"] / bytes_per_second(case["rate"])
    local, beside = (case[name]["step_s"]["median"] for name in ("local", "fsdp2"))
    floor = max(local, 3 * (len(case["ranks"]) - 1) / len(case["ranks"]) * seconds)
    rows = []
    for name, row in case.items():
        if isinstance(row, dict) and "step_s" in row:
            step, sent = row["step_s"]["median"], row["sent"]["median"]
            found = [row["to_local"]["median"], step / beside, step / floor]
            rows.append(
                [
                    name,
                    f"{step:.3f} ({row['step_s']['q1']:.3f}..{row['step_s']['q3']:.3f})",
                    *(f"{value:.2f}" for value in found),
                    f"{sent * seconds / step:.0%}",
                    f"{step - local:.3f}",
                    f"{sent:.2f}",
                ]
            )
    return rows


def muon_tables(result: dict) -> str:
    """Return the table of bench_muon.py. If the result has "every", bases or roots are computed in
    one step of that many.
    """
    rows = [
        [
            case["case"],
            figure({key: 1e3 * value for key, value in case["processor_seconds"].items()}, 1),
            figure(case["share"], 2),
            f"{case['moved']:.2f}" if "moved" in case else "",
        ]
        for case in result["cases"]
    ]
    ranks = result.get("ranks", 2)
    head = ["step", "processor time, ms", f"x 1/{ranks} of the unsharded step", "moved"]
    shape = f"{result['blocks']} blocks of width {result['width']}"
    text = f"{shape}. {run_line(result)}"
    name = result.get("optimizer", "Muon")
    text = f"Bases or roots every {result['every']} steps; {text}" if "every" in result else text
    return "\n\n".join([f"### {name}'s step on {ranks} ranks", text, markdown(head, rows)])


TABLES: dict[str, Callable[[dict], str]] = {
    "activations_curves": activation_curve_tables,
    "offload": offload_tables,
    "hosts": hosts_tables,
    "checkpoint": checkpoint_tables,
    "curves": curve_tables,
    "checkouts": checkouts_tables,
    "step": step_tables,
    "comm": comm_tables,
    "kernels": kernel_tables,
    "gpu": gpu_tables,
    "optim": optim_tables,
    **dict.fromkeys(("adafactor", "muon", "shampoo", "soap"), muon_tables),
    "activations": activations_tables,
}


def all_tables() -> str:
    """Return the tables of all results in the order of their file names."""
    paths = sorted((HERE / "results").glob("*.json"))
    return "\n\n".join(
        TABLES[path.stem if path.stem in TABLES else path.stem.split("_")[0]](
            json.loads(path.read_text())
        )
        for path in paths
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="update benchmarks/README.md")
    if not parser.parse_args().write:
        print(all_tables())
        return
    readme = HERE / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{all_tables()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
