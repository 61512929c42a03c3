"""Run everything that needs a GPU in ten minutes: build, tests, kernels, training steps, a profile.

    python -m gpu.run              # as `make gpu`; with OUT=dir set, also copies the results to dir
    python -m gpu.run --dry --tiny # the same without a GPU, on the simulated one
    python -m gpu.run --parts build,first,step

The run needs a Python with torch, numpy and setuptools, and either a C compiler and nvcc or an
extension that was built before. It needs no network. Each part is a process of its own with its own
time limit. A part that fails or is late does not stop the others (but without any build nothing
else runs), and the most important parts run first. The output ends with one table of all parts with
the reason of each failure; the exit status is 0 if all parts passed. Results go to
benchmarks/results/gpu_*.json. Logs go to build/gpu, where gpu.log has the logs of all parts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
RESULTS, LOGS = BENCHMARKS / "results", ROOT / "build" / "gpu"
ALL_LOGS, ENDS = "gpu.log", "gpu_run.json"
TOTAL_SECONDS = 565
ASKING_SECONDS = 120
TAIL_LINES = 40
REASON_LINES = 6
WIDEST_REASON = 160


@dataclass(frozen=True)
class Part:
    """One process: what it runs, how long it may take, and the files that it leaves."""

    name: str
    command: list[str]
    seconds: int
    results: tuple[str, ...] = ()
    shows: bool = False  # the part's output is in the report, even if it passes
    sums_up: bool = False  # the last line of the part's output goes into the table
    after_failure_of: str = ""  # the part runs only if the part of this name failed
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Ended:
    """A part that has ended, with its status, time and log."""

    part: Part
    status: str  # "ok", "failed (1)", "late: ...", "left out: ...", "not needed"
    seconds: float
    lines: list[str] = field(default_factory=list)  # lines of the part's log

    @property
    def passed(self) -> bool:
        return self.status == "ok" or self.status == "not needed"


def parts(args: argparse.Namespace, folder: Path) -> list[Part]:
    """Return all parts in the order in which they run; they write result files into `folder`."""
    python = sys.executable
    dry = [*(["--dry"] if args.dry else []), *(["--tiny"] if args.tiny else [])]

    def script(name: str, result: str, *more: str) -> list[str]:
        return [python, "-m", f"gpu.{name}", *dry, "--json", str(folder / result), *more]

    def tests(name: str, seconds: int, *which: str) -> Part:
        """Return a part for a group of tests. Each group has a process of its own, because a GPU
        fault fails all later tests of the same process.
        """
        options = "-v -rfE --tb=short -p no:cacheprovider -o faulthandler_timeout=60".split()
        return Part(name, [python, "-m", "pytest", *options, *which], seconds, sums_up=True)

    build = [python, "setup.py", "build_ext", "--inplace"]
    first = [python, str(ROOT / "tests" / "gpu" / "first_steps.py"), *dry[: int(args.dry)]]
    one_by_one = {"CUDA_LAUNCH_BLOCKING": "1"}  # no two kernels overlap, so no failure is a race
    picture = ["--picture", str(folder / "gpu_profile.png")]
    one_rank, kernels, two_ranks = (
        f"tests/gpu/test_{name}.py" for name in ("one_rank", "kernels_gpu", "two_ranks")
    )
    others = [f"--ignore={file}" for file in (one_rank, kernels, two_ranks)]
    return [
        Part("build", build, 200),
        Part("first", first, 90, shows=True),
        Part("first_blocking", first, 60, shows=True, after_failure_of="first", env=one_by_one),
        tests("one_rank", 110, one_rank),
        tests("kernel_tests", 110, kernels),
        Part(
            "kernels", script("kernels", "gpu_kernels.json"), 80,
            ("gpu_kernels.json",), True,
        ),
        Part("optim", script("optim", "gpu_optim.json"), 60, ("gpu_optim.json",), True),
        Part("step", script("step", "gpu_step.json"), 240, ("gpu_step.json",), True),
        tests("tests", 130, "tests/gpu", *others),
        tests("two_ranks", 150, two_ranks),
        Part(
            "profile", script("profile", "gpu_profile.json", *picture), 90,
            ("gpu_profile.json", "gpu_profile.png"), True,
        ),
    ]  # fmt: skip


def missing(dry: bool) -> list[str]:
    """Return one line for each thing that this machine lacks."""
    lines = []
    for module, why in (
        ("torch", "everything"),
        ("numpy", "the build"),
        ("setuptools", "the build"),
    ):
        if importlib.util.find_spec(module) is None:
            lines.append(f"{module} is missing in {sys.executable}: needed for {why}")
    if importlib.util.find_spec("pytest") is None:
        lines.append("pytest is missing: the tests are left out")
    if importlib.util.find_spec("matplotlib") is None:
        lines.append("matplotlib is missing: there will be no picture")
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc")))):
        lines.append("no C compiler (CC, cc, gcc): needed for the build")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lines.append(f"Python.h of {sys.executable} is missing: needed for the build")
    if not dry and not find_nvcc():
        lines.append("no nvcc (NVCC, PATH, CUDA_HOME, /usr/local/cuda): no CUDA kernels")
    return lines


def gpu_in_sight() -> bool:
    """Return whether torch finds a GPU; a child asks, so that this process does not start CUDA."""
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    command = [sys.executable, "-W", "ignore", "-c", question]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=ASKING_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def find_nvcc() -> str | None:
    """Return the path of nvcc or None. setup.py looks for nvcc in the same places."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which(os.environ.get("NVCC") or "nvcc", path=os.pathsep.join(folders))


def environment(dry: bool) -> dict[str, str]:
    """Return the environment of the parts. A dry run needs the simulated GPU (`make simlibs`)."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), str(BENCHMARKS), os.environ.get("PYTHONPATH")])
    )
    found["PYTHONUNBUFFERED"] = found["PYTHONFAULTHANDLER"] = "1"
    found["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the machine may have unsuitable plugins
    found.setdefault("FSDPC_TIMEOUT", "60")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        found.setdefault(variable, "lo")  # this machine has all ranks and may have no other network
    if dry:
        sys.path.insert(0, str(ROOT / "tests" / "simgpu" / "python"))
        import env

        if env.missing():
            raise SystemExit(f"a dry run needs the simulated GPU: {env.missing()}")
        found.update(env.environment())
        found.update(NVCC="none", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    return found


def usable(env: dict[str, str], dry: bool) -> bool:
    """Return whether an extension that was built before can be used."""
    question = f"import sys, fsdpc._C as c; sys.exit(not ({dry} or c.cuda_image_bytes()))"
    command = [sys.executable, "-c", question]
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=60)
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False


def run(part: Part, seconds: float, env: dict[str, str]) -> Ended:
    """Run one part in a process group of its own, end the group, and keep the part's log."""
    log = LOGS / f"{part.name}.log"
    begin = time.monotonic()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            part.command, cwd=ROOT, env={**env, **part.env}, stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
            status = "ok" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            status = f"late: over {seconds:.0f} s"
        finally:
            end_group(process)
    lines = log.read_text(errors="replace").splitlines()
    kept = [line for line in lines if line.strip() and not line.startswith("USDT:")]
    shown = kept if part.shows else kept[-TAIL_LINES:] if status != "ok" else []
    if shown:
        print("\n".join(shown), flush=True)
    return Ended(part, status, time.monotonic() - begin, kept)


def end_group(process: subprocess.Popen) -> None:
    """Kill the processes that the part may have left running."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def reason_to_leave_out(part: Part, ended: list[Ended], left: float) -> str | None:
    """Return why a part does not run, or None if it runs."""
    before = {one.part.name: one for one in ended}
    if part.after_failure_of:
        first = before.get(part.after_failure_of)
        if first is None or first.passed or first.status.startswith("left out"):
            return "not needed"
    if any(name == "build" and not one.passed for name, one in before.items()):
        return "left out: no build"
    return "left out: no time" if left < 5 else None


def run_all(
    chosen: list[Part],
    env: dict[str, str],
    until: float,
    dry: bool,
    save: Callable[[list[Ended]], None],
) -> list[Ended]:
    """Run one part after the other, each for at most the time that is left. If the build fails and
    no earlier build is usable, the remaining parts are left out. `save(ended)` is called after each
    part that ran.
    """
    ended: list[Ended] = []
    for part in chosen:
        left = until - time.monotonic()
        reason = reason_to_leave_out(part, ended, left)
        if reason is not None:
            ended.append(Ended(part, reason, 0.0))
            continue
        print(f"\n=== {part.name} (at most {min(part.seconds, left):.0f} s)", flush=True)
        one = run(part, min(part.seconds, left), env)
        if part.name == "build" and not one.passed and usable(env, dry):
            print("fsdpc: the build failed; what was built before is used")
            one.status = "ok"
        ended.append(one)
        save(ended)
    return ended


# --- the table ------------------------------------------------------------------------------------


def reasons(one: Ended) -> list[str]:
    """Return why a part failed: pytest's list of failures, or else the last lines of the log."""
    listed = [line for line in one.lines if line.startswith(("FAILED ", "ERROR "))]
    chosen = listed[:REASON_LINES] if listed else one.lines[-REASON_LINES:]
    if len(listed) > REASON_LINES:
        chosen.append(f"... and {len(listed) - REASON_LINES} more")
    return [line.strip()[:WIDEST_REASON] for line in chosen]


def load(folder: Path, name: str) -> dict:
    """Return the content of a result file, or {} if the file is missing or is not JSON."""
    try:
        return json.loads((folder / name).read_text())
    except (OSError, ValueError):
        return {}


def facts(folder: Path, ended: list[Ended]) -> list[tuple[str, str]]:
    """Return the most important figures of the result files that this run has written."""
    from gpu import report

    left = {name for one in ended for name in one.part.results}
    step, kernels, profile = (
        load(folder, name) if name in left else {}
        for name in ("gpu_step.json", "gpu_kernels.json", "gpu_profile.json")
    )
    run_ = next((one["run"] for one in (step, kernels, profile) if "run" in one), {})
    keys = ("device", "driver", "cuda", "nccl", "torch", "date", "commit")
    rows = [(key, str(run_[key])) for key in keys if run_.get(key)]
    return [*rows, *report.facts(step, kernels, profile)]


def print_end(ended: list[Ended], folder: Path) -> None:
    """Print the table that ends the output."""
    rows = [(one.part.name, f"{one.status}, {one.seconds:.0f} s") for one in ended]
    for one in ended:
        if one.part.sums_up and one.lines:
            rows.append((one.part.name, one.lines[-1].strip("= ")))
    try:
        rows += facts(folder, ended)
    except Exception as error:  # print the table in any case
        rows.append(("results", f"not readable: {type(error).__name__}: {error}"))
    rows += [(one.part.name, text) for one in ended if not one.passed for text in reasons(one)]
    width = max(len(name) for name, _ in rows)
    print("\n" + "=" * 78)
    for name, text in rows:
        print(f"{name.ljust(width)}  {text}")
    print("=" * 78, flush=True)


def keep(ended: list[Ended], folder: Path, out: str) -> None:
    """Write one file that says how the parts ended, and one file with the logs of all parts. Copy
    these files and the results to ``out`` if it is not empty. This function is called after each
    part, because the run may be killed at any time.
    """
    ends = [
        {"part": one.part.name, "status": one.status, "seconds": round(one.seconds, 1),
         "last": one.lines[-1][:WIDEST_REASON] if one.lines else ""}
        for one in ended
    ]  # fmt: skip
    (folder / ENDS).write_text(json.dumps({"benchmark": "gpu_run", "parts": ends}, indent=1) + "\n")
    logs = [(one.part.name, LOGS / f"{one.part.name}.log") for one in ended if one.lines]
    texts = [f"=== {name}\n{log.read_text(errors='replace')}" for name, log in logs]
    (LOGS / ALL_LOGS).write_text("\n".join(texts))
    if out:
        target = Path(out)
        target.mkdir(parents=True, exist_ok=True)
        files = [folder / name for one in ended for name in (*one.part.results, ENDS)]
        for file in {*files, LOGS / ALL_LOGS}:
            if file.exists() and file.parent.resolve() != target.resolve():
                shutil.copy(file, target / file.name)


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="", help="names of some; all without")
    parser.add_argument("--dry", action="store_true", help="on the simulated GPU and the CPU")
    parser.add_argument("--tiny", action="store_true", help="small models and sizes")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all parts")
    parser.add_argument("--out", default=os.environ.get("OUT", ""), help="copy results there")
    args = parser.parse_args()
    lacking = missing(args.dry)
    for line in lacking:
        print(f"fsdpc: {line}")
    if any("everything" in line for line in lacking):
        raise SystemExit(1)
    if not args.dry and not gpu_in_sight():
        raise SystemExit("fsdpc: torch finds no GPU here; make gpu-dry runs on a simulated one")
    LOGS.mkdir(parents=True, exist_ok=True)
    folder = LOGS / "dry" if args.dry or args.tiny else RESULTS  # no meaningless figures in RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    chosen = parts(args, folder)
    wanted = args.parts.split(",") if args.parts else [part.name for part in chosen]
    unknown = set(wanted) - {part.name for part in chosen}
    if unknown:
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}")
    chosen = [part for part in chosen if part.name in wanted]
    if importlib.util.find_spec("pytest") is None:
        chosen = [part for part in chosen if not part.sums_up]
    for file in [folder / name for part in chosen for name in part.results]:
        file.unlink(missing_ok=True)  # an older run wrote the file
    env = environment(args.dry)
    ended = run_all(
        chosen, env, begin + args.seconds, args.dry, lambda some: keep(some, folder, args.out)
    )
    keep(ended, folder, args.out)
    print_end(ended, folder)
    raise SystemExit(0 if all(one.passed for one in ended) else 1)


if __name__ == "__main__":
    main()
