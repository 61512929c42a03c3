"""docs/compatibility.md names everything of torch's FSDP2, and fsdpc's signatures equal torch's."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed.fsdp as theirs
from test_compatibility_doc import missing, plain_signature, public_names, table

import fsdpc

if not hasattr(theirs, "DataParallelMeshDims"):
    pytest.skip("docs/compatibility.md describes torch 2.13", allow_module_level=True)

NAMES = "FSDP2: names"
ARGUMENTS = "FSDP2: arguments of fully_shard"
METHODS = "FSDP2: methods of FSDPModule"


def names() -> list[str]:
    """Return the public names of torch's package that are not names of FSDP1."""
    return [name for name in theirs.__all__ if name not in public_names()]


def own_methods() -> list[str]:
    return [name for name in vars(theirs.FSDPModule) if not name.startswith("_")]


def cell(name: str) -> str:
    value = getattr(theirs, name)
    plain = inspect.isclass(value) or name == "fully_shard"
    return name if plain else name + str(plain_signature(value))


def comparable(function) -> list[tuple]:
    parameters = plain_signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


def test_every_name_is_there():
    assert missing([cell(name) for name in names()], NAMES) == []
    assert len(table(NAMES)) == len(names())


def test_every_argument_is_there():
    assert list(table(ARGUMENTS)) == list(plain_signature(theirs.fully_shard).parameters)


def test_every_method_is_there_with_its_arguments():
    rows = [name + str(plain_signature(getattr(theirs.FSDPModule, name))) for name in own_methods()]
    assert rows and missing(rows, METHODS) == []
    assert len(table(METHODS)) == len(rows)


@pytest.mark.parametrize("name", ["_set_unshard_async_op", *own_methods()])
def test_signatures_are_torchs(name: str):
    ours, expected = getattr(fsdpc.FSDPModule, name), getattr(theirs.FSDPModule, name)
    assert ours is not expected
    assert comparable(ours) == comparable(expected)


@pytest.mark.parametrize("name", ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"])
def test_signatures_of_functions_are_torchs(name: str):
    assert comparable(getattr(fsdpc, name)) == comparable(getattr(theirs, name))


def test_policies_are_torchs_objects():
    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        assert getattr(fsdpc, name) is getattr(theirs, name)


def test_what_is_refused_raises_by_name():
    refused = [row.split("(")[0] for row, state in table(METHODS).items() if state == "refused"]
    module = object.__new__(type("Sharded", (fsdpc.FSDPModule,), {"__new__": object.__new__}))
    for name in refused:
        with pytest.raises(NotImplementedError, match="fsdpc"):
            getattr(module, name)(*[None] * (name != "set_symm_mem_for_comm"))
    assert len(refused) >= 3
