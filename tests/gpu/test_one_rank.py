"""Tests of the whole engine on a group of one rank. With any options, the losses must be the plain
model's.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import runs
import torch
from torch import nn

import fsdpc
from fsdpc import _probe
from fsdpc._fsdp2.quantized import CODECS


@pytest.fixture
def place(device, group) -> torch.device:
    """Return the device for the models. This fixture also starts the process group."""
    return device.device


@pytest.fixture(scope="module")
def plain(device) -> list[float]:
    """The losses of the unsharded model."""
    return runs.train(runs.model(device.device), device.device)


def test_runs_on_the_gpu(place):
    model = runs.wrap(runs.model(place), place)
    runs.train(model, place, steps=[0])
    assert all(parameter.device == place for parameter in model.parameters())
    assert fsdpc.memory_stats(model)


def test_losses_are_the_plain_models(place, plain):
    runs.close(runs.train(runs.wrap(runs.model(place), place), place), plain)


@pytest.mark.parametrize("orig", [True, False], ids=["original", "flat"])
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", None])
@pytest.mark.parametrize("forward", [True, False], ids=["forward_prefetch", "no_forward_prefetch"])
def test_prefetch(place, plain, prefetch, forward, orig):
    mode = fsdpc.BackwardPrefetch[prefetch] if prefetch else None
    model = runs.wrap(
        runs.model(place),
        place,
        backward_prefetch=mode,
        forward_prefetch=forward,
        limit_all_gathers=not forward,
        use_orig_params=orig,
    )
    runs.close(runs.train(model, place), plain)


@pytest.mark.parametrize("strategy", list(fsdpc.ShardingStrategy)[:3], ids=lambda s: s.name)
def test_strategies(place, plain, strategy):
    model = runs.wrap(runs.model(place), place, sharding_strategy=strategy)
    runs.close(runs.train(model, place), plain)


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bf16_is_as_fsdp1(place, reduce):
    def losses(library: str) -> list[float]:
        module = __import__("fsdpc") if library == "fsdpc" else torch.distributed.fsdp
        precision = module.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        model = runs.wrap(runs.model(place), place, library, mixed_precision=precision)
        return runs.train(model, place)

    # On a GPU the libraries may run different kernels, so losses may differ by bf16's roundings.
    runs.close(losses("fsdpc"), losses("torch"), 2e-3 if place.type == "cpu" else 1e-2)


def test_no_sync(place):
    want = runs.train(runs.model(place), place, micro=3)
    model = runs.wrap(runs.model(place), place)
    runs.close(runs.train(model, place, micro=3, no_sync=model.no_sync), want)


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
def test_clip(place, norm_type):
    norms: dict[str, list[torch.Tensor]] = {"plain": [], "fsdpc": []}
    plain_model = runs.model(place)
    want = runs.train(
        plain_model,
        place,
        before_step=lambda module: norms["plain"].append(
            nn.utils.clip_grad_norm_(module.parameters(), 0.1, norm_type)
        ),
    )
    model = runs.wrap(runs.model(place), place)
    got = runs.train(
        model,
        place,
        before_step=lambda module: norms["fsdpc"].append(module.clip_grad_norm_(0.1, norm_type)),
    )
    runs.close(got, want, 1e-5)
    torch.testing.assert_close(norms["fsdpc"], norms["plain"], rtol=1e-5, atol=1e-7)


def test_cpu_offload(place, plain):
    model = runs.wrap(runs.model(place), place, cpu_offload=fsdpc.CPUOffload(offload_params=True))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    runs.close(runs.train(model, place), plain, 1e-5)


def test_state_dict_goes_on(place):
    """The state dict of a model after two steps is loaded into a model with other weights. The next
    losses of both models are the same."""
    model = runs.wrap(runs.model(place), place)
    optimizer = runs.adamw(model)
    runs.train(model, place, optimizer=optimizer, steps=range(2))
    saved = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    moments = copy.deepcopy(fsdpc.FSDP.optim_state_dict(model, optimizer))
    want = runs.train(model, place, optimizer=optimizer, steps=range(2, 4))

    other = runs.model(place)
    assert saved.keys() == other.state_dict().keys()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    fresh = runs.wrap(other, place)
    fresh.load_state_dict(saved)
    other_optimizer = runs.adamw(fresh)
    loadable = fsdpc.FSDP.optim_state_dict_to_load(fresh, other_optimizer, moments)
    other_optimizer.load_state_dict(loadable)
    runs.close(runs.train(fresh, place, optimizer=other_optimizer, steps=range(2, 4)), want)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing(place, plain, reentrant):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpointing

    kinds = checkpointing.CheckpointImpl
    model = runs.wrap(runs.model(place), place)
    checkpointing.apply_activation_checkpointing(
        model,
        lambda module: checkpointing.checkpoint_wrapper(
            module, checkpoint_impl=kinds.REENTRANT if reentrant else kinds.NO_REENTRANT
        ),
        check_fn=lambda module: isinstance(module, runs.Block),
    )
    runs.close(runs.train(model, place), plain)


def test_side_stream(place, plain, device):
    """Two steps run inside torch.cuda.stream, and further steps run outside of that stream."""
    model = runs.wrap(runs.model(place), place)
    optimizer = runs.adamw(model)
    device.synchronize()
    with device.side_stream():
        losses = runs.train(model, place, optimizer=optimizer, steps=range(2))
    device.synchronize()
    losses += runs.train(model, place, optimizer=optimizer, steps=range(2, runs.STEPS))
    runs.close(losses, plain)


def test_a_stream_per_step(place, plain, device):
    """Each step has its own stream, which waits for the stream before it. The host waits for no
    stream."""
    model = runs.wrap(runs.model(place), place)
    optimizer = runs.adamw(model)
    losses = []
    for step in range(runs.STEPS):
        with ordered_side_stream(device):
            losses += runs.train(model, place, optimizer=optimizer, steps=[step])
    runs.close(losses, plain)


@contextlib.contextmanager
def ordered_side_stream(device):
    """Run a body on a side stream, which waits for the current stream. Then the current stream
    waits for the side stream."""
    if device.dry:
        yield
        return
    outer, inner = torch.cuda.current_stream(), torch.cuda.Stream()
    inner.wait_stream(outer)
    with torch.cuda.stream(inner):
        yield
    outer.wait_stream(inner)


def test_frozen_and_unused(place):
    """Neither frozen nor unused parameters get a gradient; the others get the plain model's."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.toy = runs.model(torch.device("cpu"))
            self.unused = nn.Linear(7, 7)
            self.toy.embed.weight.requires_grad_(False)

        def forward(self, tokens):
            return self.toy(tokens)

    want = runs.train(Odd().to(place), place)
    runs.close(runs.train(runs.wrap(Odd(), place), place), want)


def test_summon(place):
    model = runs.wrap(runs.model(place), place)
    want = {name: value.detach().cpu() for name, value in runs.model(place).named_parameters()}
    with fsdpc.FSDP.summon_full_params(model):
        got = {
            name: value.detach().cpu().clone() for name, value in model.module.named_parameters()
        }
    cleaned = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in got.items()}
    assert cleaned.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(cleaned[name], value), name


def test_dropped_models_give_memory_back(place, device):
    import gc

    def once() -> int:
        runs.train(runs.wrap(runs.model(place), place), place, steps=[0])
        gc.collect()
        device.synchronize()
        return device.memory()["allocated"]

    once()
    assert once() == once()


def test_moves_a_cpu_module_to_the_gpu(place):
    model = runs.wrap(runs.model(torch.device("cpu")), place)
    assert {parameter.device for parameter in model.parameters()} == {place}
    runs.train(model, place, steps=[0])


@pytest.mark.parametrize("codec", CODECS)
def test_gathered_codes_are_the_processors(place, codec):
    """Weights that are gathered as codes are bitwise the values that the CPU's codec gives. The
    last block of a row is not full."""
    torch.manual_seed(0)
    layer = nn.Linear(333, 65, bias=False)
    weight = layer.weight.detach().clone().numpy()
    expected = torch.empty(65, 333)
    _probe.codec_round(codec, weight, "float32", 333, expected.numpy(), "float32")
    fsdpc.fully_shard(layer.to(place), mp_policy=fsdpc.QuantizedPolicy(codec=codec))
    layer.unshard()
    assert torch.equal(layer.weight.detach().cpu(), expected)
    layer.reshard()
