"""docs/compatibility.md names everything of torch's FSDP1, and fsdpc's signatures equal torch's."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import fully_sharded_data_parallel as home
from torch.distributed.fsdp import sharded_grad_scaler, wrap

import fsdpc

THEIRS, OURS = theirs.FullyShardedDataParallel, fsdpc.FullyShardedDataParallel
DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
HEADS = {"name", "argument", "member", "attribute", "field", "hook", "variable"}
STATES = {"same", "better", "refused", "ignored"}
READ_BY_OTHERS = {  # private names that downstream code reads
    "_fsdp_wrapped_module", "_assert_state", "_comm_hook", "_comm_hook_state", "_inter_node_pg",
    "_is_root", "_has_params", "_use_orig_params", "_flat_param", "_handle",
}  # fmt: skip


def sections(text: str) -> dict[str, dict[str, str]]:
    """Return {heading: {first cell without backticks: state}} for the document's tables."""
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*?)\|$", body, flags=re.MULTILINE)
        found[heading.replace("`", "")] = {
            first.replace("`", ""): state for first, state, _ in rows if "---" not in first
        }
    return found


TABLES = sections(DOCUMENT.read_text())


def table(heading: str) -> dict[str, str]:
    return {first: state for first, state in TABLES[heading].items() if state in STATES}


def plain_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature without annotations and without self."""
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def own_members() -> list[str]:
    """Return the public methods and properties that torch's class adds or overrides."""
    added = set(dir(THEIRS)) - set(dir(nn.Module))
    overridden = {name for name in vars(THEIRS) if hasattr(nn.Module, name)}
    names = {name for name in added | overridden if not name.startswith("_")}
    return sorted(names | {"__getattr__", "__getitem__"})


def first_cell(name: str) -> str:
    member = inspect.getattr_static(THEIRS, name)
    if isinstance(member, property):
        return name
    return name + str(plain_signature(getattr(THEIRS, name)))


def public_names() -> list[str]:
    """Return the public names of FSDP1: the names that torch.distributed.fsdp exports and that its
    module fully_sharded_data_parallel has. test_compatibility_doc2.py tests the names of FSDP2.
    """
    return [*(name for name in theirs.__all__ if hasattr(home, name)), "FlatParameter"]


def config_fields() -> list[str]:
    names = [n for n in public_names() if n.endswith("DictConfig")]
    return [
        f"{name}.{field.name}"
        for name in names
        if name not in ("StateDictConfig", "OptimStateDictConfig")
        for field in dataclasses.fields(getattr(theirs, name))
    ]


def missing(expected: list[str], heading: str) -> list[str]:
    return [name for name in expected if name not in table(heading)]


def test_every_row_has_a_state():
    for heading, rows in TABLES.items():
        assert rows, heading
        wrong = {f: s for f, s in rows.items() if s not in STATES and f not in HEADS}
        assert not wrong, f"{heading}: {wrong}"


def test_every_name_is_there():
    assert missing(public_names(), "Names in torch.distributed.fsdp") == []
    assert missing(list(wrap.__all__), "torch.distributed.fsdp.wrap") == []
    assert missing(config_fields(), "Configurations of state dicts") == []
    assert missing(sorted(READ_BY_OTHERS), "Attributes of an instance") == []
    hooks = [name for name in vars(default_hooks) if re.fullmatch("[a-z]\\w*_hook", name)]
    assert hooks and missing(hooks, "Communication hooks") == []


def test_every_environment_variable_is_there():
    folder = Path(theirs.__file__).parent
    texts = [path.read_text() for path in folder.glob("*.py")]
    named = {n for text in texts for n in re.findall(r"[\"'](FSDP_[A-Z_]+)[\"']", text)}
    assert named and missing(sorted(named), "Environment variables") == []


def test_every_constructor_argument_is_there():
    names = list(plain_signature(THEIRS.__init__).parameters)
    assert list(table("Arguments of the constructor")) == names


def test_every_method_is_there_with_its_arguments():
    assert missing([first_cell(name) for name in own_members()], "Methods and properties") == []
    scaler = sharded_grad_scaler.ShardedGradScaler
    cell = "ShardedGradScaler" + str(plain_signature(scaler.__init__))
    assert missing([cell], "torch.distributed.fsdp.sharded_grad_scaler") == []


@pytest.mark.parametrize("name", ["__init__", *own_members()])
def test_signatures_are_torchs(name: str):
    if table("Methods and properties").get(first_cell(name)) == "refused":
        return
    member = inspect.getattr_static(THEIRS, name)
    ours = inspect.getattr_static(OURS, name)
    assert isinstance(ours, staticmethod) == isinstance(member, staticmethod)
    if isinstance(member, property):
        assert isinstance(ours, property)
        return
    got, expected = plain_signature(getattr(OURS, name)), plain_signature(getattr(THEIRS, name))
    assert [(p.name, p.kind, p.default) for p in got.parameters.values()] == [
        (p.name, p.kind, p.default) for p in expected.parameters.values()
    ]


def test_the_scalers_signature_is_torchs():
    ours = importlib.import_module("fsdpc.sharded_grad_scaler").ShardedGradScaler
    got = dict(plain_signature(ours.__init__).parameters)
    expected = dict(plain_signature(sharded_grad_scaler.ShardedGradScaler.__init__).parameters)
    assert list(got) == list(expected)
    differ = [name for name in got if got[name].default != expected[name].default]
    assert differ in (["device"], ["device", "process_group"])  # docs/compatibility.md says why


def test_names_are_torchs_objects():
    for name in public_names():
        if name != "FullyShardedDataParallel":
            assert getattr(fsdpc, name) is getattr(theirs, name), name
    ours = importlib.import_module("fsdpc.wrap")
    for name in [*wrap.__all__, "_or_policy"]:
        assert getattr(ours, name) is getattr(wrap, name), name


def test_a_row_that_is_gone_is_missed():
    text = DOCUMENT.read_text()
    line = next(row for row in text.splitlines() if row.startswith("| `clip_grad_norm_("))
    rows = sections(text.replace(line, ""))["Methods and properties"]
    assert first_cell("clip_grad_norm_") not in rows
    assert first_cell("clip_grad_norm_") in table("Methods and properties")
