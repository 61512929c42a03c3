"""Tests of the extension with and without CUDA kernels, on machines with and without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fsdpc import _C

ROOT = Path(__file__).parents[2]
ASK = "import fsdpc._C as c; print(c.cuda_device(0))"


def refusal(**environment: str) -> str:
    """Return the last sentence of the error of a process that asks for a GPU and is refused."""
    result = subprocess.run(
        [sys.executable, "-c", ASK],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | environment,
    )
    assert result.returncode == 1, result.stdout
    kind, _, sentence = result.stderr.strip().splitlines()[-1].partition(": ")
    assert kind == "NotImplementedError"
    return sentence


def test_without_a_driver_there_is_one_sentence(tmp_path: Path):
    sentence = refusal(FSDPC_LIBCUDA=str(tmp_path / "libcuda.so.1"))
    assert sentence.startswith("no CUDA device here: the driver's library cannot be loaded")
    assert str(tmp_path) in sentence


def test_a_library_that_is_no_driver_is_recognised():
    library = next(
        (
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "/libc.so" in line or "/libc-" in line
        ),
        None,
    )
    if library is None:
        pytest.skip("no libc in this process's maps")
    assert "lacks cuGetProcAddress_v2" in refusal(FSDPC_LIBCUDA=library)


def test_ordinals_are_checked():
    with pytest.raises(TypeError):
        _C.cuda_device("0")


def has_nvcc() -> bool:
    return bool(shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists())


def test_the_image_is_there_where_nvcc_is():
    if os.environ.get("NVCC") or os.environ.get("CUDA_HOME"):
        pytest.skip("the environment names the nvcc of the build")
    if not has_nvcc():
        assert _C.cuda_image_bytes() == 0
    else:
        assert _C.cuda_image_bytes() > 10_000


BUILD = """
import sys
sys.argv = ["setup.py", "--version"]
sys.path.insert(0, ".")
import setup
print("image:", setup.cuda_image())
"""


def build_with(nvcc: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BUILD],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"NVCC": nvcc},
    )


def test_a_build_without_nvcc_says_so_in_one_line():
    result = build_with("none")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith(("fsdpc:", "image:"))]
    assert lines == [
        "fsdpc: no nvcc, so this extension is for processors only (see NVCC in setup.py)",
        "image: None",
    ]


def test_a_wrong_nvcc_is_named():
    result = build_with("/nowhere/nvcc")
    assert result.returncode == 1
    assert "NVCC=/nowhere/nvcc: no such program" in result.stderr


def test_the_source_distribution_has_every_source(tmp_path):
    """An installation from the source distribution can only build the sources that the distribution
    contains.
    """
    # The metadata goes to a separate folder, because metadata in the source tree may list files
    # of an earlier build.
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path)]
    command += ["sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    folders = (ROOT / "csrc", ROOT / "kernels", ROOT / "fsdpc")
    endings = (".c", ".h", ".inc", ".cu", ".cuh", ".py", ".pyi")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in endings]
    wanted = {str(path.relative_to(ROOT)) for path in files}
    assert len(wanted) > 100
    assert not wanted - packed
    assert not [name for name in packed if "probe" in name]


CHOICE = """
import sys, setuptools
from distutils.core import run_setup
command = run_setup("setup.py", stop_after="config").get_command_obj("build_ext")
command.inplace = sys.argv[1] == "inplace"
command.editable_mode = sys.argv[1] == "editable"
command.ensure_finalized()
print(*(extension.name for extension in command.extensions))
"""


@pytest.mark.parametrize("how, probe", [
    ("wheel", False), ("inplace", True), ("editable", True), ("FSDPC_PROBE", True)
])  # fmt: skip
def test_wheels_do_not_contain_the_probe(how: str, probe: bool):
    environment = {key: value for key, value in os.environ.items() if key != "FSDPC_PROBE"}
    result = subprocess.run(
        [sys.executable, "-c", CHOICE, how],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=environment | ({how: "1"} if how == "FSDPC_PROBE" else {}),
    )
    assert result.stdout.split() == ["fsdpc._C", *(["fsdpc._probe"] if probe else [])], (
        result.stderr
    )
