"""Whole programs on fully_shard: adapters, adversarial steps, parametrisations, odd forwards."""

from __future__ import annotations

import io

import torch
import torch.distributed as dist
from outcome import raises
from rows_library import RowsLibrary, whole
from suite import BOTH, Cases
from torch import nn
from torch.distributed.tensor import DTensor
from toys import loss_of, toy

case = Cases(__name__, __file__, library=RowsLibrary)


def linear(rows=4, columns=4, seed=0, **options):
    torch.manual_seed(seed)
    return nn.Linear(columns, rows, **options)


def inputs(lib, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + lib.rank)
    return torch.randn(2, 4, generator=generator)


def squares(lib, model):
    return lib.full_after(model, lambda step: model(inputs(lib, step)).square().mean())


# --- adapters ------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank update (LoRA)."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.base = linear(dtype=dtype).requires_grad_(False)
        torch.manual_seed(1)
        self.a = nn.Parameter(torch.randn(2, 4))
        self.b = nn.Parameter(torch.zeros(4, 2))

    def forward(self, x):
        y = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return y + x @ self.a.t() @ self.b.t()


@case(over={"dtype": [torch.float32, torch.bfloat16], "own": BOTH}, rtol=1e-2)
def adapters(lib, dtype, own):
    """The frozen base is a unit by itself, or is in one unit with its adapter."""
    model = nn.Sequential(Adapted(dtype), nn.Tanh(), Adapted(dtype))
    for part in (model[0], model[2]):
        if own:
            lib.fully_shard(part.base)
        lib.fully_shard(part)
    lib.fully_shard(model)
    return squares(lib, model)


@case()
def only_the_adapters_are_saved(lib):
    model = lib.fully_shard(nn.Sequential(Adapted(), nn.Tanh(), Adapted()))
    squares(lib, model)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    return {n: whole(v) for n, v in model.state_dict().items() if n in trained}


@case()
def training_the_head_then_everything(lib):
    """Training has two phases, each with a new optimizer: first only the head, then everything."""
    model = lib.shard_blocks(toy())
    for p in model.parameters():
        p.requires_grad_(False)
    model.head.requires_grad_(True)
    first = lib.full_after(model, count=2)
    for p in model.parameters():
        p.requires_grad_(True)
    return first, lib.full_after(model, count=2)


# --- gradients of inputs -------------------------------------------------------------------------


@case()
def an_adversarial_step(lib):
    """Each step computes the gradient of the inputs, and then trains on the changed inputs."""
    model = nn.Sequential(linear(), nn.Tanh(), linear(seed=1))
    lib.fully_shard(model[0])
    lib.fully_shard(model)

    def loss(step):
        x = inputs(lib, step).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), [x])
        return model((x + 0.1 * grad.sign()).detach()).square().mean()

    return lib.full_after(model, loss)


@case()
def gradients_of_inputs_of_a_frozen_model(lib):
    model = nn.Sequential(linear(), nn.Tanh(), linear(seed=1)).requires_grad_(False)
    lib.fully_shard(model[0])
    lib.fully_shard(model)
    x = inputs(lib).requires_grad_()
    model(x).sum().backward()
    return x.grad


@case()
def a_learned_input(lib):
    """A prompt outside of the model is trained together with the model."""
    model, prompt = lib.fully_shard(linear()), nn.Parameter(torch.ones(1, 4))
    optimizer = torch.optim.SGD([prompt, *model.parameters()], lr=0.1, foreach=False)
    for step in range(2):
        model(inputs(lib, step) + prompt).square().mean().backward()
        dist.all_reduce(prompt.grad)
        optimizer.step()
        optimizer.zero_grad()
    return prompt.detach(), lib.full(model)


# --- odd forwards --------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = linear(), kind

    def forward(self, *args, **kwargs):
        x = torch.ones(2, 4) if self.kind == "no inputs" else (args or [*kwargs.values()])[0]
        y = self.inner(x)
        if self.kind == "returns a number":
            return float(y.sum())
        if self.kind == "returns nothing":
            return None
        if self.kind == "keeps state":
            self.last = y.detach()
        return y


@case(over={"kind": ["no inputs", "returns a number", "returns nothing", "keeps state"]})
def odd_forwards(lib, kind):
    model = lib.fully_shard(Odd(kind))
    out = model() if kind == "no inputs" else model(inputs(lib))
    if isinstance(out, torch.Tensor):
        out.sum().backward()
    return str(type(out)), lib.gradients(model)


@case()
def inputs_by_name(lib):
    model = lib.fully_shard(Odd(""))
    model(x=inputs(lib)).sum().backward()
    return lib.gradients(model)


@case()
def a_forward_that_recurses(lib):
    """The forward of a module calls the module itself."""

    class Again(nn.Linear):
        def forward(self, x, depth=2):
            y = torch.tanh(super().forward(x))
            return self(y, depth - 1) if depth else y

    torch.manual_seed(0)
    model = lib.fully_shard(Again(4, 4), reshard_after_forward=False)
    model(inputs(lib)).sum().backward()
    return lib.gradients(model)


@case()
def a_custom_autograd_function(lib):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return 2 * x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return 2 * grad @ weight, 2 * grad.t() @ x

    class Own(nn.Linear):
        def forward(self, x):
            return Twice.apply(x, self.weight) + self.bias

    torch.manual_seed(0)
    model = lib.fully_shard(nn.Sequential(lib.fully_shard(Own(4, 4)), nn.Tanh()))
    model(inputs(lib).requires_grad_()).sum().backward()
    return lib.gradients(model)


@case()
def saved_tensor_hooks(lib):
    """torch.autograd.graph.save_on_cpu keeps tensors on the CPU between forward and backward."""
    model = lib.shard_blocks(toy())
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model, lib.batch())
    loss.backward()
    return lib.gradients(model)


# --- layers with parameters of their own kind ----------------------------------------------------


@case(over={"name": ["weight_norm", "spectral_norm", "orthogonal"]}, rtol=1e-4)
def parametrisations(lib, name):
    model = nn.Sequential(linear(), nn.Tanh(), linear(seed=1))
    torch.manual_seed(2)
    getattr(nn.utils.parametrizations, name)(model[0])
    lib.fully_shard(model[0])
    lib.fully_shard(model)
    return squares(lib, model)


@case(over={"layer": ["MultiheadAttention", "GRU", "EmbeddingBag", "GroupNorm", "PReLU"]})
def layers(lib, layer):
    torch.manual_seed(0)
    model, x = {
        "MultiheadAttention": lambda: (nn.MultiheadAttention(4, 2, batch_first=True), 3),
        "GRU": lambda: (nn.GRU(4, 5, batch_first=True), 1),
        "EmbeddingBag": lambda: (nn.EmbeddingBag(7, 4), torch.arange(6).reshape(2, 3)),
        "GroupNorm": lambda: (nn.GroupNorm(2, 4), torch.randn(3, 4, 2)),
        "PReLU": lambda: (nn.PReLU(4), torch.randn(3, 4)),
    }[layer]()
    lib.fully_shard(model)
    args = [torch.randn(2, 3, 4)] * x if isinstance(x, int) else [x]
    out = model(*args)
    (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    return lib.gradients(model)


@case()
def a_mixture_of_experts(lib):
    """Each token goes to one of three experts; the ranks choose different experts."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = linear(3, 4, 5)
            self.experts = nn.ModuleList(linear(seed=i) for i in range(3))

        def forward(self, x):
            scores = self.gate(x).softmax(-1)
            return sum(scores[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))

    model = Experts()
    for expert in model.experts:
        lib.fully_shard(expert)
    lib.fully_shard(model)
    return squares(lib, model)


@case()
def weights_used_twice_in_one_module(lib):
    class Shared(nn.Linear):
        def forward(self, x):
            return super().forward(torch.tanh(super().forward(x)))

    torch.manual_seed(0)
    model = lib.fully_shard(Shared(4, 4))
    model(inputs(lib)).sum().backward()
    return lib.gradients(model)


class Reader(nn.Module):
    """A module whose forward reads the weight of a unit."""

    def __init__(self):
        super().__init__()
        self.block, self.own = linear(), linear(seed=1)

    def forward(self, x):
        return nn.functional.linear(self.own(x), self.block.weight)


def read_of_another_unit(lib):
    model = Reader()
    lib.fully_shard(model.block)
    lib.fully_shard(model)(inputs(lib))


@case(
    torch=raises(RuntimeError, "DTensor"),
    fsdpc=raises(RuntimeError, "of unit 'block' is not gathered here"),
)
def a_weight_of_another_unit(lib):
    """the root's forward reads the weight of a unit"""
    read_of_another_unit(lib)


@case(
    world=1,
    torch=raises(RuntimeError, "DTensor"),
    fsdpc=raises(RuntimeError, "is not gathered here"),
)
def a_weight_of_another_unit_on_one_rank(lib):
    """the root's forward reads the weight of a unit, on one rank"""
    read_of_another_unit(lib)


class Asking(nn.Module):
    """A module whose forward calls `ask` with the weight of a unit that is not gathered then."""

    def __init__(self, ask):
        super().__init__()
        self.block, self.own = linear(), linear(seed=1)
        self.ask = ask

    def forward(self, x, part=None):
        answer = self.ask(self.block.weight)
        self.answer = None if isinstance(answer, torch.Tensor) else answer
        y = self.own(self.block(x))
        return y if part is None else y + part.square().sum()


def asking(lib, ask):
    model = Asking(ask)
    lib.fully_shard(model.block)
    return lib.fully_shard(model)


PARTS = {
    "to_local": lambda weight: weight.to_local(),
    "redistribute": lambda weight: weight.redistribute(placements=weight.placements),
}


@case(
    fsdpc=raises(RuntimeError, "'weight' of unit 'block' is not gathered here: call to_local()"),
    over={"method": list(PARTS)},
)
def part_of_a_weight_of_another_unit(lib, method):
    """the root's forward calls to_local() or redistribute() of a unit's weight"""
    asking(lib, PARTS[method])(inputs(lib))


@case(fsdpc=raises(RuntimeError, "no rank would have the gradient of all ranks"))
def full_tensor_of_a_weight_of_another_unit(lib):
    asking(lib, lambda weight: weight.full_tensor())(inputs(lib))


@case()
def full_tensor_of_a_weight_of_another_unit_without_gradients(lib):
    model = asking(lib, lambda weight: weight.full_tensor().tolist())
    with torch.no_grad():
        model(inputs(lib))
    return model.answer


@case()
def placements_of_a_weight_of_another_unit(lib):
    model = asking(lib, lambda w: (str(w.placements), w.device_mesh.size(), w.requires_grad))
    for _ in range(2):
        model(inputs(lib)).sum().backward()
    return model.answer, lib.gradients(model)


@case(over={"times": [1, 2]})
def part_of_a_weight_passed_to_the_forward(lib, times):
    """A forward gets rows of a weight as an input. Their gradient is added to the weight's."""
    model = asking(lib, lambda weight: None)
    for seed in range(times):
        model(inputs(lib, seed), model.block.weight.to_local()).sum().backward()
    return lib.gradients(model)


# --- files ---------------------------------------------------------------------------------------


@case()
def a_full_checkpoint_by_hand(lib):
    """All ranks call full_tensor(); rank 0 saves the result and loads it into a plain model."""
    model = lib.shard_blocks(toy())
    lib.train(model, 1)
    full = {n: whole(v) for n, v in model.state_dict().items()}
    plain = toy(3)
    if lib.rank == 0:
        file = io.BytesIO()
        torch.save(full, file)
        file.seek(0)
        plain.load_state_dict(torch.load(file, weights_only=True))
        return plain(lib.batch()).detach()


@case()
def parameters_by_vector(lib):
    """A program sums the squares of its shards in one vector, and adds the sums of all ranks."""
    model = lib.shard_blocks(toy())
    local = torch.cat([p.to_local().detach().flatten() for p in model.parameters()])
    total = local.square().sum()
    dist.all_reduce(total)
    return total, [isinstance(p, DTensor) for p in model.parameters()]


@case(
    torch=raises(RuntimeError, "already been lazily initialized"),
    fsdpc_does="makes the outer call the new root",
)
def a_root_added_after_training(lib):
    """a call of fully_shard around modules that have trained"""
    model = nn.Sequential(linear(), nn.Tanh())
    lib.fully_shard(model[0])
    model[0](inputs(lib)).sum().backward()
    model.zero_grad()
    lib.fully_shard(model)
    model(inputs(lib)).sum().backward()
    plain = nn.Sequential(linear(), nn.Tanh())
    for rank in range(lib.world):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
        (plain(x).sum() / lib.world).backward()
    for name, grad in lib.gradients(model).items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad)


@case()
def the_learning_rate_as_a_tensor(lib):
    model = lib.shard_blocks(toy())
    params = list(model.parameters())
    return lib.full_after(
        model,
        count=2,
        optimizer=torch.optim.AdamW(params, lr=torch.tensor(1e-2), eps=1e-3, foreach=False),
    )


@case()
def gradients_scaled_by_the_tokens_of_all_ranks(lib):
    """The loss sums over tokens; gradients are then divided by the number of all ranks' tokens."""
    model = lib.shard_blocks(toy())
    batch = lib.batch()[:, : 3 + lib.rank]
    count = torch.tensor(float(batch.numel()))
    (loss_of(model, batch) * count).backward()
    dist.all_reduce(count)
    lib.resharded(model)
    for p in model.parameters():
        p.grad.mul_(lib.world / count)
    return lib.gradients(model)


test_torch, test_fsdpc = case.tests()
