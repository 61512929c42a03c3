"""Tests of Adafactor, SOAP and Shampoo on plain tensors: the same bits as torch's, the formulas,
and options.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_muon import STEPS, equal, named, parameters, run
from torch import Tensor, nn

from fsdpc import optim

pytestmark = pytest.mark.usefixtures("one_thread")

ANY = ((37, 131), (131, 37), (61,), (), (3, 5, 7), (1, 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": torch.tensor(0.5), "weight_decay": 0.1, "maximize": True, "d": 1.5},
        {"eps": (1e-8, 1e-2), "beta2_decay": -0.5},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adafactor_equals_torch(options, dtype):
    """fsdpc's and torch's steps are equal, and each class can continue from the states of the other
    class.
    """
    mine, other = parameters(ANY, dtype), parameters(ANY, dtype)
    ours, theirs = optim.Adafactor(mine, **options), torch.optim.Adafactor(other, **options)
    run(mine, ours)
    run(other, theirs)
    assert equal(mine, other)
    for a, b in zip(mine, other, strict=True):
        assert ours.state[a].keys() == theirs.state[b].keys()
        assert all(torch.equal(v, theirs.state[b][k]) for k, v in ours.state[a].items())
    back, forth = torch.optim.Adafactor(mine), optim.Adafactor(other)
    back.load_state_dict(ours.state_dict())
    forth.load_state_dict(theirs.state_dict())
    run(mine, back, steps=range(STEPS, STEPS + 2))
    run(other, forth, steps=range(STEPS, STEPS + 2))
    assert equal(mine, other)


@pytest.mark.parametrize("kind", ["Adafactor", "SOAP", "Shampoo"])
@pytest.mark.parametrize("split", [[20, 12, 5], (1, [100, 31])])
def test_parts_are_parameters_of_their_own(kind, split):
    dim, sizes = split if isinstance(split, tuple) else (0, split)
    [(name, fused)] = named(a__weight=(37, 131))
    others = [nn.Parameter(each.clone()) for each in fused.detach().split(sizes, dim)]
    ours = getattr(optim, kind)([(name, fused)], split={"a": split})
    theirs = getattr(optim, kind)(others)
    for step in range(STEPS + 1):
        if step == STEPS:
            saved = copy.deepcopy(ours).state_dict()
            ours = getattr(optim, kind)([(name, fused)], split={"a": split})
            ours.load_state_dict(saved)
        run([fused], ours, steps=[step])
        for each, grad in zip(others, fused.grad.split(sizes, dim), strict=True):
            each.grad = grad.contiguous()
        theirs.step()
        assert equal(fused.detach().split(sizes, dim), others)


def soap(values: Tensor, grads: list[Tensor], every: int) -> Tensor:
    """Return the values after steps of SOAP's published rule, computed from its formulas."""
    w, beta, lr = values, 0.95, 0.01
    m = v = left = right = torch.zeros((), dtype=torch.float64)
    for t, g in enumerate(grads, 1):
        left = beta * left + (1 - beta) * g @ g.T
        right = beta * right + (1 - beta) * g.T @ g
        if t == 1:
            ql, qr = (torch.linalg.eigh(each)[1].flip(1) for each in (left, right))
        m = beta * m + (1 - beta) * g
        v = beta * v + (1 - beta) * (ql.T @ g @ qr) ** 2
        hat = (ql.T @ m @ qr / (1 - beta**t)) / ((v / (1 - beta**t)).sqrt() + 1e-8)
        w = w - lr * (0.1 * w + ql @ hat @ qr.T)
        if t % every == 0:
            ql, qr = (torch.linalg.qr(a @ q)[0] for a, q in ((left, ql), (right, qr)))
    return w


def shampoo(values: Tensor, grads: list[Tensor], every: int) -> Tensor:
    w, lr, beta1, beta2 = values, 0.01, 0.9, 0.999
    m = v = left = right = torch.zeros((), dtype=torch.float64)

    def root(a: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(a)
        powers = (values.clamp(min=0) + 1e-6 * values[-1]) ** -0.25
        return vectors @ torch.diag(powers) @ vectors.T

    for t, g in enumerate(grads, 1):
        left = beta2 * left + (1 - beta2) * g @ g.T
        right = beta2 * right + (1 - beta2) * g.T @ g
        if t == 1 or t % every == 0:
            roots = [root(each / (1 - beta2**t)) for each in (left, right)]
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        adam = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
        u = roots[0] @ m @ roots[1]
        w = w - lr * (0.1 * w + u * adam.norm() / u.norm())
    return w


@pytest.mark.parametrize("rule", [soap, shampoo])
def test_formulas(rule):
    """Steps in float64 on square matrices equal the formulas. No two eigenvalues of these matrices
    are equal, so the eigenvectors are unique up to sign.
    """
    numbers = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.2, 2, 12)[:, None] * torch.linspace(0.3, 1, 12)
    grads = [(torch.randn(12, 12, generator=numbers) * scale).double() for _ in range(12)]
    param = nn.Parameter(torch.randn(12, 12, generator=numbers).double())
    expected = rule(param.detach().clone(), grads, 3)
    more: dict[str, Any] = {"eps": 1e-6} if rule is shampoo else {}
    kind = optim.SOAP if rule is soap else optim.Shampoo
    optimizer = kind([param], lr=0.01, weight_decay=0.1, precondition_frequency=3, **more)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(param.detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [optim.SOAP, optim.Shampoo])
def test_large_sides_are_left_alone(kind):
    """A side that is too large has no factor. If both sides are too large, the rule is AdamW's."""
    shapes = [(37, 131), (131, 37)]
    ours = kind(parameters(shapes), max_precondition_dim=40)
    run(ours.param_groups[0]["params"], ours)
    kept = [{k: tuple(v.shape) for k, v in s.items() if v.dim()} for s in ours.state.values()]
    last = kind._kept
    assert kept[0] == {"exp_avg": (37, 131), "exp_avg_sq": (37, 131)} | {
        name: (37, 37) for name in ("left", f"left_{last}")
    }
    assert kept[1].keys() - kept[0].keys() == {"right", f"right_{last}"}
    mine, other = parameters(shapes), parameters(shapes)
    options = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    run(mine, kind(mine, max_precondition_dim=10, **options))
    run(other, optim.AdamW(other, **options))
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [optim.SOAP, optim.Shampoo])
def test_other_parameters_are_stepped_by_adamw(kind):
    mine = named(embed__weight=(37, 12), norm__weight=(12,))
    other = [value for _, value in named(embed__weight=(37, 12), norm__weight=(12,))]
    more = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.02}
    ours = kind(mine, lr=0.1, adamw_lr=0.01, **{f"adamw_{k}": v for k, v in more.items()})
    assert not ours.matrix_shapes()
    run([value for _, value in mine], ours)
    run(other, optim.AdamW(other, lr=0.01, **more))
    assert equal([value for _, value in mine], other)
    groups = [
        {"params": parameters([(5, 4)]), "use_" + kind.__name__.lower(): True},
        {"params": parameters([(6, 4)]), "use_" + kind.__name__.lower(): False, "lr": 0.1},
    ]
    assert len(kind(groups).matrix_shapes()) == 1


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("Adafactor", {"lr": -1.0}, "Learning rate should be >= 0"),
        ("Adafactor", {"beta2_decay": 0.1}, "beta2_decay should be <= 0"),
        ("Adafactor", {"eps": (-1.0, 0.0)}, "epsilon1"),
        ("Adafactor", {"eps": (None, -1.0)}, "epsilon2"),
        ("Adafactor", {"d": 0.5}, "threshold d"),
        ("Adafactor", {"weight_decay": -0.5}, "weight_decay"),
        ("Adafactor", {"lr": torch.ones(2)}, "1-element"),
        ("SOAP", {"betas": (1.0, 0.9)}, "beta parameter"),
        ("SOAP", {"shampoo_beta": 1.0}, "shampoo_beta"),
        ("SOAP", {"precondition_frequency": 0}, "precondition_frequency"),
        ("Shampoo", {"max_precondition_dim": 0}, "max_precondition_dim"),
        ("Shampoo", {"grafting_eps": -1.0}, "grafting_eps"),
    ],
)
def test_options_out_of_range(kind, options, text):
    with pytest.raises(ValueError, match=text):
        getattr(optim, kind)(parameters(), **options)


@pytest.mark.parametrize("kind", [optim.Adafactor, optim.SOAP, optim.Shampoo])
def test_refused(kind, tmp_path):
    for option, text in (("masters", "no master"), ("checksum", "Leave checksum=True away")):
        with pytest.raises(NotImplementedError, match=text):
            kind(parameters(), offload=optim.Disk(tmp_path, **{option: True}))
    ours = kind(parameters([(4, 3)]))
    [param] = ours.param_groups[0]["params"]
    run([param], ours)
    lost = next(key for key, value in ours.state[param].items() if value.dim())
    del ours.state[param][lost]
    with pytest.raises(RuntimeError, match="are at another rank"):
        run([param], ours)
    with pytest.raises(RuntimeError, match="complex"):
        odd = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
        odd.grad = torch.ones_like(odd)
        kind([odd]).step()
