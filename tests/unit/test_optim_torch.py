"""Tests of Adam, AdamW and SGD against torch's fused kernels: bits, states, scaling, loading."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdpc import _C, optim

pytestmark = pytest.mark.usefixtures("one_thread")

# The sizes are multiples of every vector length of torch's kernels. torch would handle the last
# elements of tensors of other sizes with other code. The second size is larger than one part of
# fsdpc's kernels.
SIZES = (64, 32768 + 128)
STEPS = 4
ADAM = [
    {},
    {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1},
    {"amsgrad": True, "weight_decay": 0.1},
    {"maximize": True, "weight_decay": 0.1},
    {"betas": (0.3, 0.6), "amsgrad": True, "maximize": True},
    {"lr": torch.tensor(3e-3)},
    {"weight_decay": 0},
]
SGD = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.1},
    {"lr": torch.tensor(0.1), "weight_decay": 0.2},
]
CASES = [(name, options) for name in ("Adam", "AdamW") for options in ADAM]
CASES += [("SGD", options) for options in SGD]


def values(seed: int, dtype: torch.dtype, shape: Any = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (), generator=generator, dtype=torch.float64).to(dtype)


def parameters(dtype: torch.dtype, sizes: Any = SIZES) -> list[nn.Parameter]:
    return [nn.Parameter(values(i, dtype, (size,))) for i, size in enumerate(sizes)]


def set_grads(params: list[nn.Parameter], step: int, scale: float = 0.1) -> None:
    for i, param in enumerate(params):
        grad = values(100 * step + i, param.dtype, param.shape) * scale
        param.grad = None if (i, step) == (0, 1) else grad  # one parameter skips a step


def equal_states(ours: Any, theirs: Any) -> None:
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert state.keys() == ours["state"][number].keys()
        for name, value in state.items():
            assert torch.equal(ours["state"][number][name], value), (number, name)


def train(
    make: Callable[[Any], torch.optim.Optimizer],
    dtype: torch.dtype,
    steps: range = range(STEPS),
    *,
    found: float | None = None,
    scale: float | None = None,
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    params = parameters(dtype)
    optimizer = make(params)
    for step in steps:
        set_grads(params, step)
        if scale is not None:
            optimizer.grad_scale = torch.tensor(scale)
            optimizer.found_inf = torch.tensor(found if step == 2 else 0.0)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_equals_torchs_fused_step(name: str, options: dict[str, Any], dtype: torch.dtype):
    if name == "SGD" and dtype.itemsize == 2:
        pytest.skip("torch's fused SGD leaves 16-bit parameters unchanged")
    ours, mine = train(lambda p: getattr(optim, name)(p, **options), dtype)
    theirs, torchs = train(lambda p: getattr(torch.optim, name)(p, fused=True, **options), dtype)
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our, their)
    equal_states(mine.state_dict(), torchs.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sgd_of_16_bits_is_rounded_once(dtype: torch.dtype):
    params = parameters(dtype)
    optimizer = optim.SGD(params, lr=0.125)
    set_grads(params, 0)
    expected = [(p.double() - 0.125 * p.grad.double()).to(dtype) for p in params]
    optimizer.step()
    assert all(map(torch.equal, params, expected))


@pytest.mark.parametrize("scale", [1024.0, 3.0])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_loss_scaling(name: str, scale: float):
    """Gradients are divided by the scale, also in .grad, and a step with infinities is skipped."""
    options = {"lr": 0.01, **({"momentum": 0.9} if name == "SGD" else {})}
    both = [
        train(lambda p: getattr(optim, name)(p, **options), torch.float32, found=1.0, scale=scale),
        train(
            lambda p: getattr(torch.optim, name)(p, fused=True, **options),
            torch.float32,
            found=1.0,
            scale=scale,
        ),
    ]
    for ours, theirs in zip(both[0][0], both[1][0], strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours.grad, theirs.grad)
    equal_states(both[0][1].state_dict(), both[1][1].state_dict())


def test_grad_scaler_of_torch():
    param = nn.Parameter(values(0, torch.float32, (64,)))
    before = param.detach().clone()
    optimizer = optim.AdamW([param])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    (scaler.scale(param.sum()) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, before) and not optimizer.state[param].get("step", 0)
    optimizer.zero_grad()
    assert param.grad is None
    scaler.scale((param * 2).sum()).backward()
    scaler.step(optimizer, max_norm=1e9)
    assert torch.equal(param.grad, torch.full((64,), 8.0))  # as backward left it
    assert not torch.equal(param, before) and optimizer.last_norm == 16.0


@pytest.mark.parametrize(("name", "options"), [("AdamW", {"amsgrad": True}), ("SGD", SGD[1])])
def test_states_pass_to_torch_and_back(name: str, options: dict[str, Any]):
    def theirs(p: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(p, fused=True, **options)

    def ours(p: Any) -> torch.optim.Optimizer:  # torch's step reads `fused` from loaded options
        return getattr(optim, name)(p, fused=True, **options)

    results = []
    for first, second in ((theirs, theirs), (ours, theirs), (theirs, ours), (ours, ours)):
        params, optimizer = train(first, torch.float32, range(2))
        resumed = second(params)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        set_grads(params, 5)
        resumed.step()
        results.append([p.detach().clone() for p in params])
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


@pytest.mark.parametrize("simd", ["plain", "avx2", "avx512"])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_instruction_set_and_any_threads(monkeypatch, simd: str, threads: int):
    if simd not in _C.kernel_names():
        pytest.skip(f"this processor does not run {simd}")
    expected, _ = train(lambda p: optim.AdamW(p, amsgrad=True), torch.bfloat16)
    monkeypatch.setenv("FSDPC_SIMD", simd)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found, _ = train(lambda p: optim.AdamW(p, amsgrad=True), torch.bfloat16)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("layout", ["channels_last", "slice", "gradient"])
def test_memory_that_is_not_contiguous(layout: str):
    shape = (4, 6, 5, 5)
    start, grad = values(1, torch.float32, shape), values(2, torch.float32, shape)
    plain = nn.Parameter(start.clone())
    plain.grad = grad.clone()
    data = start.clone()
    if layout == "channels_last":
        data = data.to(memory_format=torch.channels_last)
    elif layout == "slice":
        data = torch.cat([data, data], dim=1)[:, :6]
    param = nn.Parameter(data)
    param.grad = grad.to(memory_format=torch.channels_last) if layout == "gradient" else grad
    for each in (plain, param):
        optim.AdamW([each], lr=0.1).step()
    assert torch.equal(plain, param) and not torch.equal(param, start)


def test_version_counters_rise():
    param = nn.Parameter(torch.ones(4))
    loss = (param * param).sum()
    loss.backward(retain_graph=True)
    optim.SGD([param], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_closure_groups_and_scheduler():
    params = parameters(torch.float32, (32, 32))
    optimizer = optim.AdamW([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)

    def closure() -> torch.Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss = sum(p.sum() for p in params)
        loss.backward()
        return loss

    before = [p.detach().clone() for p in params]
    assert optimizer.step(closure).item() == pytest.approx(float(sum(b.sum() for b in before)))
    schedule.step()
    assert calls == ["before", "closure", "after"]
    moved = [(b - p).mean().item() for b, p in zip(before, params, strict=True)]
    assert moved == pytest.approx([0.5, 0.1], rel=0.05)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.01])


def test_step_and_clip():
    params, theirs = parameters(torch.float32), parameters(torch.float32)
    ours, torchs = optim.AdamW(params), torch.optim.AdamW(theirs, fused=True)
    for step in range(3):
        set_grads(params, step)
        set_grads(theirs, step)
        expected = nn.utils.clip_grad_norm_(theirs, 0.5)
        norm = ours.step_and_clip(0.5)
        torchs.step()
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    for our, their in zip(params, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-6)


def test_norm_that_is_not_finite_reaches_the_parameters():
    param = nn.Parameter(torch.ones(64))
    param.grad = torch.ones(64)
    param.grad[3] = float("nan")
    assert optim.SGD([param], lr=1.0).step_and_clip(1.0).isnan()
    assert param.isnan().all()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda p: optim.AdamW(p, lr=-1), "Invalid learning rate: -1"),
        (lambda p: optim.AdamW(p, betas=(0.9, 1.0)), "Invalid beta parameter at index 1: 1.0"),
        (lambda p: optim.Adam(p, eps=-1), "Invalid epsilon value: -1"),
        (lambda p: optim.SGD(p, nesterov=True), "Nesterov momentum requires a momentum"),
        (lambda p: optim.AdamW(p, lr=torch.ones(2)), "Tensor lr must be 1-element"),
        (lambda p: optim.AdamW([]), "empty parameter list"),
        (lambda p: optim.AdamW(p, differentiable=True), "no differentiable steps"),
    ],
)
def test_arguments_are_refused(make: Callable[[Any], Any], error: str):
    with pytest.raises((ValueError, NotImplementedError), match=error):
        make(parameters(torch.float32))


def test_what_cannot_be_stepped_is_refused():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optim.AdamW(embedding.parameters()).step()
    away = nn.Parameter(torch.ones(3, device="meta"))
    away.grad = torch.ones(3, device="meta")
    with pytest.raises(NotImplementedError, match=r"memory and on CUDA GPUs; .*\(3,\) is on meta"):
        optim.AdamW([away]).step()


def test_a_step_that_raises_changes_nothing():
    """The C code checks all tensors before it changes any. Here the second step count has another
    type.
    """
    params = parameters(torch.float32, (32, 32))
    optimizer = optim.AdamW(params)
    set_grads(params, 0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    optimizer.state[params[1]]["step"] = torch.ones((), dtype=torch.float64)
    with pytest.raises(ValueError, match="the step of tensor 1 is not float32"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    assert optimizer.state[params[0]]["step"] == 1


@pytest.mark.parametrize("name", ["Adafactor", "Adam", "AdamW", "Muon", "SGD"])
def test_groups_have_torchs_options(name: str):
    """Checkpoints save the options that a constructor passes on: torch's options and, for Muon,
    some more.
    """
    params = [nn.Parameter(torch.zeros(4, 4))]
    more = {"Muon": {"adamw_lr", "adamw_betas", "adamw_eps", "adamw_weight_decay", "use_muon"}}
    theirs = getattr(torch.optim, name)(params, **({} if name != "SGD" else {"lr": 1e-3})).defaults
    assert getattr(optim, name)(params, lr=1e-3).defaults.keys() == {*theirs, *more.get(name, ())}
