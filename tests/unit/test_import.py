"""Tests of importing the package: the import is silent and light, and enums, configuration classes
and wrapping policies are torch's own objects.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap

import fsdpc

PROBE = """
import sys, torch
before = set(sys.modules)
import fsdpc
print(sorted(name for name in set(sys.modules) - before))
from fsdpc import mark_data_dependent
print("torch.distributed.fsdp" in sys.modules, torch.cuda.is_initialized())
"""


@pytest.mark.long
def test_importing_is_silent_and_loads_nothing_else():
    command = [sys.executable, "-W", "error", "-c", PROBE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout.splitlines() == ["['fsdpc']", "False False"]
    assert result.stderr == ""


CORE_PROBE = """
import __future__, importlib.abc, os, sys

class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)

def seen():
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if ".so" in line}
    return files, len(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))

sys.meta_path.insert(0, NoTorch())
import numpy
modules, (files, threads, descriptors) = set(sys.modules), seen()
import fsdpc, fsdpc._C
new_files, new_threads, new_descriptors = seen()
print(sorted(set(sys.modules) - modules))
print([os.path.basename(f).split(".")[0] for f in new_files - files])
print(new_threads - threads, new_descriptors - descriptors)
array = numpy.arange(4, dtype="f4")
fsdpc._C.Comm.self_().all_reduce(array)
print(array.tolist(), issubclass(fsdpc.PeerError, fsdpc.CommError))
"""


def test_the_core_needs_numpy_only():
    """Importing the core loads neither torch nor another library, such as CUDA's, and leaves no
    thread and no open file.
    """
    command = [sys.executable, "-W", "error", "-c", CORE_PROBE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "['fsdpc', 'fsdpc._C']",
        "['_C']",
        "0 set()",
        "[0.0, 1.0, 2.0, 3.0] True",
    ]


def test_every_public_name_exists():
    assert len(set(fsdpc.__all__)) == len(fsdpc.__all__)
    for name in fsdpc.__all__:
        assert getattr(fsdpc, name) is not None
        assert name in dir(fsdpc)
    assert fsdpc.FSDP is fsdpc.FullyShardedDataParallel
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fsdpc.no_such_name


def test_fsdp1s_public_names_are_all_here():
    """fsdpc has every name that torch.distributed.fsdp exports for the wrapper class."""
    others = {  # names of FSDP2, which do not belong to the wrapper class
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "FSDPModule",
        "GradientReductionHandle",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "UnshardHandle",
        "fully_shard",
        "register_fsdp_forward_method",
        "share_comm_ctx",
    }
    for name in set(torch.distributed.fsdp.__all__) - others:
        assert name in fsdpc.__all__, name


def test_enums_classes_and_policies_are_torchs_own():
    for name in fsdpc.api.__all__:
        if hasattr(torch.distributed.fsdp, name):
            assert getattr(fsdpc.api, name) is getattr(torch.distributed.fsdp, name), name
    for name in fsdpc.wrap.__all__:
        assert getattr(fsdpc.wrap, name) is getattr(torch.distributed.fsdp.wrap, name), name
    module = fsdpc.fully_sharded_data_parallel
    for name in module.__all__:
        assert getattr(module, name) is getattr(fsdpc, name), name


def test_the_class_has_every_public_method_of_torchs():
    theirs = torch.distributed.fsdp.FullyShardedDataParallel
    names = {name for name in vars(theirs) if not name.startswith("_")}
    missing = {name for name in names if not hasattr(fsdpc.FSDP, name)}
    assert missing == set()
    torchs = {name for name in names if getattr(fsdpc.FSDP, name) is getattr(theirs, name)}
    assert torchs == set(), "torch's code would run on fsdpc's models"


def test_the_exceptions_are_also_pythons():
    for name, base in {
        "CommError": RuntimeError,
        "PeerError": fsdpc.CommError,
        "CommTimeout": TimeoutError,
        "MismatchError": ValueError,
        "StateError": RuntimeError,
        "OutOfMemoryError": MemoryError,
    }.items():
        assert issubclass(getattr(fsdpc, name), base), name


SUBMODULES = """
import fsdpc
fsdpc.optim.AdamW, fsdpc.activations.offload, fsdpc.checkpoint.save
fsdpc.sharded_grad_scaler.ShardedGradScaler, fsdpc.wrap.ModuleWrapPolicy
"""


@pytest.mark.long
def test_submodules_need_no_import_of_their_own():
    subprocess.run([sys.executable, "-c", SUBMODULES], timeout=300, check=True)
