"""Tests of ``fsdpc.install()``: the class that a name refers to before install(), between install()
and uninstall(), and after uninstall().
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
import warnings
from functools import partial

import pytest
import torch
import torch.distributed.fsdp as public
import torch.distributed.fsdp.fully_sharded_data_parallel as home
import torch.distributed.fsdp.sharded_grad_scaler as scaler_home
from harness import ranks
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import fully_shard
from toys import loss_of, tokens, toy

import fsdpc
from fsdpc._install import installed
from fsdpc.sharded_grad_scaler import ShardedGradScaler

CPU = torch.device("cpu")


class Torchs:
    """Torch's classes. install() replaces names in modules only, so this class keeps them."""

    FSDP = public.FullyShardedDataParallel
    Scaler = scaler_home.ShardedGradScaler


STATIC = [
    name
    for name, value in vars(Torchs.FSDP).items()
    if isinstance(value, staticmethod) and not name.startswith("_")
]


class DerivedBefore(Torchs.FSDP):
    """A framework's subclass that was defined when torch's name still meant torch's class."""


@pytest.fixture(autouse=True)
def _leave_as_found():
    yield
    fsdpc.uninstall()


def framework(name: str = "framework") -> types.ModuleType:
    """Return a module that has imported torch's classes under other names."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.FSDP = Torchs.FSDP
    module.Scaler = Torchs.Scaler
    return module


def torch_holders() -> dict[str, object]:
    return {
        f"{name}.{key}": value
        for name, module in list(sys.modules.items())
        if name.startswith("torch.") and isinstance(module, types.ModuleType)
        for key, value in list(vars(module).items())
        if value is Torchs.FSDP or value is fsdpc.FSDP
    }


def test_names_change_and_change_back():
    module = framework()
    held, vocabulary = torch_holders(), vars(Torchs.FSDP).copy()
    for _ in range(2):
        fsdpc.install()
        fsdpc.install()
        assert installed()
        assert public.FullyShardedDataParallel is fsdpc.FSDP
        assert home.FullyShardedDataParallel is fsdpc.FSDP
        from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

        assert FullyShardedDataParallel is fsdpc.FSDP
        assert module.FSDP is fsdpc.FSDP
        assert scaler_home.ShardedGradScaler is module.Scaler is ShardedGradScaler
        assert vars(home)["FullyShardedDataParallel"] is Torchs.FSDP  # torch's functions read this
        fsdpc.uninstall()
        fsdpc.uninstall()
        assert not installed()
        assert scaler_home.ShardedGradScaler is module.Scaler is Torchs.Scaler
        assert module.FSDP is Torchs.FSDP and torch_holders() == held
        assert vars(Torchs.FSDP) == vocabulary
        assert type(home) is types.ModuleType
    del sys.modules["framework"]


def test_names_that_were_changed_since_are_left_alone():
    module = framework()
    fsdpc.install()
    module.FSDP = other = object()
    fsdpc.uninstall()
    assert module.FSDP is other
    del sys.modules["framework"]


def test_signatures_stay_readable():
    before = inspect.signature(Torchs.FSDP), inspect.signature(Torchs.FSDP.state_dict_type)
    fsdpc.install()
    assert (
        inspect.signature(Torchs.FSDP),
        inspect.signature(Torchs.FSDP.state_dict_type),
    ) == before
    assert list(inspect.signature(fsdpc.FSDP).parameters) == list(before[0].parameters)


def test_enums_and_policies_do_not_change():
    changed = {"FullyShardedDataParallel", "fully_shard", "register_fsdp_forward_method"}
    names = [name for name in public.__all__ if name not in {*changed, "share_comm_ctx"}]
    before = [getattr(public, name) for name in names]
    fsdpc.install()
    assert [getattr(public, name) for name in names] == before
    assert all(getattr(public, name) is getattr(fsdpc, name) for name in changed)


@pytest.mark.long
def test_importing_and_installing_is_silent():
    script = (
        "import torch.distributed.fsdp, fsdpc; fsdpc.install();"
        "import torch.distributed.checkpoint.state_dict as s; from torch.distributed.fsdp import "
        "FullyShardedDataParallel as F; fsdpc.uninstall(); print(s.FSDP is F, F is fsdpc.FSDP)"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert (result.stdout, result.stderr) == ("False True\n", "")


def test_none_of_torchs_code_is_inherited():
    """torch's class is a base class only for isinstance:
    fsdpc overrides or hides every name that torch's class defines.
    """
    ours = [c for c in fsdpc.FSDP.__mro__ if c.__module__.partition(".")[0] == "fsdpc"]
    for name in vars(Torchs.FSDP):
        if name in ("__doc__", "__dict__", "__weakref__", "__annotations__"):
            continue
        assert any(name in vars(c) for c in ours), name
        value = inspect.getattr_static(fsdpc.FSDP, name)
        value = getattr(value, "__func__", getattr(value, "fget", value))
        assert getattr(value, "__module__", "") != home.__name__, name
    assert not hasattr(fsdpc.FSDP, "_optim_state_dict_impl")


@ranks(2, alone=True)
def test_models_of_both_kinds(rank, world):
    """isinstance, static methods of both classes, and training work for models of both classes."""
    theirs = Torchs.FSDP(toy(), device_id=CPU)
    ours_before = fsdpc.FSDP(toy())
    assert isinstance(ours_before, Torchs.FSDP) and isinstance(ours_before, fsdpc.FSDP)
    assert isinstance(theirs, Torchs.FSDP) and not isinstance(theirs, fsdpc.FSDP)
    captured = partial(Torchs.FSDP, use_orig_params=True)
    fsdpc.install()
    ours = captured(toy())
    also = public.FullyShardedDataParallel(toy())
    for model in (ours, also, ours_before):
        assert type(model) is fsdpc.FSDP is public.FullyShardedDataParallel
        assert isinstance(model, Torchs.FSDP) and isinstance(model, fsdpc.FSDP)
        assert not isinstance(model.module, Torchs.FSDP)
    assert type(theirs) is Torchs.FSDP
    assert isinstance(theirs, Torchs.FSDP) and isinstance(theirs, fsdpc.FSDP)
    assert not isinstance(toy(), fsdpc.FSDP)
    losses = [train(model, rank) for model in (theirs, ours, also)]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=0)
    for cls in (Torchs.FSDP, fsdpc.FSDP):
        for model in (theirs, ours):
            assert cls.fsdp_modules(model) == [model]
            with cls.summon_full_params(model):
                assert model.module.head.weight.shape == (13, 6)
            full = public.StateDictType.FULL_STATE_DICT
            with cls.state_dict_type(module=model, state_dict_type=full), quiet():
                assert list(model.state_dict()) == list(toy().state_dict())
            assert cls.get_state_dict_type(model).state_dict_type is full
    fsdpc.uninstall()
    assert type(Torchs.FSDP(toy(), device_id=CPU)) is Torchs.FSDP
    assert isinstance(ours, Torchs.FSDP) and not isinstance(theirs, fsdpc.FSDP)
    assert fsdpc.FSDP.fsdp_modules(ours) == [ours]
    torch.testing.assert_close(train(ours, rank), train(also, rank), rtol=0, atol=0)


def train(model: nn.Module, rank: int) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = loss_of(model, tokens(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def quiet() -> warnings.catch_warnings:
    return warnings.catch_warnings(action="ignore", category=FutureWarning)


@ranks(2, alone=True)
def test_a_class_derived_before_is_refused_in_one_sentence(rank, world):
    fsdpc.install()
    with pytest.raises(RuntimeError, match="DerivedBefore was derived from torch's .* before"):
        DerivedBefore(toy())

    class DerivedAfter(public.FullyShardedDataParallel):
        pass

    model = DerivedAfter(toy())
    assert fsdpc.FSDP.fsdp_modules(model) == [model]
    train(model, rank)
    fsdpc.uninstall()
    assert type(DerivedBefore(toy(), device_id=CPU)) is DerivedBefore


@ranks(2, alone=True)
def test_fully_shard_and_torchs_checkpoints_go_on(rank, world):
    """torch's ``fully_shard`` still works after install() has replaced torch's wrapper class."""
    fsdpc.install()
    model = toy()
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (world,)))
    assert isinstance(model, public.FSDPModule)
    assert not isinstance(model, public.FullyShardedDataParallel)
    train(model, rank)
    options = dcp.StateDictOptions(full_state_dict=True)
    state = dcp.get_model_state_dict(model, options=options)
    assert list(state) == list(toy().state_dict())


@pytest.mark.parametrize("name", STATIC)
def test_static_methods_go_to_the_owner_of_the_model(name):
    """If any argument is a model of torch's class, torch's method runs; else fsdpc's runs."""
    calls = []
    owners = {"torch": Torchs.FSDP, "fsdpc": fsdpc.FSDP}
    originals = {who: inspect.getattr_static(cls, name) for who, cls in owners.items()}
    parameters = inspect.signature(getattr(Torchs.FSDP, name)).parameters
    plain = nn.Linear(1, 1)
    torchs = nn.Sequential(Torchs.FSDP.__new__(Torchs.FSDP))
    nn.Module.__init__(torchs[0])
    try:
        for who, cls in owners.items():
            setattr(cls, name, staticmethod(stub(calls, who, originals[who].__func__)))
        fsdpc.install()
        for model, answers in ((plain, "fsdpc"), (torchs, "torch")):
            arguments = {key: model if key in ("model", "module") else None for key in parameters}
            for cls in owners.values():
                getattr(cls, name)(**arguments)
                getattr(cls, name)(*arguments.values())
            assert calls == [answers] * 4
            calls.clear()
    finally:
        fsdpc.uninstall()
        for who, cls in owners.items():
            setattr(cls, name, originals[who])


def stub(calls: list[str], who: str, original):
    def method(*args, **kwargs):
        calls.append(who)

    method.__signature__ = inspect.signature(original)
    return method


# --- fully_shard ---------------------------------------------------------------------------------


@ranks(2, alone=True)
@pytest.mark.parametrize("interface", ["both", "fully_shard", "FullyShardedDataParallel"])
def test_the_interface_that_is_installed(rank, world, interface):
    import torch.distributed._composable.fsdp as composable
    import torch.distributed.fsdp as public

    before = public.fully_shard, public.FullyShardedDataParallel
    theirs = before[0](toy())  # sharded by torch before install()
    fsdpc.install(interface)
    sharded = public.fully_shard is fsdpc.fully_shard
    assert (
        sharded
        == (composable.fully_shard is fsdpc.fully_shard)
        == (interface in ("both", "fully_shard"))
    )
    assert (public.FullyShardedDataParallel is fsdpc.FSDP) == (interface != "fully_shard")
    ours = public.fully_shard(toy())
    assert isinstance(ours, fsdpc.FSDPModule) == sharded and isinstance(ours, public.FSDPModule)
    for model in (theirs, ours):
        public.register_fsdp_forward_method(model, "forward")
        loss_of(model, tokens(rank, 0)).backward()
    for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor())
    fsdpc.uninstall()
    assert (public.fully_shard, public.FullyShardedDataParallel) == before
    with pytest.raises(ValueError, match="fully_shard"):
        fsdpc.install("fsdp2")
