"""Tests of checkpointing by ratio and by operator, and of the compression of saved tensors."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fsdpc import _C
from fsdpc.activations import checkpoint, compress, offload, offloading

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    """A transformer block that counts its forwards."""

    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.up = nn.Linear(width, width), nn.Linear(width, 4 * width)
        self.down, self.drop = nn.Linear(4 * width, width), nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.drop(functional.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, blocks: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch() -> torch.Tensor:
    return torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, around: Any = None) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model.zero_grad()
    if around is None:
        out = model(batch())
    else:
        with around:
            out = model(batch())
    (out * out).mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def counts(model: nn.Module) -> list[int]:
    found = [m.calls for m in model.modules() if isinstance(m, Block)]
    for module in model.modules():
        if isinstance(module, Block):
            module.calls = 0
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"ratio": 0.5}, [1, 0, 1, 0, 1]),
        ({"ratio": "3/5"}, [1, 0, 1, 0, 1]),
        ({"ratio": "1/3"}, [0, 1, 0, 0, 1]),
        ({"ratio": 0}, [0, 0, 0, 0, 0]),
        ({"ratio": 1.0}, [1, 1, 1, 1, 1]),
        ({"every": 2}, [1, 0, 1, 0, 1]),
        ({"every": 3}, [1, 0, 0, 1, 0]),
        ({"which": [0, -1]}, [1, 0, 0, 0, 1]),
        ({"ratio": 0.5, "blocks": Block}, [1, 0, 1, 0, 1]),
        ({"every": 2, "policy": "matmul"}, [1, 0, 1, 0, 1]),
    ],
)
def test_gradients_and_who_is_computed_again(options: dict[str, Any], expected: list[int]):
    model = Model(dropout=0.1)
    plain = gradients(model)
    names = set(model.state_dict())
    counts(model)
    chosen = checkpoint(model, **options)
    assert chosen == [f"blocks.{i}" for i, hit in enumerate(expected) if hit]
    assert all(map(torch.equal, gradients(model), plain))
    assert counts(model) == [1 + hit for hit in expected]
    assert set(model.state_dict()) == names


@pytest.mark.parametrize("kind", ["matmul", "list", "function"])
def test_selective_policies_skip_what_they_keep(kind: str):
    """The operators that a policy keeps are not run a second time."""
    mm = torch.ops.aten.addmm.default
    policy = {
        "matmul": "matmul",
        "list": [mm],
        "function": lambda _, op, *a, **k: CheckpointPolicy.MUST_SAVE
        if op is mm
        else CheckpointPolicy.PREFER_RECOMPUTE,
    }[kind]

    class Counter(TorchDispatchMode):
        """A mode that counts the matrix products that run. A product whose result the policy has
        kept does not run again.
        """

        found = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.found += op is mm
            return op(*args, **(kwargs or {}))

    def products(model: nn.Module) -> int:
        with Counter() as counter:
            gradients(model)
        return counter.found

    plain, again, kept = Model(2), Model(2), Model(2)
    checkpoint(again)
    checkpoint(kept, policy=policy)
    assert products(plain) == 8 and products(again) > 8 and products(kept) == 8
    assert all(map(torch.equal, gradients(kept), gradients(plain)))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ratio": 1.5}, "between 0 and 1"),
        ({"ratio": float("nan")}, "ratio must be"),
        ({"ratio": "half"}, "ratio must be"),
        ({"every": 0}, "at least 1"),
        ({"which": [5]}, "indices of 5 blocks"),
        ({"ratio": 0.5, "every": 2}, "at most one"),
        ({"blocks": nn.Conv2d}, "no blocks"),
        ({"blocks": (Block, nn.Linear)}, "inside block"),
        ({"policy": "everything"}, "'matmul'"),
    ],
)
def test_arguments_are_refused(options: dict[str, Any], error: str):
    model = Model()
    with pytest.raises(ValueError, match=error):
        checkpoint(model, **options)
    assert all(type(block) is Block for block in model.blocks)


def test_blocks_are_checkpointed_once_and_offload_policies_refused():
    model = Model()
    checkpoint(model, every=2)
    for blocks in (None, Block):
        with pytest.raises(ValueError, match="checkpointed already"):
            checkpoint(model, blocks=blocks)
    assert checkpoint(model, blocks=Block, which=[1, 3])
    model = Model(1)
    checkpoint(model, policy=lambda *_, **__: CheckpointPolicy.MUST_CPU_OFFLOAD, blocks=Block)
    with pytest.raises(NotImplementedError, match="recomputes there instead"):
        gradients(model)


class Norm(nn.Module):
    """A module whose forward changes batch statistics, spectral-norm vectors and counters, in place
    and by assignment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.down = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("table", torch.ones(1 << 18), persistent=False)
        self.changes_table = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.scale = self.scale * 1.5
        if self.changes_table:
            self.table.add_(1)
        return x + self.down(functional.relu(self.norm(self.up(x)))) * self.scale


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, True])
def test_buffers_change_once(compiled: bool):
    torch.manual_seed(0)
    plain = nn.Sequential(Norm(), Norm())
    again = copy.deepcopy(plain)
    checkpoint(again, policy="matmul" if compiled else None)
    again = copy.deepcopy(again)
    models = [plain, torch.compile(again, backend="aot_eager") if compiled else again]
    for step in range(3):
        for model in models:
            torch.manual_seed(step)
            model.zero_grad()
            losses = [model(torch.randn(8, 64)).square().mean() for _ in range(2)]
            if not compiled:  # each of these two backwards recomputes the forward
                sum(losses).backward(retain_graph=True)
            sum(losses).backward()
        assert all(map(torch.equal, again.buffers(), plain.buffers()))
        for one, other in zip(again.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    next(module for module in again.modules() if isinstance(module, Norm)).changes_table = True
    with pytest.raises(
        RuntimeError, match="buffer 'table' of a checkpointed Norm changed in place"
    ):
        again(torch.randn(8, 64))


# --- packing -------------------------------------------------------------------------------------


def packed(x: torch.Tensor) -> torch.Tensor:
    codes, scales = torch.empty(x.numel(), dtype=torch.int8), torch.empty(-(-x.numel() // 256))
    _C.activation_pack(x, codes, scales)
    back = torch.empty_like(x)
    _C.activation_unpack(back, codes, scales)
    return back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("simd", ["plain", "avx2", "avx512"])
def test_packed_values(monkeypatch, simd: str, dtype: torch.dtype):
    """Values come back within half a quantization step of their block and with their sign; zeros
    stay zeros.
    """
    if simd not in _C.kernel_names():
        pytest.skip(f"this processor does not run {simd}")
    monkeypatch.setenv("FSDPC_SIMD", simd)
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(9 * 256 + 77, generator=numbers).to(dtype)
    x[256:512] *= 1e-38 if dtype != torch.float16 else 1e-7
    x[512:768] = 0
    x[800] = float("nan")
    x[1024:1280] *= torch.rand(256, generator=numbers).mul(-90).exp2().to(dtype)  # any magnitude
    x[1280:1536] *= 1e-4
    x[1290] = -3  # far above the other values of its block
    x[1536:1792] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x[1540] *= 300  # makes the other, subnormal numbers smaller than half a step
    x[1792:2048] = (torch.rand(256, generator=numbers) < 0.9).to(dtype) / 0.9  # a mask
    back = packed(x)
    for begin in range(0, x.numel(), 256):
        block, found = x[begin : begin + 256].double(), back[begin : begin + 256].double()
        if begin == 768:
            assert found.isnan().all()
            continue
        most = block.abs().max()
        assert torch.equal(found.sign(), block.sign())
        assert torch.equal(found[block.abs() == most], block[block.abs() == most])
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        unit = most * torch.finfo(dtype).eps + tiny
        assert ((block - found).abs() <= most / 252 * (1 + 1e-5) + unit).all()
    assert torch.equal(back[1792:2048], x[1792:2048])


# --- compression ---------------------------------------------------------------------------------


def error_of(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Return the relative error of all gradients together."""
    distance = sum((f - e).double().norm() ** 2 for f, e in zip(found, exact, strict=True))
    return float((distance / sum(e.double().norm() ** 2 for e in exact)) ** 0.5)


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.01), ("bf16", 0.004)])
def test_error_of_gradients(dtype: str, bound: float):
    model = Model()
    exact = gradients(model)
    error = error_of(gradients(model, compress(model, dtype)), exact)
    assert 0 < error < bound
    # Checkpointed blocks are recomputed from exact inputs, so the bound still holds.
    checkpoint(model, every=2)
    assert 0 < error_of(gradients(model, compress(model, dtype)), exact) < bound


def test_memory_is_freed_and_shared_tensors_are_packed_once(monkeypatch):
    packed: list[int] = []
    original = _C.activation_pack

    def counting(values: torch.Tensor, *rest: Any) -> None:
        packed.append(values.data_ptr())
        original(values, *rest)

    monkeypatch.setattr("fsdpc.activations.compression._C.activation_pack", counting)
    x = torch.randn(64, 64, requires_grad=True)
    first = x * 2
    with compress(nn.Identity()):
        y = (first * first).sum() + (first.t() @ first).sum() + first.exp().sum()
    # Two tensors were packed: `first`, which both products saved, and the output of exp.
    assert len(set(packed)) == len(packed) == 2
    storage = torch.multiprocessing.reductions.StorageWeakRef(first.untyped_storage())
    del first
    gc.collect()
    assert storage.expired()
    y.backward()
    assert x.grad.isfinite().all()


def test_a_storage_at_the_address_of_another_is_not_taken_for_it():
    """A new tensor may get the address of a freed one. The values of the new tensor must be packed
    nevertheless.
    """
    weights = nn.Parameter(torch.ones(64, 64))
    with compress(nn.Identity()):
        outs = []
        for value in (1.0, 2.0, 3.0):
            given = torch.full((64, 64), value)
            outs.append((weights * given).sum())
            del given
    for out, value in zip(outs, (1.0, 2.0, 3.0), strict=True):
        weights.grad = None
        out.backward()
        torch.testing.assert_close(weights.grad, torch.full((64, 64), value))


def test_what_stays_exact():
    """Parameters, integers, small tensors and the tensors of attention stay exact. A part of a
    larger tensor is packed without the rest of that tensor.
    """
    x = torch.randn(8, 4, 32, 16, requires_grad=True)
    with compress(nn.Identity()):
        out = functional.scaled_dot_product_attention(x * 1, x * 1, x * 1).sum()
        out = out + torch.softmax(x * 3, -1).square().sum() * 0
    out.backward()
    exact = x.grad.clone()
    x.grad = None
    functional.scaled_dot_product_attention(x * 1, x * 1, x * 1).sum().backward()
    assert torch.equal(exact, x.grad)
    layer = nn.Linear(64, 64)
    given = torch.randn(64, 64, requires_grad=True)
    with compress(layer):
        out = layer(given).sum()
    out.backward()
    compressed, given.grad = given.grad, None
    layer(given).sum().backward()
    assert torch.equal(compressed, given.grad)
    # The values between the elements of a view are not packed with the view.
    base = torch.full((64, 128), 1e30)
    base[:, :64] = 1.0
    scale = nn.Parameter(torch.ones(64, 64))
    with compress(nn.Identity()):
        out = (scale * base[:, :64]).sum()
    out.backward()
    torch.testing.assert_close(scale.grad, torch.ones(64, 64))


def through(function: Any, x: torch.Tensor, around: Any = None) -> torch.Tensor:
    """Return the gradient of a weighted sum of function(x). ``function`` gets a new tensor with the
    values of x. No other operator has saved this new tensor.
    """
    torch.manual_seed(7)
    given = x.clone().requires_grad_()
    with around or nullcontext():
        out = function(given * 1)
        out = out[0] if isinstance(out, tuple) else out
    (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
    return given.grad


class Sine(torch.autograd.Function):
    """The sine of 10,000 times the input. Even a small error of the saved input makes the gradient
    wrong.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (1e4 * x).sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1e4 * (1e4 * ctx.saved_tensors[0]).cos()


MASK = (torch.rand(64, 64, generator=torch.Generator().manual_seed(2)) - 0.3).clamp(0)
SAVED_EXACTLY = {
    "abs": torch.abs,
    "amax": lambda x: x.amax(-1),
    "autograd function": Sine.apply,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "custom mask": lambda x: (MASK * x) * MASK,
    "division": lambda x: x / x.abs(),
    "dropout": lambda x: functional.dropout(x, 0.1),
    "exponential": lambda x: x.softmax(-1),
    "hardtanh": functional.hardtanh,
    "l1 loss": lambda x: functional.l1_loss(x, x.detach() * 1.001, reduction="none"),
    "leaky relu": functional.leaky_relu,
    "logarithm": lambda x: x.abs().log(),
    "maximum": lambda x: torch.maximum(x, x.roll(1, -1)),
    "max": lambda x: x.max(),
    "max pooling": lambda x: functional.max_pool1d(x, 2),
    "normalize": functional.normalize,
    "relu": torch.relu,
    "root": lambda x: x.abs() ** 0.5,
    "sort": lambda x: x.sort(-1),
    "where": lambda x: torch.where(x > 0.1, x, x.abs()),
}


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_functions_that_do_not_bear_errors(dtype: str):
    """Functions that compare what they saved, divide by it, take its exponential or use only its
    sign have gradients that are equal to the bit.
    """
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(64, 64, generator=numbers) * torch.rand(64, 64, generator=numbers).pow(9)
    x[0, :2] = torch.tensor([-1e-30, 1e-30])
    for name, function in SAVED_EXACTLY.items():
        if (name, dtype) == ("dropout", "bf16"):
            continue  # bfloat16 cannot represent 1 / 0.9
        found = through(function, x, compress(nn.Identity(), dtype))
        assert torch.equal(found, through(function, x)), name


def test_small_outputs_of_relu_count():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8)]
    model, x = nn.Sequential(*layers), torch.randn(512, 64)

    def biases(around: Any) -> list[torch.Tensor]:
        model.zero_grad()
        with around:
            out = model(x)
        out.square().mean().backward()
        return [layer.bias.grad.clone() for layer in layers[::2]]

    exact, found = biases(nullcontext()), biases(compress(model, "int8"))
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


class Routed(nn.Module):
    """A model in which each token chooses two of four experts. A small change of the input may
    change the choice. The rest of the forward compares x with limits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(64, 4), nn.ModuleList(nn.Linear(64, 64) for _ in "1234")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.where(x > 0.1, x, x.abs()) + x.clamp(-0.5, 0.5)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return x + out


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
@pytest.mark.parametrize("way", ["ours", "torch's", "reentrant"])
def test_checkpointed_blocks_are_computed_again_from_exact_inputs(way: str, dtype: str):
    torch.manual_seed(0)
    model = nn.Sequential(*[Routed() for _ in range(3)])
    x = torch.randn(256, 64)
    if way == "ours":
        checkpoint(model, blocks=Routed)

    def gradients(around: Any) -> list[torch.Tensor]:
        model.zero_grad()
        given = x.clone().requires_grad_()
        with around:
            out = given * 1
            for block in model:
                again = partial(torch_checkpoint, block, use_reentrant=way == "reentrant")
                out = block(out) if way == "ours" else again(out)
        out.square().mean().backward()
        return [given.grad, *[p.grad.clone() for p in model.parameters()]]

    found = gradients(compress(model, dtype))
    assert all(map(torch.equal, found, gradients(nullcontext())))


def test_a_parameter_that_changed_is_noticed():
    layer = nn.Linear(64, 64)
    given = torch.randn(64, 64, requires_grad=True)
    with compress(layer):
        out = layer(given).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    with pytest.raises(ValueError, match="'int8' or 'bf16'"), compress(layer, "int4"):
        pass


# --- offload on the host --------------------------------------------------------------------------


def test_offload_costs_nothing_on_the_host_and_says_so_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offloading, "_said", [])
    model, packed = Model(blocks=1), 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packed
        packed += 1
        return tensor

    with pytest.warns(UserWarning, match="in host memory.*nothing is copied"), offload(model):
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            kept = model(batch())
        saved = packed
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t), offload(model):  # no warning
        other = model(batch())
    assert torch.equal(kept, other) and packed == 2 * saved  # the outer hooks still run
    with pytest.raises(NotImplementedError, match="where parameter 'weight' is"):
        with offload(Elsewhere()):
            pass


class Elsewhere(nn.Module):
    """A module with a parameter that reports a device which fsdpc does not know."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield "weight", SimpleNamespace(device=torch.device("xpu", 0))
