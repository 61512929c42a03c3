"""Everything that wants a GPU, in ten minutes: build, tests, kernels, training steps, a profile.

    python benchmarks/run_gpu.py              # as `make gpu` does; OUT=dir gets copies
    python benchmarks/run_gpu.py --dry --tiny # the same without a GPU, on the simulated one
    python benchmarks/run_gpu.py --parts build,tests

Needs a Python with torch, numpy and setuptools, a C compiler and nvcc; no network. Each part is a
process of its own with its own time limit; one that fails or is late does not stop the others. The
last thing printed is one table of them all; the exit status is 0 if all passed. Results go to
benchmarks/results/gpu_*.json, logs to build/gpu.
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
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS, LOGS = HERE / "results", ROOT / "build" / "gpu"
TOTAL_SECONDS = 570
ASKING_SECONDS = 120
TAIL_LINES = 40


@dataclass(frozen=True)
class Part:
    """One process: what it runs, how long it may take, and the files that it leaves."""

    name: str
    command: list[str]
    seconds: int
    results: tuple[str, ...] = ()
    shows: bool = False  # its output is part of the report, not only when it fails


@dataclass
class Ended:
    """How a part ended."""

    part: Part
    status: str  # "ok", "failed (1)", "late", "left out: ..."
    seconds: float
    last_line: str = ""


def parts(args: argparse.Namespace, folder: Path) -> list[Part]:
    """All parts in order; result files lie in `folder`."""
    python = sys.executable
    dry = [*(["--dry"] if args.dry else []), *(["--tiny"] if args.tiny else [])]

    def script(name: str, result: str, *more: str) -> list[str]:
        return [python, str(HERE / name), *dry, "--json", str(folder / result), *more]

    picture = folder / "gpu_profile.png"
    build = [python, "setup.py", "build_ext", "--inplace"]
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", "tests/gpu"]
    return [
        Part("build", build, 200),
        Part("tests", tests, 180),
        Part(
            "kernels", script("bench_gpu_kernels.py", "gpu_kernels.json"), 80,
            ("gpu_kernels.json",), True,
        ),
        Part("step", script("bench_gpu_step.py", "gpu_step.json"), 240, ("gpu_step.json",), True),
        Part(
            "profile",
            script("profile_gpu.py", "gpu_profile.json", "--picture", str(picture)),
            90,
            ("gpu_profile.json", "gpu_profile.png"),
            True,
        ),
    ]  # fmt: skip


def missing(dry: bool) -> list[str]:
    """What this machine lacks, a line each."""
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
    """Asks torch in a process of its own: nothing of CUDA starts in this one."""
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    command = [sys.executable, "-W", "ignore", "-c", question]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=ASKING_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def find_nvcc() -> str | None:
    """As setup.py looks for it."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which(os.environ.get("NVCC") or "nvcc", path=os.pathsep.join(folders))


def environment(dry: bool) -> dict[str, str]:
    """For all parts; in a dry run the simulated GPU's, whose libraries `make simlibs` builds."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found["PYTHONUNBUFFERED"] = "1"
    found.setdefault("FSDPC_TIMEOUT", "60")
    if dry:
        sys.path.insert(0, str(ROOT / "tests" / "simgpu"))
        import env

        if env.missing():
            raise SystemExit(f"a dry run needs the simulated GPU: {env.missing()}")
        found.update(env.environment())
        found.update(NVCC="none", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    return found


def run(part: Part, seconds: float, env: dict[str, str]) -> Ended:
    """Runs one part in its own process group, which is gone afterwards; its log is kept."""
    log = LOGS / f"{part.name}.log"
    begin = time.monotonic()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            part.command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT,
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
    return Ended(part, status, time.monotonic() - begin, kept[-1] if kept else "")


def end_group(process: subprocess.Popen) -> None:
    """Kills what the part may have left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run_all(chosen: list[Part], env: dict[str, str], seconds: float) -> list[Ended]:
    """One after the other; later ones get what time is left. Without a build nothing else runs."""
    until, ended = time.monotonic() + seconds, []
    for part in chosen:
        left = until - time.monotonic()
        built = all(one.status == "ok" for one in ended if one.part.name == "build")
        if not built or left < 5:
            why = "no time" if built else "no build"
            ended.append(Ended(part, f"left out: {why}", 0.0))
            continue
        print(f"\n=== {part.name} (at most {min(part.seconds, left):.0f} s)", flush=True)
        ended.append(run(part, min(part.seconds, left), env))
    return ended


# --- the table ------------------------------------------------------------------------------------


def load(folder: Path, name: str) -> dict:
    """A result file, or nothing."""
    try:
        return json.loads((folder / name).read_text())
    except (OSError, ValueError):
        return {}


def facts(folder: Path) -> list[tuple[str, str]]:
    """The figures that matter, of the result files that are there."""
    import gpu_report

    step, kernels = load(folder, "gpu_step.json"), load(folder, "gpu_kernels.json")
    profile = load(folder, "gpu_profile.json")
    run_ = next((one["run"] for one in (step, kernels, profile) if "run" in one), {})
    keys = ("device", "driver", "cuda", "nccl", "torch", "date", "commit")
    rows = [(key, str(run_[key])) for key in keys if run_.get(key)]
    return [*rows, *gpu_report.facts(step, kernels, profile)]


def print_end(ended: list[Ended], folder: Path) -> None:
    """The last thing on the screen: one table."""
    rows = [(one.part.name, f"{one.status}, {one.seconds:.0f} s") for one in ended]
    tests = next((one for one in ended if one.part.name == "tests"), None)
    if tests and tests.last_line:
        rows.append(("tests", tests.last_line.strip("= ")))
    try:
        rows += facts(folder)
    except Exception as error:  # the table comes in any case
        rows.append(("results", f"not readable: {type(error).__name__}: {error}"))
    width = max(len(name) for name, _ in rows)
    print("\n" + "=" * 78)
    for name, text in rows:
        print(f"{name.ljust(width)}  {text}")
    print("=" * 78, flush=True)


def copy_out(target: str, folder: Path, chosen: list[Part]) -> None:
    """Copies results and logs to a folder of the caller's."""
    out = Path(target)
    out.mkdir(parents=True, exist_ok=True)
    files = [folder / name for part in chosen for name in part.results]
    files += [LOGS / f"{part.name}.log" for part in chosen]
    if out.resolve() != folder.resolve():
        for file in filter(Path.exists, files):
            shutil.copy(file, out / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="build,tests,kernels,step,profile")
    parser.add_argument("--dry", action="store_true", help="on the simulated GPU and the CPU")
    parser.add_argument("--tiny", action="store_true", help="small models and sizes")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all parts")
    parser.add_argument("--out", default=os.environ.get("OUT", ""), help="copy results there")
    args = parser.parse_args()
    lacking = missing(args.dry)
    for line in lacking:
        print(f"fsdpc: {line}")
    if any("everything" in line or "the build" in line for line in lacking):
        raise SystemExit(1)
    if not args.dry and not gpu_in_sight():
        raise SystemExit("fsdpc: torch finds no GPU here; make gpu-dry runs on a simulated one")
    LOGS.mkdir(parents=True, exist_ok=True)
    folder = LOGS / "dry" if args.dry or args.tiny else RESULTS  # only true figures among results
    folder.mkdir(parents=True, exist_ok=True)
    wanted = args.parts.split(",")
    chosen = [part for part in parts(args, folder) if part.name in wanted]
    if importlib.util.find_spec("pytest") is None:
        chosen = [part for part in chosen if part.name != "tests"]
    for file in [folder / name for part in chosen for name in part.results]:
        file.unlink(missing_ok=True)  # an older run's
    ended = run_all(chosen, environment(args.dry), args.seconds)
    if args.out:
        copy_out(args.out, folder, chosen)
    print_end(ended, folder)
    raise SystemExit(0 if all(one.status == "ok" for one in ended) else 1)


if __name__ == "__main__":
    main()
