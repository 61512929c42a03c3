"""Tests of the device on which modules, inputs and state dicts are. A module may be made on a
device, moved to the device, or placed there by ``device_id``.
"""

from __future__ import annotations

import warnings

import pytest
import runs
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Torchs

import fsdpc

CPU = torch.device("cpu")
real_gpu = pytest.mark.real_gpu


@pytest.fixture
def place(device, group) -> torch.device:
    return device.device


@pytest.fixture(scope="module")
def plain(device) -> list[float]:
    return runs.train(runs.model(device.device), device.device)


def devices(tensors) -> set[torch.device]:
    return {tensor.device for tensor in tensors}


# --- modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["device", "number", "none"])
def test_device_id(place, plain, named):
    if named == "number" and place == CPU:
        pytest.skip("the simulated GPU has no number in torch")
    device_id = {"device": place, "number": place.index, "none": None}[named]
    model = runs.wrap(runs.model(place), place, device_id=device_id)
    assert model.compute_device == place
    runs.close(runs.train(model, place), plain)


@real_gpu
def test_a_module_on_the_cpu_is_moved(place, plain):
    model = runs.wrap(runs.model(CPU), place)
    assert devices(model.parameters()) == {place}
    runs.close(runs.train(model, place), plain)


@real_gpu
def test_no_more_than_one_unit_is_whole_on_the_gpu_while_it_is_moved(place):
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    whole = sum(p.numel() * p.element_size() for p in module.parameters())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(place)
    torch.cuda.reset_peak_memory_stats(place)
    policy = fsdpc.wrap.ModuleWrapPolicy({nn.Linear})
    model = fsdpc.FullyShardedDataParallel(module, auto_wrap_policy=policy, device_id=place)
    # The bound covers the shards, their gradients, and one of the eight units in full.
    assert torch.cuda.max_memory_allocated(place) - before < 2.4 * whole
    assert devices(model.parameters()) == {place}


@real_gpu
def test_a_gpu_without_a_number_is_the_current_one(place):
    with pytest.warns(UserWarning, match="does not have an explicit index"):
        model = runs.wrap(runs.model(CPU), place, device_id=torch.device("cuda"))
    assert model.compute_device == place


@real_gpu
def test_a_module_on_the_cpu_without_device_id_stays_and_can_be_moved(place, plain):
    with pytest.warns(UserWarning, match="The passed-in `module` is on CPU"):
        model = runs.wrap(runs.model(CPU), place, device_id=None)
    assert model.compute_device == CPU
    runs.train(model, CPU, steps=[0])
    fresh = runs.wrap(runs.model(CPU), place, device_id=CPU)
    fresh.to(place)
    assert devices(fresh.parameters()) == {fresh.compute_device} == {place}
    runs.close(runs.train(fresh, place), plain)


@real_gpu
def test_conversions_between_steps(place):
    model = runs.wrap(runs.model(place), place)
    runs.train(model, place, steps=[0])
    pointers = [p.data_ptr() for p in model.parameters()]
    model.cuda().to(place).float()
    assert [p.data_ptr() for p in model.parameters()] == pointers
    want = runs.train(model, place, steps=[1])
    back = runs.wrap(runs.model(place), place)
    runs.train(back, place, steps=[0])
    back.cpu()
    assert devices(back.parameters()) == {CPU}
    runs.close(runs.train(back, CPU, steps=[1]), want)


@real_gpu
def test_a_meta_module_is_made_on_the_gpu(place):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = fsdpc.FullyShardedDataParallel(module)
    assert model.compute_device == place == next(model.parameters()).device


@real_gpu
def test_a_module_on_two_devices(place):
    module = runs.model(CPU)
    module.head.to(place)
    with pytest.raises(RuntimeError, match="both CPU and GPU params"):
        fsdpc.FullyShardedDataParallel(module)
    model = fsdpc.FullyShardedDataParallel(module, device_id=place)
    assert devices(model.parameters()) == {place}


@real_gpu
def test_another_device_than_the_modules(place):
    with pytest.raises(ValueError, match="Inconsistent compute device and `device_id`"):
        fsdpc.FullyShardedDataParallel(runs.model(place), device_id=CPU)


@real_gpu
def test_values_of_rank_0_and_buffers(place):
    module = runs.model(CPU)
    module.register_buffer("offset", torch.ones(3))
    model = runs.wrap(module, place, sync_module_states=True)
    assert model.offset.device == place


# --- inputs --------------------------------------------------------------------------------------


@real_gpu
def test_inputs_on_the_cpu_are_moved(place, plain):
    model = runs.wrap(runs.model(place), place)
    inputs, _ = runs.batch(CPU, 0)
    there, _ = runs.batch(place, 0)
    assert torch.equal(model(inputs), model(there))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = runs.wrap(runs.model(place), place, "torch")
    assert isinstance(theirs, Torchs) and torch.allclose(theirs(inputs), model(inputs))


# --- state dicts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [False, True], ids=["device", "cpu"])
def test_model_state(place, offload):
    model = runs.wrap(runs.model(place), place)
    runs.train(model, place, steps=[0])
    config = fsdpc.FullStateDictConfig(offload_to_cpu=offload)
    kind = fsdpc.StateDictType.FULL_STATE_DICT
    with model.state_dict_type(model, kind, config):
        state = model.state_dict()
    assert devices(state.values()) == {CPU if offload else place}
    fresh = runs.wrap(runs.model(place), place)
    fresh.load_state_dict(state)
    want = runs.train(model, place, steps=[1])
    runs.close(runs.train(fresh, place, steps=[1]), want)


@pytest.mark.parametrize("offload", [False, True], ids=["device", "cpu"])
def test_optimizer_state(place, offload):
    model = runs.wrap(runs.model(place), place)
    optimizer = runs.adamw(model)
    runs.train(model, place, optimizer=optimizer, steps=[0, 1])
    kind = fsdpc.StateDictType.FULL_STATE_DICT
    config = fsdpc.FullOptimStateDictConfig(offload_to_cpu=offload)
    with model.state_dict_type(model, kind, None, config):
        state = fsdpc.FullyShardedDataParallel.optim_state_dict(model, optimizer)
        values = [v for s in state["state"].values() for v in s.values() if v.dim() > 0]
        assert devices(values) == {CPU if offload else place}
        fresh = runs.wrap(runs.model(place), place)
        fresh.load_state_dict(model.state_dict())
        other = runs.adamw(fresh)
        load = fsdpc.FullyShardedDataParallel.optim_state_dict_to_load(fresh, other, state)
    other.load_state_dict(load)
    moments = [s["exp_avg"] for s in other.state.values()]
    assert devices(moments) == {place}
    want = runs.train(model, place, optimizer=optimizer, steps=[2])
    runs.close(runs.train(fresh, place, optimizer=other, steps=[2]), want)


@pytest.mark.parametrize("offload", [False, True], ids=["device", "cpu"])
def test_summoned(place, offload):
    model = runs.wrap(runs.model(place), place)
    runs.train(model, place, steps=[0])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shown = fsdpc.FullyShardedDataParallel.summon_full_params(model, offload_to_cpu=offload)
        with shown, torch.no_grad():
            assert devices(model.parameters()) == {CPU if offload else place}
            for param in model.parameters():
                param.mul_(2)
    for name, p in model.named_parameters():
        assert torch.equal(p, 2 * before[name]) and p.device == place
