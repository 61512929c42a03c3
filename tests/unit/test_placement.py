"""Tests of which device a unit computes on, and of what is moved to that device. No GPU is needed:
what torch reports about GPUs is replaced, and tensors on GPUs are fake or on the meta device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdpc import _C
from fsdpc._engine import root as _root
from fsdpc._fsdp1 import placement as _placement
from fsdpc._fsdp1.collect import Ignored
from fsdpc._fsdp1.placement import CPU, asked_device, default_device, move_module
from fsdpc._fsdp1.root import FRONT


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make torch and the core report two GPUs, of which the second one is current."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(_C, "cuda_device", lambda index: {"device": f"cuda:{index}"})
    # A CUDA build's fake tensors would start the driver once torch says that there are GPUs.
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None, raising=False)
    with FakeTensorMode(), torch.no_grad():
        yield


def on(device: str) -> nn.Module:
    """Return a layer on a GPU that does not exist."""
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.empty(4, device=device))
    return layer


def placed(module: nn.Module, asked: torch.device | None = None) -> torch.device:
    return move_module(module, Ignored(), asked, "layer")


# --- what device_id names ------------------------------------------------------------------------


def test_the_cpu_is_named_in_several_ways():
    assert asked_device(None) is None
    for named in (torch.device("cpu"), torch.device("cpu", 0), "cpu"):
        assert asked_device(named) == CPU


@pytest.mark.parametrize("named", [True, 2.5, [0]])
def test_what_names_no_device(named: object):
    with pytest.raises(TypeError, match="device_id must be"):
        asked_device(named)


@pytest.mark.parametrize("named", [1, "cuda:1", torch.device("cuda", 1)])
def test_a_gpu_by_its_number(two_gpus: None, named: object):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked_device(named) == torch.device("cuda", 1)


def test_a_gpu_without_a_number_is_the_current_one(two_gpus: None):
    with pytest.warns(UserWarning, match="does not have an explicit index.*current device 1"):
        assert asked_device(torch.device("cuda")) == torch.device("cuda", 1)


def test_a_number_that_no_gpu_has(two_gpus: None):
    with pytest.raises(
        RuntimeError, match=r"device_id=2 on rank 0: torch finds 2 CUDA devices.*CPU"
    ):
        asked_device(2)


def test_the_error_names_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="built without CUDA"):
        asked_device(0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch finds no CUDA device"):
        asked_device(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="not on meta"):
        asked_device(torch.device("meta"))


def test_the_error_names_what_the_core_lacks(two_gpus: None, monkeypatch: pytest.MonkeyPatch):
    def without_kernels(index: int) -> None:
        raise NotImplementedError("this extension was built without CUDA kernels")

    monkeypatch.setattr(_C, "cuda_device", without_kernels)
    with pytest.raises(RuntimeError, match="device_id=0 on rank 0: this extension was built"):
        asked_device(0)
    assert default_device() == CPU
    with pytest.raises(RuntimeError, match=r"parameters on cuda:1 on rank 0, but this extension"):
        placed(on("cuda:1"))


# --- where a unit computes -----------------------------------------------------------------------


def test_a_module_on_a_gpu_stays_there(two_gpus: None):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert placed(on("cuda:1")) == torch.device("cuda", 1)
        assert placed(on("cuda:1"), torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_a_module_on_another_gpu_than_torchs_current_one(two_gpus: None):
    with pytest.warns(UserWarning, match=r"'layer' is on cuda:0, but torch's current.*is 1"):
        assert placed(on("cuda:0")) == torch.device("cuda", 0)


def test_a_module_on_another_gpu_than_asked(two_gpus: None):
    with pytest.raises(ValueError, match=r"`device_id` on rank 0: cuda:0 vs cuda:1.*'layer'"):
        placed(on("cuda:0"), torch.device("cuda", 1))
    with pytest.raises(ValueError, match="cuda:0 vs cpu"):
        placed(on("cuda:0"), CPU)


def test_a_module_on_the_cpu_trains_there_with_a_warning_where_there_are_gpus(two_gpus: None):
    with pytest.warns(UserWarning, match=r"The passed-in `module` is on CPU.*device_id"):
        assert placed(on("cpu")) == CPU
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert placed(on("cpu"), CPU) == CPU


def test_a_module_on_the_cpu_without_gpus():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert placed(nn.Linear(2, 2)) == default_device() == CPU


def test_a_module_on_several_devices(two_gpus: None):
    mixed = nn.Sequential(on("cpu"), on("cuda:0"))
    with pytest.raises(RuntimeError, match=r"both CPU and GPU params.*device_id.*'layer'"):
        placed(mixed)
    with pytest.raises(RuntimeError, match=r"single device modules.*cuda:0.*cuda:1"):
        placed(nn.Sequential(on("cuda:1"), on("cuda:0")), torch.device("cuda", 1))


def test_a_module_without_parameters_goes_to_the_current_gpu(two_gpus: None):
    assert placed(nn.ReLU()) == torch.device("cuda", 1)
    assert placed(nn.ReLU(), torch.device("cuda", 0)) == torch.device("cuda", 0)


def test_units_on_two_devices_are_refused_by_name():
    def member(name: str, device: str) -> SimpleNamespace:
        return SimpleNamespace(
            _unit=SimpleNamespace(name=name), compute_device=torch.device(device)
        )

    here, there = member("", "cuda:0"), member("layers.1", "cuda:1")
    _root._check_one_device(FRONT, [here, here])
    with pytest.raises(ValueError, match=r"'\(root\)' on cuda:0, 'layers.1' on cuda:1.*device_id"):
        _root._check_one_device(FRONT, [here, there])


def test_a_module_without_parameters_goes_where_its_units_are(two_gpus: None):
    class Inner(nn.Module):
        _fsdpc_is_unit = True
        compute_device = torch.device("cuda", 0)

    assert placed(nn.Sequential(Inner())) == torch.device("cuda", 0)


# --- what is moved -------------------------------------------------------------------------------


def test_the_units_own_tensors_are_moved():
    class Inner(nn.Linear):
        _fsdpc_is_unit = True

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Inner(2, 2), nn.Linear(2, 2))
    ignored = Ignored(modules={model[3]}, params={*model[3].parameters(), model[0].bias})
    model[1].register_buffer("elsewhere", torch.empty(1, device="meta"))
    names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    moved = [names[id(tensor)] for tensor in _placement._on_the_cpu(model, ignored)]
    assert moved == [
        "0.weight",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
