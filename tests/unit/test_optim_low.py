"""Tests of Lion, AdamWBF16, AdamW8bit and AdamMini on plain tensors against their formulas."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from fsdpc import _C, optim
from fsdpc.optim import adam_mini
from fsdpc.optim._chunks import GuardedState, Store
from fsdpc.optim._host import HostStore
from fsdpc.plan.states import optimizer as planned

pytestmark = pytest.mark.usefixtures("one_thread")

N = 3 * 4096 + 300  # the last block of 256 is not whole


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one(dtype: torch.dtype = torch.float32, n: int = N) -> nn.Parameter:
    return nn.Parameter(values(0, n, dtype=dtype))


def run(optimizer: torch.optim.Optimizer, steps: int = 3, start: int = 0) -> None:
    for step in range(start, start + steps):
        for i, param in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            param.grad = values(10 * step + i, *param.shape).to(param.dtype)
        optimizer.step()


def test_sums_of_squares_of_blocks_on_a_gpu_are_those_of_the_processor():
    """The GPU's function works on any device, so the test passes host tensors. The function sums in
    one part or in several.
    """
    values = torch.randn(1000)
    for first, length, blocks in (
        (37, 64, 17),
        (0, 1, 1000),
        (5, 2000, 1),
        (0, 500, 2),
        (9, 400, 3),
    ):
        expected = torch.zeros(blocks, dtype=torch.float64)
        _C.optim_block_squares(values, first, length, expected)
        for wide in (100, 1 << 22):
            with mock.patch.object(adam_mini, "WIDE", wide):
                found = adam_mini.block_squares(values, first, length)
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    same = values.double()
    adam_mini.block_squares(same, 0, 10)
    assert torch.equal(same, values.double())


def test_lion_equals_its_formula():
    param, options = one(), {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    run(optim.Lion([param], **options))
    p, m = values(0, N), torch.zeros(N)
    for step in range(3):
        g = values(10 * step, N)
        p.mul_(1 - 1e-2 * 0.1)
        p.add_(m.clone().mul_(0.9).add_(g, alpha=1 - 0.9).sign_(), alpha=-1e-2)
        m.mul_(0.99).add_(g, alpha=1 - 0.99)
    assert torch.equal(param, p)


# --- stochastic rounding -------------------------------------------------------------------------


def test_rounding_is_unbiased_and_between_neighbours():
    """Parameters that move by less than half a unit of bfloat16 move by the right amount on
    average.
    """
    n = 1 << 20
    param = nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
    param.grad = torch.ones(n, dtype=torch.bfloat16)
    optim.AdamWBF16([param], lr=1e-3, weight_decay=0).step()  # 0.999 is between 0.9961 and 1
    below = 1 - 2**-8
    assert set(param.float().unique().tolist()) == {below, 1.0}
    # The standard deviation of the mean of n draws is 0.0039 * 0.44 / 1024.
    assert param.float().mean().item() == pytest.approx(0.999, abs=1e-5)
    nearest = nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
    nearest.grad = torch.ones(n, dtype=torch.bfloat16)
    optim.AdamWBF16([nearest], lr=1e-3, weight_decay=0, stochastic_rounding=False).step()
    assert (nearest == 1).all()


def test_random_bits_do_not_correlate():
    """The correlation of two series of random bits is less than 5 times the standard deviation of
    this correlation for independent bits. The test compares bits along the index, bits of two
    steps, bits of the parameter and of both states, and bits with each bit of the index.
    """
    n = 1 << 18
    rounded = []
    param = nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
    optimizer = optim.AdamWBF16([param], lr=2**-9, weight_decay=0, betas=(0.5, 0.5))
    for _ in range(3):
        with torch.no_grad():
            param.fill_(1)
        param.grad = torch.full((n,), 1 + 2**-7, dtype=torch.bfloat16)
        optimizer.state.clear()
        optimizer.state[param].update(
            step=torch.tensor(float(len(rounded) // 3)),
            exp_avg=torch.ones(n, dtype=torch.bfloat16),
            exp_avg_sq=torch.ones(n, dtype=torch.bfloat16),
        )
        optimizer.step()
        state = optimizer.state[param]
        for value in (param.detach(), state["exp_avg"], state["exp_avg_sq"]):
            bits = value.float()
            assert len(bits.unique()) == 2
            rounded.append((bits - bits.mean()) / bits.std())
    index = torch.arange(n)
    others = [(index >> k & 1).float() * 2 - 1 for k in range(18)]
    for i, x in enumerate(rounded):
        pairs = [(x, y) for y in rounded[:i] + others]
        pairs += [(x[:-lag], x[lag:]) for lag in (1, 2, 3, 7, 16, 64, 256, 1024, 65536)]
        for a, b in pairs:
            assert abs((a * b).mean().item()) < 5 / len(a) ** 0.5


@pytest.mark.parametrize("change", [{"seed": 1}, {"order": True}])
def test_random_bits_depend_on_seed_and_parameter(change: dict[str, Any]):
    def trained(seed: int = 0, order: bool = False) -> torch.Tensor:
        params = [one(torch.bfloat16), one(torch.bfloat16)]
        for param in params:
            param.grad = torch.ones_like(param)
        optim.AdamWBF16(params[::-1] if order else params, seed=seed).step()
        return params[0].detach()

    assert torch.equal(trained(), trained())
    assert not torch.equal(trained(), trained(**change))


def test_bfloat16_states_of_float32_parameters():
    param = one()
    optimizer = optim.AdamWBF16([param])
    run(optimizer)
    state = optimizer.state[param]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    exact = one()
    run(torch.optim.AdamW([exact]))
    torch.testing.assert_close(param, exact, rtol=0, atol=2e-4)
    resumed = optim.AdamWBF16([nn.Parameter(param.detach().clone())])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, 1, 3)
    run(resumed, 1, 3)
    assert torch.equal(resumed.param_groups[0]["params"][0], param)


# --- 8 bits --------------------------------------------------------------------------------------


def dynamic_map(signed: bool) -> np.ndarray:
    """Return the 256 values of dynamic quantisation, sorted."""
    found = [0.0, 1.0]
    for decade in range(7):
        cells = 2 ** (decade if signed else decade + 1)
        edges = np.linspace(0.1, 1, cells + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
        found += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(found))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("simd", ["plain", "avx2", "avx512"])
def test_quantises_to_the_nearest_code(monkeypatch, which: int, simd: str):
    if simd not in _C.kernel_names():
        pytest.skip(f"this processor does not run {simd}")
    monkeypatch.setenv("FSDPC_SIMD", simd)
    n = 1 << 16
    exponents = torch.rand(n, generator=torch.Generator().manual_seed(1)) * 9 - 9
    x = (10**exponents) * (values(2, n).sign() if which == 0 else 1)
    x[::256] = 1.0  # every block has the scale 1
    codes = torch.empty(n, dtype=torch.uint8)
    scales = torch.empty(n // 256)
    back = torch.empty(n)
    _C.optim_quantise(which, x, 0, codes, scales)
    _C.optim_dequantise(which, back, 0, codes, scales)
    assert (scales == 1).all()
    table = dynamic_map(which == 0)
    torch.testing.assert_close(
        back.double(), torch.from_numpy(table[codes.numpy()]).double(), rtol=1e-6, atol=0
    )
    tried = slice(0, 1 << 12)
    nearest = np.abs(table[None, :] - x.double().numpy()[tried, None]).argmin(axis=1)
    wrong = nearest != codes.numpy()[tried]
    if which == 1:  # only zero gets the code of zero
        assert (codes[x > 0] > 0).all()
        wrong &= x.numpy()[tried] > 1.625e-7
    assert wrong.sum() <= 1  # one value may lie midway between two codes
    again = torch.empty_like(codes)
    _C.optim_quantise(which, back, 0, again, scales)
    assert torch.equal(again, codes)


def test_8bit_follows_adamw():
    param, exact = one(), one()
    run(optim.AdamW8bit([param], lr=1e-3), 10)
    run(torch.optim.AdamW([exact], lr=1e-3), 10)
    moved = (exact - values(0, N)).norm()
    assert (param - exact).norm() < 0.05 * moved
    small, same = one(n=4000), one(n=4000)
    run(optim.AdamW8bit([small]))
    run(optim.AdamW([same]))
    assert torch.equal(small, same)


def test_8bit_resumes_to_the_bit_and_opens_in_torch():
    param = one()
    optimizer = optim.AdamW8bit([param])
    run(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["exp_avg"].shape == param.shape
    other = nn.Parameter(param.detach().clone())
    torchs = torch.optim.AdamW([nn.Parameter(param.detach().clone())])
    torchs.load_state_dict(copy.deepcopy(saved))
    resumed = optim.AdamW8bit([other])
    resumed.load_state_dict(saved)
    for each in (optimizer, resumed, torchs):
        run(each, 1, 3)
    assert torch.equal(param, other)
    torch.testing.assert_close(torchs.param_groups[0]["params"][0], param, rtol=0, atol=1e-5)
    again = resumed.state_dict()["state"][0]
    for name, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(again[name], value), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_8bit_shows_what_is_not_finite(bad: float):
    param = one()
    optimizer = optim.AdamW8bit([param])
    run(optimizer, 1)
    param.grad = torch.zeros(N)
    param.grad[300] = bad
    optimizer.step()
    run(optimizer, 1, 5)
    assert param[256:512].isnan().all() and param[:256].isfinite().all()


@pytest.mark.parametrize("make", [optim.AdamWBF16, optim.AdamW8bit, "AdamMini"])
def test_states_of_torchs_adamw_load(make: Any):
    """Loading torch's states keeps the values of options that the groups of torch's AdamW do not
    have.
    """
    theirs, mine = one(), one()
    torchs = torch.optim.AdamW([theirs], lr=1e-3)
    run(torchs)
    with torch.no_grad():
        mine.copy_(theirs)
    if make == "AdamMini":
        optimizer: Any = optim.AdamMini([mine], block=lambda *_: 1)
    else:
        optimizer = make([mine], lr=0.5)
    optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
    run(optimizer, 1, 3)
    run(torchs, 1, 3)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-4)


def test_amsgrad_is_refused_where_the_class_has_none():
    param = one(n=64)
    torchs = torch.optim.AdamW([param], amsgrad=True)
    run(torchs, 1)
    saved = torchs.state_dict()
    optimizer = optim.AdamWBF16([param])
    run(optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"AdamWBF16 has no amsgrad.*= False.*fsdpc.optim.AdamW,"):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(ValueError, match="has no amsgrad"):
        optim.AdamWBF16([{"params": [param], "amsgrad": True}])
    optimizer.param_groups[0]["amsgrad"] = True
    for table in (optimizer._table, None):
        optimizer._table = table
        with pytest.raises(ValueError, match="has no amsgrad"):
            run(optimizer, 1)
    saved["param_groups"][0]["amsgrad"] = False
    optimizer.load_state_dict(saved)
    run(optimizer, 3)
    assert optimizer._table is not None


def test_every_way_to_offloaded_states_waits_for_them():
    waits: list[int] = []

    class Finishing(Store):
        def __init__(self) -> None:
            pass

        def finish(self) -> None:
            waits.append(1)

    own = {"step": 1}
    for use in (
        dict,
        lambda s: {**s},
        lambda s: s.copy(),
        copy.copy,
        lambda s: {"k": s.setdefault("k", {})},
        lambda s: {"k": s.pop("k")},
        lambda s: dict([s.popitem()]),
    ):
        waits.clear()
        assert use(GuardedState({"k": own}, Finishing())) == {"k": own} and waits


def test_an_optimizer_with_states_of_a_gpu_is_not_copied():
    optimizer = optim.AdamW([one(n=4)])
    optimizer._store = HostStore(optim.Host(), "AdamW")
    with pytest.raises(NotImplementedError, match="AdamW with offload=Host.*load this one's state"):
        copy.deepcopy(optimizer)


def test_deepcopy_and_pickle():
    param = one()
    optimizer = optim.AdamW8bit([param])
    run(optimizer, 1)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        run(other, 1, 1)
        found = other.param_groups[0]["params"][0]
        assert found is not param and not torch.equal(found, param)
    run(optimizer, 1, 1)
    assert torch.equal(found, param)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors in the states, without step counts."""
    found, todo = 0, list(optimizer.state.values())
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += [v for name, v in value.items() if name != "step"]
        elif isinstance(value, list):
            todo += value
        else:
            found += value.numel() * value.element_size()
    return found


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (optim.AdamW, 8 * 65536),
        (lambda p: optim.SGD(p, momentum=0.9), 4 * 65536),
        (optim.Lion, 4 * 65536),
        (optim.AdamWBF16, 4 * 65536),
        (optim.AdamW8bit, 2 * 65536 + 2 * 4 * 256),
        (lambda p: optim.AdamMini(p, block=lambda *_: 256), 4 * 65536 + 4 * 256),
    ],
    ids=["AdamW", "SGD", "Lion", "AdamWBF16", "AdamW8bit", "AdamMini"],
)
def test_bytes_of_states(make: Any, expected: int):
    optimizer = make([one(n=65536)])
    run(optimizer, 1)
    assert state_bytes(optimizer) == expected


@pytest.mark.parametrize(
    ("name", "make", "dtype"),
    [
        ("adamw-fused", optim.AdamW, torch.float32),
        ("adamw-fused", optim.AdamW, torch.bfloat16),
        ("momentum", lambda p: optim.SGD(p, momentum=0.9), torch.float32),
        ("sgd", lambda p: optim.SGD(p, lr=0.1), torch.float32),
        ("lion", optim.Lion, torch.bfloat16),
        ("adamw-bf16", optim.AdamWBF16, torch.float32),
        ("adamw-bf16", optim.AdamWBF16, torch.bfloat16),
        ("adamw8bit", optim.AdamW8bit, torch.bfloat16),
    ],
)
def test_bytes_are_the_planners(name: str, make: Any, dtype: torch.dtype):
    param = one(dtype, n=65536)
    run(optimizer := make([param]), 1)
    expected = planned(name).state_bytes(param.element_size()) * param.numel()
    assert state_bytes(optimizer) == expected


# --- Adam-mini -----------------------------------------------------------------------------------

NAMED = {
    "embed.weight": (50, 16),
    "attn.q_proj.weight": (32, 16),
    "attn.v_proj.weight": (8, 16),
    "mlp.up.weight": (24, 16),
    "mlp.up.bias": (24,),
    "norm.weight": (16,),
}
BLOCKS = {"embed.weight": 16, "attn.q_proj.weight": 128, "attn.v_proj.weight": 16}
BLOCKS |= {"mlp.up.weight": 16, "mlp.up.bias": 1, "norm.weight": 16}


def test_mini_equals_its_formula():
    params = {name: nn.Parameter(values(i, *s)) for i, (name, s) in enumerate(NAMED.items())}
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = optim.AdamMini(params.items(), head_dim=8, **options)
    run(optimizer)
    for i, (name, shape) in enumerate(NAMED.items()):
        p = values(i, *shape).double()
        m, v = torch.zeros_like(p), torch.zeros(p.numel() // BLOCKS[name], 1).double()
        for step in range(3):
            g = values(10 * step + i, *shape).double()
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * (g * g).view(-1, BLOCKS[name]).mean(1, keepdim=True)
            root = (v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            update = (m / (1 - 0.9 ** (step + 1))).view(-1, BLOCKS[name]) / root
            p = p * (1 - 1e-3) - 1e-2 * update.view(shape)
        torch.testing.assert_close(params[name].double(), p, rtol=1e-5, atol=1e-6)
    resumed = optim.AdamMini(
        [(name, nn.Parameter(p.detach().clone())) for name, p in params.items()],
        head_dim=8,
        **options,
    )
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, 1, 3)
    run(resumed, 1, 3)
    for mine, theirs in zip(params.values(), resumed.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, theirs)


def test_mini_warns_of_a_name_without_a_rule():
    names = {"mlp.up.weight": (8, 4), "norm.scale": (8,), "mixer": (8, 4), "other": (8, 4)}
    params = [(name, nn.Parameter(values(0, *shape))) for name, shape in names.items()]
    with pytest.warns(UserWarning, match="no rule of the published code knows 'mixer'") as found:
        run(optim.AdamMini(params), 2)
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(optim.AdamMini(params[:2]), 1)
        run(optim.AdamMini(params, block=lambda name, shape: shape[-1]), 1)


@pytest.mark.parametrize(
    ("params", "options", "error"),
    [
        ([("q_proj.weight", (32, 16))], {}, "head_dim=, a divisor of 32"),
        ([("q_proj.weight", (32, 16))], {"head_dim": 5}, "head_dim=, a divisor of 32"),
        ([(None, (4, 4))], {}, "needs the name"),
        ([("x", (4, 4))], {"block": lambda *_: 0}, "at least 1"),
    ],
)
def test_mini_refuses_to_guess(params: Any, options: dict[str, Any], error: str):
    made = [(name, nn.Parameter(values(0, *shape))) for name, shape in params]
    optimizer = optim.AdamMini([p for _, p in made] if made[0][0] is None else made, **options)
    with pytest.raises(ValueError, match=error):
        run(optimizer, 1)
