"""Builds the C core as fsdpc._C. The package's metadata is in pyproject.toml.

In-place and editable builds also make fsdpc._probe of the same objects and those of tests/probe;
wheels do not contain it.

Environment switches, all off by default:
  FSDPC_SANITIZE=address|undefined|address,undefined|thread   instruments the core
  FSDPC_COVERAGE=1                                            writes gcov data
  FSDPC_DEBUG=1                                               keeps the assertions, -O1
  FSDPC_PROBE=1                                               makes fsdpc._probe in any build
  FSDPC_CORE=path                                             links this archive of the core instead
                                                              of compiling all but csrc/py
  FSDPC_JOBS=N                                                compilers at a time
  NVCC=path|none                                              the CUDA compiler, or a build without
Each combination has its own object directory, and a file is compiled again only when it or a
header is newer than its object. The CUDA kernels are compiled where nvcc is found (NVCC, PATH,
CUDA_HOME, /usr/local/cuda); without it the extension serves processors only.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

os.chdir(Path(__file__).resolve().parent)


def find(*endings: str, folders: tuple[str, ...] = ("csrc", "kernels")) -> list[str]:
    patterns = [f"{d}/**/*.{e}" for d in folders for e in endings]
    return sorted(file for pattern in patterns for file in glob(pattern, recursive=True))


SOURCES, HEADERS, KERNELS = find("c"), find("h", "inc"), find("cu", "cuh")
PROBE, PROBE_SOURCES = "fsdpc._probe", find("c", folders=("tests/probe",))
PROBE_HEADERS = find("h", folders=("tests/probe",))
IMAGE_SOURCES = [*KERNELS, *glob("kernels/*.h"), "csrc/base/dtype.h"]
IMAGE_HOLDER = "csrc/device/cuda_image.c"
GPU_CODES = ("sm_80", "sm_90", "sm_100")
NVCC_ARGS = "-std=c++17 -O3 -fmad=false -fatbin -Icsrc -Ikernels --threads 0".split()
SANITIZERS = {"address", "undefined", "thread"}


def switched_on(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def sanitizers() -> list[str]:
    names = [n for n in os.environ.get("FSDPC_SANITIZE", "").split(",") if n]
    unknown = set(names) - SANITIZERS
    if unknown or {"address", "thread"} <= set(names):
        raise SystemExit(
            f"FSDPC_SANITIZE={','.join(names)}: choose from address, undefined, thread; "
            "address and thread exclude each other"
        )
    return names


def flags() -> tuple[list[str], list[str], str]:
    """Compiler flags, linker flags and a name for this combination."""
    compile_args = "-std=c11 -D_GNU_SOURCE -O3 -g1 -pthread -fvisibility=hidden".split()
    compile_args += "-fno-math-errno -Wall -Wextra".split()
    link_args = ["-pthread"]
    variant = []
    if switched_on("FSDPC_DEBUG"):
        compile_args += ["-UNDEBUG", "-O1", "-g"]
        variant.append("debug")
    if switched_on("FSDPC_COVERAGE"):
        compile_args += ["--coverage", "-O1", "-g"]
        link_args += ["--coverage"]
        variant.append("coverage")
    if names := sanitizers():
        both = [f"-fsanitize={','.join(names)}", "-fno-sanitize-recover=all"]
        compile_args += [*both, "-UNDEBUG", "-O1", "-fno-omit-frame-pointer"]
        link_args += both
        variant += names
    return compile_args, link_args, "-".join(variant)


def object_directory() -> str:
    command = repr([COMPILE_ARGS, sys.implementation.cache_tag, numpy.__version__])
    return f"{VARIANT or 'release'}-{hashlib.sha256(command.encode()).hexdigest()[:8]}"


def find_nvcc() -> str | None:
    if wanted := os.environ.get("NVCC"):
        if wanted != "none" and not shutil.which(wanted):
            raise SystemExit(f"NVCC={wanted}: no such program (NVCC=none builds without CUDA)")
        return None if wanted == "none" else shutil.which(wanted)
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def nvcc_command(nvcc: str) -> list[str]:
    """For those of our GPUs that this nvcc knows, and PTX of the oldest for all others."""
    ask = [nvcc, "--list-gpu-code"]
    known = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
    codes = [code for code in GPU_CODES if code in known]
    if not codes:
        raise SystemExit(f"{nvcc} compiles for none of {', '.join(GPU_CODES)} (NVCC=none: without)")
    pairs = [(code.replace("sm", "compute"), code) for code in codes]
    pairs.append((pairs[0][0], pairs[0][0]))
    command = [nvcc, *NVCC_ARGS, *(f"-gencode=arch={arch},code={code}" for arch, code in pairs)]
    can = subprocess.run([nvcc, "--help"], capture_output=True, text=True).stdout
    return [*command, "--compress-mode=size"] if "--compress-mode" in can else command


def cuda_image() -> str | None:
    """Path of the kernels' image, compiled only if one of its sources is newer."""
    nvcc = find_nvcc()
    if nvcc is None:
        print("fsdpc: no nvcc, so this extension is for processors only (see NVCC in setup.py)")
        return None
    command = [*nvcc_command(nvcc), "kernels/cuda_image.cu"]
    folder = Path("build/cuda", hashlib.sha256(repr(command).encode()).hexdigest()[:8])
    image = folder / "kernels.fatbin"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(os.path.getmtime(f) for f in IMAGE_SOURCES)
        if not image.exists() or image.stat().st_mtime <= newest:
            print("fsdpc: compiling the CUDA kernels with", nvcc)
            unfinished = folder / "unfinished"
            if subprocess.run([*command, "-o", str(unfinished)]).returncode:
                raise SystemExit("nvcc failed (NVCC=none builds without CUDA)")
            unfinished.replace(image)
    return str(image)


class ParallelBuild(build_ext):
    """Compiles the files of the extension at the same time, only those that changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if not (self.inplace or self.editable_mode or switched_on("FSDPC_PROBE")):
            self.extensions = [e for e in self.extensions if e.name != PROBE]
            if not VARIANT:  # debug information names folders of the machine that builds
                for one in self.extensions:
                    one.extra_link_args = [*LINK_ARGS, "-Wl,--strip-debug"]
        self.force = True  # the objects are checked one by one, linking is cheap
        # A place of our own, so that in-place, editable and wheel builds share their objects.
        self.build_temp = os.path.join("build", "objects", object_directory())

    def build_extensions(self) -> None:
        self.compiler.compile = self.compile_all
        linker = self.compiler.linker_so  # some Pythons add their own folder
        self.compiler.linker_so = [arg for arg in linker if not arg.startswith("-Wl,-rpath")]
        os.makedirs(self.build_temp, exist_ok=True)
        with open(os.path.join(self.build_temp, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds at once would spoil each other's objects
            super().build_extensions()

    def compile_all(
        self,
        sources,
        output_dir=None,
        macros=None,
        include_dirs=None,
        debug=False,
        extra_preargs=None,
        extra_postargs=None,
        depends=None,
    ) -> list[str]:
        compiler = self.compiler
        macros, objects, post, pre, jobs = compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        options = compiler._get_cc_args(pre, debug, extra_preargs)
        image = cuda_image()
        newest = max(os.path.getmtime(f) for f in [*HEADERS, *PROBE_HEADERS, "setup.py"])

        def stale(item: str) -> bool:
            if jobs[item][0] == IMAGE_HOLDER:
                return True  # the image may be another, or gone
            made = os.path.getmtime(item) if os.path.exists(item) else 0
            return made <= max(newest, os.path.getmtime(jobs[item][0]))

        def compile_one(item: str) -> None:
            source, extension = jobs[item]
            extra = [f'-DFSDPC_CUDA_IMAGE="{image}"'] if image and source == IMAGE_HOLDER else []
            compiler._compile(item, source, extension, options, [*post, *extra], pre)

        count = int(os.environ.get("FSDPC_JOBS") or os.cpu_count() or 1)
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(compile_one, [item for item in objects if item in jobs and stale(item)]))
        return objects


COMPILE_ARGS, LINK_ARGS, VARIANT = flags()
if ARCHIVE := os.environ.get("FSDPC_CORE"):
    SOURCES = [file for file in SOURCES if file.startswith("csrc/py/") or file == IMAGE_HOLDER]
    LINK_ARGS += [ARCHIVE, "-Wl,--exclude-libs,ALL"]  # its names are not hidden from others


def extension(name: str, sources: list[str], depends: list[str]) -> Extension:
    return Extension(
        name,
        sources=sources,
        depends=depends,  # which also puts them into the sdist
        include_dirs=["csrc", "kernels", numpy.get_include()],
        extra_compile_args=COMPILE_ARGS,
        extra_link_args=LINK_ARGS,
        libraries=["dl", "rt", "m"],
    )


EXTENSIONS = [extension("fsdpc._C", SOURCES, [*HEADERS, *KERNELS])]
if PROBE_SOURCES:  # an sdist has no tests
    EXTENSIONS.append(extension(PROBE, [*SOURCES, *PROBE_SOURCES], [*HEADERS, *PROBE_HEADERS]))

setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": ParallelBuild})
