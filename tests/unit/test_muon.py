"""Tests of Muon on plain tensors: steps equal those of torch's class to the bit, and which
parameters are matrices.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fsdpc import optim
from fsdpc._companions.matrices import Matrix, deal, rounds_of
from fsdpc.optim._matrices import move
from fsdpc.optim._owned import Member, Piece

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((37, 131), (131, 37), (64, 64), (1, 7), (7, 1))
STEPS = 4
FIRST = range(STEPS)


def parameters(shapes: Any = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    numbers = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=numbers).to(dtype)) for s in shapes]


def run(params: Any, *optimizers: Any, steps: Any = FIRST) -> None:
    params = list(params)
    for step in steps:
        numbers = torch.Generator().manual_seed(step + 1)
        for param in params:
            param.grad = torch.randn(param.shape, generator=numbers).to(param.dtype)
        for optimizer in optimizers:
            optimizer.step()


def equal(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": torch.tensor(0.02), "nesterov": False, "weight_decay": 0.0},
        {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.6, "ns_steps": 3},
        {"eps": 1e-3, "ns_coefficients": (3.0, -4.0, 2.0), "adjust_lr_fn": "original"},
    ],
)
def test_equals_torch(options):
    """fsdpc's and torch's steps are equal, and each class can continue from the states of the other
    class.
    """
    mine, other = parameters(), parameters()
    ours, theirs = optim.Muon(mine, **options), torch.optim.Muon(other, **options)
    run(mine, ours)
    run(other, theirs)
    assert equal(mine, other)
    for a, b in zip(mine, other, strict=True):
        assert ours.state[a].keys() == {"momentum_buffer"}
        assert torch.equal(ours.state[a]["momentum_buffer"], theirs.state[b]["momentum_buffer"])
    back, forth = torch.optim.Muon(mine), optim.Muon(other)
    back.load_state_dict(ours.state_dict())
    forth.load_state_dict(theirs.state_dict())
    run(mine, back, steps=range(STEPS, STEPS + 2))
    run(other, forth, steps=range(STEPS, STEPS + 2))
    assert equal(mine, other)


def test_goes_back_to_an_earlier_state():
    """Loading an earlier state restores the options, too: the options of the loaded groups replace
    the current ones.
    """
    mine, other = parameters(), parameters()
    ours, theirs = optim.Muon(mine, lr=0.02), torch.optim.Muon(other, lr=0.02)
    saved = [copy.deepcopy(each.state_dict()) for each in (ours, theirs)]
    for params, optimizer, early in ((mine, ours, saved[0]), (other, theirs, saved[1])):
        run(params, optimizer)
        optimizer.load_state_dict(early)
        optimizer.param_groups[0]["lr"] = 0.5
        run(params, optimizer)
    assert equal(mine, other)
    ours.add_param_group({"params": parameters([(3, 4)]), "momentum": 0.5})
    run([p for group in ours.param_groups for p in group["params"]], ours)


def test_narrow_parameters_and_wide_iterations():
    """In bfloat16, steps are only close to torch's, because torch rounds the learning rate to
    bfloat16 on CPUs. In float32, the iteration equals the formula.
    """
    mine, other = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    run(mine, optim.Muon(mine, lr=0.02))
    run(other, torch.optim.Muon(other, lr=0.02))
    for a, b in zip(mine, other, strict=True):
        assert torch.equal(a, b) or (a - b).norm() < 2e-3 * b.norm()
    wide = parameters()
    before = [param.detach().clone() for param in wide]
    run(wide, optim.Muon(wide, lr=1.0, weight_decay=0.0, ns_dtype=torch.float32), steps=[0])
    for param, old in zip(wide, before, strict=True):
        rows, columns = param.shape
        x = param.grad.double() / param.grad.double().norm()  # the first update's direction
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        moved = (old - param).detach().double() / math.sqrt(max(1, rows / columns))
        torch.testing.assert_close(moved, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_do_not_depend_on_where_a_piece_ends(dtype):
    """If torch adds tensors of a narrow dtype, the result of an element near the end of the tensor
    depends on the element's place. fsdpc's updates must not depend on where a piece ends.
    """
    [param] = parameters([(300, 129)], dtype)
    [group] = optim.Muon([param], lr=0.02).param_groups
    for widths in ((129,), (100, 29)):
        matrix = Matrix(0, 300, 129, widths)
        member, factors = Member(param, None, matrix, [], group), (0.02, 0.03)[: len(widths)]
        update = torch.randn(matrix.numel, generator=torch.Generator().manual_seed(1)).bfloat16()
        whole, cut = param.detach().clone().view(-1), param.detach().clone().view(-1)
        move(whole, update, Piece(member, 0, 0, matrix.numel, 0), factors, None)
        for at in range(0, matrix.numel, 77):
            some = slice(at, min(at + 77, matrix.numel))
            piece = Piece(member, at, at, some.stop - at, 0)
            move(cut[some], update[some], piece, factors, None)
        assert torch.equal(whole, cut)
        assert not torch.equal(whole, param.detach().view(-1))


def named(**shapes: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    names = [name.replace("__", ".") for name in shapes]
    return list(zip(names, parameters(shapes.values()), strict=True))


MATRICES = """layers.0.attn.c_attn.weight mlp.fc.weight bert.output.dense.weight decoder.0.up.weight
in_proj_weight heads_proj.weight lora_A.default.weight time_embedding.linear_1.weight""".split()
OTHERS = """wte.weight model.embed_tokens.weight embeddings.word_embeddings.weight pos_embed
lm_head.weight head.weight output.weight fc.weight score.modules_to_save.default.weight
_orig_mod.lm_head.weight norm.weight""".split()


def test_which_parameters_are_matrices():
    shapes = {name.replace(".", "__"): (4, 6) for name in MATRICES + OTHERS}
    shapes |= {"norm__weight": (6,), "mlp__experts__up": (3, 4, 6)}
    found = optim.Muon(named(**shapes)).matrix_shapes()
    assert found == {name: [(4, 6)] for name in MATRICES} | {"mlp.experts.up": [(4, 6)] * 3}
    with pytest.warns(UserWarning, match=r"use_muon=True has no parameters.*choose .* by name"):
        optim.Muon([{"params": [], "use_muon": True}, {"params": parameters(), "use_muon": False}])
    with pytest.warns(UserWarning, match=r"AdamW steps conv \(4, 6, 3\), conv2"):
        assert not optim.Muon(named(conv=(4, 6, 3), conv2=(2, 2, 3, 3))).matrix_shapes()
    chosen = optim.Muon(
        named(conv=(4, 6, 3), up=(4, 6), lm_head=(4, 6)),
        matrices=lambda name, shape: {"conv": True, "up": False}.get(name),
        split={"conv": (1, [1, 2])},
    )
    assert chosen.matrix_shapes() == {"conv": [(6, 1), (6, 2)] * 4, "lm_head": [(4, 6)]}
    with pytest.raises(ValueError, match="neither 2 nor 3"):
        optim.Muon(named(conv=(4, 6, 3, 3)), matrices=lambda *_: True).matrix_shapes()
    with pytest.raises(ValueError, match=r"pass model.named_parameters\(\)"):
        optim.Muon(parameters([(4, 6), (6,)])).matrix_shapes()


def pieces(whole: torch.Tensor, rows: list[int] | None) -> list[torch.Tensor]:
    """Cut each matrix of a stack into matrices of `rows` rows, or, without `rows`, into three
    matrices side by side.
    """
    stack = whole.view(-1, *whole.shape[-2:])
    cut = stack.split(rows, 1) if rows else stack.split(stack.shape[-1] // 3, 2)
    return [matrix for part in cut for matrix in part]


def test_split_parameters_are_matrices_of_their_own():
    rows = {"qkv": [6, 3, 3], "conv1d": None, "experts": None}
    fused = dict(named(qkv=(12, 8), conv1d=(8, 12), experts=(2, 8, 6)))

    def apart(value: Any) -> list[torch.Tensor]:
        return [m.clone() for name in rows for m in pieces(value(fused[name]), rows[name])]

    others = [nn.Parameter(m) for m in apart(lambda p: p.detach())]
    split = {"qkv": [6, 3, 3], "conv1d": (1, 3), "experts": (1, 3)}
    ours, theirs = optim.Muon(fused.items(), split=split), torch.optim.Muon(others)
    for step in range(STEPS):
        run(fused.values(), steps=[step])
        for other, grad in zip(others, apart(lambda p: p.grad), strict=True):
            other.grad = grad
        ours.step()
        theirs.step()
    assert equal(apart(lambda p: p.detach()), others)


@pytest.mark.parametrize("by_group", [True, False])
def test_other_parameters_are_stepped_by_adamw(by_group):
    mine, other = named(a=(4, 6), embed=(6, 3), norm=(5,)), named(a=(4, 6), embed=(6, 3), norm=(5,))
    params = [p for _, p in mine]
    if by_group:  # as MuonWithAuxAdam groups parameters
        rest = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-9, "weight_decay": 0.02}
        groups = [
            {"params": params[:1], "use_muon": True, "lr": 0.02},
            {"params": params[1:], "use_muon": False, **rest},
        ]
        ours = optim.Muon(groups)
    else:
        ours = optim.Muon(mine, 0.02, adamw_lr=1e-3, adamw_eps=1e-9, adamw_weight_decay=0.02)
    others = [p for _, p in other]
    rest = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-9, "weight_decay": 0.02}
    theirs = [torch.optim.Muon(others[:1], 0.02), optim.AdamW(others[1:], **rest)]
    for some, optimizers in ((params, [ours]), (others, theirs)):
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
        for step in range(STEPS):
            run(some, *optimizers, steps=[step])
            for schedule in schedules:
                schedule.step()
    assert equal(params, others)
    resumed = optim.Muon(ours.param_groups if by_group else mine, 0.02)
    resumed.load_state_dict(copy.deepcopy(ours).state_dict())
    for optimizer, some in ((resumed, params), (theirs, others)):
        run(some, *(optimizer if isinstance(optimizer, list) else [optimizer]), steps=[STEPS])
    assert equal(params, others)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "learning rate"),
        ({"momentum": -0.1}, "momentum"),
        ({"adjust_lr_fn": "none"}, "Adjust learning rate function none is not supported"),
        ({"ns_steps": 100}, "ns_steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "exactly 3"),
        ({"ns_dtype": torch.float16}, "ns_dtype"),
        ({"adamw_betas": (0.9, 1.0)}, "adamw_betas at index 1"),
        ({"lr": 0.0, "adamw_lr": 1e-3}, "adamw_lr needs"),
        ({"split": lambda *_: 5}, "into 5 equal parts of 37"),
        ({"split": lambda *_: [30, 6]}, "whose sum must be 37"),
        ({"split": lambda *_: (2, 3)}, "0 or 1"),
    ],
)
def test_options_out_of_range(options, text):
    with pytest.raises(ValueError, match=text):
        optim.Muon(parameters(), **options).matrix_shapes()


@pytest.mark.parametrize(("world", "bound"), [(8, 1.01), (64, 1.11)])
def test_deal_is_balanced(world, bound):
    """The busiest rank gets little more than the mean of the work on Llama-3-8B's matrices, which
    are cut in rows. There are 96 large matrices: some of 64 ranks get two of them, which is 1.109
    times the mean.
    """
    shapes = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 3
    work = [m * n * min(m, n) for m, n in shapes * 32]
    held = [np.full(world, m * n // world) for m, n in shapes * 32].__getitem__
    loads = [0] * world
    for owner, cost in zip(deal(work, held, world), work, strict=True):
        loads[owner] += cost
    most = max(max(work), sum(work) / world)
    sizes = [m * n for m, n in shapes * 32]
    rounds = rounds_of(work, sizes, deal(work, held, world), world, 1 << 26)
    of_rounds = [[0] * world for _ in range(max(rounds) + 1)]
    for its, owner, size in zip(rounds, deal(work, held, world), sizes, strict=True):
        of_rounds[its][owner] += size
    assert max(map(max, of_rounds)) <= (1 << 26) + max(sizes)
    assert len(of_rounds) > 1
    assert max(loads) <= bound * most
    # A matrix that one rank holds as a whole stays on that rank.
    assert deal([1] * world, np.eye(world).__getitem__, world) == list(range(world))
