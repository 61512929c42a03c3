"""The package's face: silent and light to import, torch's own objects under fsdpc's names."""

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


def test_importing_is_silent_and_loads_nothing_else():
    command = [sys.executable, "-W", "error", "-c", PROBE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.splitlines() == ["['fsdpc']", "False False"]
    assert result.stderr == ""


def test_every_public_name_exists():
    assert len(set(fsdpc.__all__)) == len(fsdpc.__all__)
    for name in fsdpc.__all__:
        assert getattr(fsdpc, name) is not None
        assert name in dir(fsdpc)
    assert fsdpc.FSDP is fsdpc.FullyShardedDataParallel
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fsdpc.no_such_name


def test_fsdp1s_public_names_are_all_here():
    """Everything that torch.distributed.fsdp exports for the wrapper class."""
    others = {  # of the per-parameter front end
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "FSDPModule",
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
    assert names - set(vars(fsdpc.FSDP)) == set()


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
