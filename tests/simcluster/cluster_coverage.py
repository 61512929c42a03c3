"""Report which parts of the core the runs of `make simcluster-coverage` have reached.

For each folder, print how many of its basic blocks were reached. Do the same for lines that access
an atomic (where another rank may run), and for lines that make an error. Print the functions never
called. With --lines, print the lines that were never reached.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("shm", "comm", "exchange", "unit", "tree")


def blocks(library: Path) -> dict[int, str]:
    """Map the return address of each basic block's coverage call to the name of its function."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True
    ).stdout
    found, function, called = {}, "", False
    for line in text.splitlines():
        if match := re.match(r"[0-9a-f]+ <(.+)>:", line):
            function = match[1].split(".")[0]
        elif match := re.match(r" *([0-9a-f]+):\t(.*)", line):
            if called:
                found[int(match[1], 16)] = function
            called = "__sanitizer_cov_trace_pc" in match[2]
    return found


def lines_of(library: Path, addresses: list[int]) -> list[tuple[str, int]]:
    text = subprocess.run(
        ["addr2line", "-e", str(library)],
        input="\n".join(hex(address - 1) for address in addresses),
        capture_output=True,
        text=True,
    ).stdout
    places = []
    for line in text.splitlines():
        path, _, number = line.split(" ")[0].rpartition(":")
        places.append((path.partition("csrc/")[2], int(number) if number.isdigit() else 0))
    return places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("reached", type=Path)
    parser.add_argument("--lines", action="store_true")
    args = parser.parse_args()
    reached = args.reached.read_bytes()
    function_of = blocks(args.library)
    addresses = sorted(function_of)
    hits = defaultdict(list)
    functions = defaultdict(lambda: defaultdict(bool))
    for address, (file, line) in zip(addresses, lines_of(args.library, addresses), strict=True):
        hit = bool(reached[address])
        hits[file, line].append(hit)
        functions[file][function_of[address]] |= hit
    never = []
    print(f"{'folder':10} {'blocks':>14} {'points':>12} {'errors':>12}")
    for folder in FOLDERS:
        files = sorted(file for file in functions if file.startswith(folder + "/"))
        # No run executes these files: they serve groups that are not simulated (such as GPUs).
        unused = [file for file in files if not any(functions[file].values())]
        used = set(files) - set(unused)
        places = {place: each for place, each in hits.items() if place[0] in used}
        errors, points = [], []
        for (file, line), each in places.items():
            source = (ROOT / "csrc" / file).read_text().splitlines()[line - 1]
            if "fsdpc_error" in source:
                errors.append(any(each))
            if "atomic_" in source:
                points.append(any(each))
            if not any(each):
                never.append((file, line, source.strip()))
        all_blocks = [hit for each in places.values() for hit in each]
        print(
            f"{folder:10} {sum(all_blocks):>6} of {len(all_blocks):<5} "
            f"{sum(points):>4} of {len(points):<4} {sum(errors):>4} of {len(errors):<4} "
            f"without {len(unused)} files that no run uses"
        )
        for file in sorted(used):
            names = [name for name, hit in functions[file].items() if not hit]
            if names:
                print(f"    {file}: never called: {', '.join(sorted(names))}")
    for file, line, source in sorted(never) if args.lines else ():
        print(f"{file}:{line}: {source}")


if __name__ == "__main__":
    main()
