"""The nodes of the fuzzer's trees. The `forward(x)` of each node maps (rows, width) to the same
shape.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections import OrderedDict, deque, namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import Context, register_pytree_node
from torch.utils.checkpoint import checkpoint

from fsdpc import activations


@dataclasses.dataclass
class State:
    """The state of the run, which all nodes of a process share."""

    rank: int = 0
    step: int = 0
    fail: str = ""  # where Fuse raises: "" (nowhere), "forward" or "backward"
    # whether the root reads weights of modules outside of the modules' forwards
    uncalled: bool = False


STATE = State()


class Planted(RuntimeError):
    """An error that a Fuse raises. Both sides of the comparison catch it."""


class Node(nn.Module):
    by_data = False  # whether the ranks may run different children
    number = -1
    label = ""
    note = ""
    wrapped = False

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.width = width


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * (0.6 / max(1, shape[-1] if shape else 1) ** 0.5))


# --- leaves --------------------------------------------------------------------------------------


class Linear(Node):
    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.weight = weight(width, width)
        self.bias = nn.Parameter(torch.randn(width) * 0.1) if rng.random() < 0.6 else None

    def forward(self, x):
        return torch.tanh(F.linear(x, self.weight, self.bias))


class Mlp(Node):
    def __init__(self, width, rng):
        super().__init__(width, rng)
        hidden = rng.choice([1, 2, 5, 9])
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        self.act = rng.choice([torch.tanh, F.gelu, F.silu])

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Norm(Node):
    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.norm = nn.LayerNorm(width, eps=0.1)

    def forward(self, x):
        return self.norm(x)


class BatchNorm(Node):
    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.norm = nn.BatchNorm1d(width, eps=0.3, affine=rng.random() < 0.8)

    def forward(self, x):
        return torch.tanh(self.norm(x))


class Scale(Node):
    """Parameters without dimensions."""

    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.factor = nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        return x * self.factor + self.shift


class Odd(Node):
    """A node with parameters of odd shapes. One parameter is not contiguous, and another may be
    empty."""

    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.a = weight(1, width, 1)
        self.b = weight(3, 1, width)
        self.empty = nn.Parameter(torch.zeros(0)) if rng.random() < 0.3 else None
        self.c = nn.Parameter(torch.randn(width, 2).t() * 0.5)

    def forward(self, x):
        return torch.tanh(x * self.a.flatten() + self.b.sum(0) + (self.c * 0.3).sum(0))


class Lora(Node):
    """A node with a frozen weight, and a product of two weights that train. All three weights
    belong to one module."""

    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.base = nn.Parameter(weight(width, width).detach(), requires_grad=False)
        self.down, self.up = weight(2, width), weight(width, 2)
        self.last = rng.random() < 0.5

    def forward(self, x):
        if self.last:
            return torch.tanh(F.linear(F.linear(x, self.down), self.up) + F.linear(x, self.base))
        return torch.tanh(F.linear(x, self.base) + F.linear(F.linear(x, self.down), self.up))


class LoraOfModules(Node):
    """A LoRA layer of modules, as peft makes it. On some ranks, the frozen branch's backward may be
    late."""

    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.late = rng.choice([0.0, 0.0, 0.01])
        self.on = rng.randrange(2)

    def forward(self, x):
        frozen = self.base(x)
        if self.late:
            frozen = Sleep.apply(frozen, 0.0, self.late if STATE.rank % 2 == self.on else 0.0)
        return torch.tanh(frozen + self.up(self.down(x)))


class Frozen(Node):
    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        (self if rng.random() < 0.5 else self.a).requires_grad_(False)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Embedding(Node):
    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.table = nn.Embedding(7, width)

    def forward(self, x):
        rows = (torch.arange(x.shape[0]) * 3 + STATE.rank + STATE.step) % 7
        return x + 0.5 * self.table(rows)


class Conv(Node):
    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.conv(x.unsqueeze(1)).squeeze(1))


class Float64(Node):
    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.wide = nn.Linear(width, width).double()
        self.narrow = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.wide(x.double()).to(x.dtype) + self.narrow(x))


class Integer(Node):
    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.index = nn.Parameter(torch.randperm(width), requires_grad=False)
        self.weight = weight(width, width)

    def forward(self, x):
        return x + torch.tanh(F.linear(x[:, self.index], self.weight))


class Buffers(Node):
    """A node with a running mean, which forward replaces or writes in place."""

    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer(
            "steps", torch.zeros((), dtype=torch.long), persistent=rng.random() < 0.5
        )
        self.weight = weight(width)
        self.replaces = rng.random() < 0.3

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
                if self.replaces:
                    self.mean = mean
                else:
                    self.mean.copy_(mean)
                self.steps += 1
        return (x - self.mean.clone()) * self.weight + x


class Unused(Node):
    """A node with a parameter that is never used, and one that is used in some steps only."""

    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.weight, self.never = weight(width, width), weight(3, 2)
        self.sometimes = weight(width)
        self.by_rank = rng.random() < 0.5

    def forward(self, x):
        if (STATE.step + (STATE.rank if self.by_rank else 0)) % 2:
            x = x + self.sometimes
        return torch.tanh(F.linear(x, self.weight))


class Tied(Node):
    """A node whose two modules share one weight, in the same unit."""

    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Recurrent(Node):
    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.cell = nn.GRUCell(width, width)

    def forward(self, x):
        h = torch.zeros_like(x)
        for _ in range(2):
            h = self.cell(x, h)
        return h


class Attention(Node):
    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.t() * 0.3, -1) @ v)


class Force(Node):
    """A node whose forward takes the gradient of an energy, as models of molecules do."""

    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.weight = weight(width, width)

    def forward(self, x):
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(F.linear(at, self.weight)).sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=torch.is_grad_enabled())
        return x - 0.3 * force


class Writes(Node):
    """A node that scales its weight in place for its own forward, and then restores the weight."""

    def __init__(self, width, rng):
        super().__init__(width, rng)
        self.weight = weight(width, width)

    def forward(self, x):
        self.weight.data.mul_(2.0)
        try:
            return torch.tanh(F.linear(x, self.weight))
        finally:  # torch's checkpoint ends a recomputed forward by an exception
            self.weight.data.mul_(0.5)


# --- around subtrees -----------------------------------------------------------------------------


class Around(Node):
    def __init__(self, width, rng, *children):
        super().__init__(width, rng)
        for i, child in enumerate(children):
            setattr(self, f"c{i}", child)
        self.size = len(children)

    def parts(self):
        return [getattr(self, f"c{i}") for i in range(self.size)]


class Sequence(Around):
    def forward(self, x):
        for part in self.parts():
            x = part(x)
        return x


class Parallel(Around):
    def forward(self, x):
        return sum((part(x) for part in self.parts()), torch.zeros_like(x)) * 0.7


class Residual(Around):
    def forward(self, x):
        return x + self.c0(x) * 0.5


class Twice(Around):
    def forward(self, x):
        return self.c0(self.c0(x))


class Both(Around):
    """Runs its child on two inputs."""

    def forward(self, x):
        return self.c0(x) - 0.5 * self.c0(x.flip(0) * 0.7)


class Loop(Around):
    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        self.gain = nn.Parameter(torch.tensor([0.8]))

    def forward(self, x):
        for _ in range(3):
            x = x * self.gain + 0.3 * self.c0(x)
        return x


class RankLoop(Around):
    """Calls its child a number of times that differs by rank and step, at times 0."""

    by_data = True

    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        self.least = rng.randrange(2)

    def forward(self, x):
        for _ in range(self.least + (STATE.rank + STATE.step) % 2):
            x = x + 0.4 * self.c0(x)
        return x


class Branch(Around):
    by_data = True

    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        self.by_rank = rng.random() < 0.7

    def forward(self, x):
        turn = (STATE.step + (STATE.rank if self.by_rank else 0)) % 2
        return self.parts()[turn](x)


class Drop(Around):
    by_data = True

    def forward(self, x):
        return x if (STATE.rank + STATE.step) % 3 == 0 else x + 0.5 * self.c0(x)


class Detach(Around):
    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        self.before = rng.random() < 0.5

    def forward(self, x):
        return x + 0.5 * (self.c0(x.detach()) if self.before else self.c0(x).detach())


class NoGrad(Around):
    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        self.again = rng.random() < 0.5

    def forward(self, x):
        with torch.no_grad():
            y = self.c0(x)
        return x + 0.5 * y + (0.3 * self.c0(x) if self.again else 0.0)


class Checkpoint(Around):
    def forward(self, x):
        return checkpoint(self.c0, x, use_reentrant=False, preserve_rng_state=False)


class Reentrant(Around):
    def forward(self, x):
        return checkpoint(self.c0, x, use_reentrant=True, preserve_rng_state=False)


class Thread(Around):
    def forward(self, x):
        result: list[Any] = []
        grad = torch.is_grad_enabled()
        inference = torch.is_inference_mode_enabled()

        def work() -> None:
            try:
                with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                    result.append(self.c0(x))
            except BaseException as error:
                result.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]


class Inplace(Around):
    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        self.how = rng.choice(["out_add", "out_relu", "in_clone", "out_view", "in_mul"])
        self.note = self.how

    def forward(self, x):
        if self.how == "in_clone":
            y = x.clone()
            z = self.c0(y)
            y.mul_(0.5)  # autograd refuses this if the child saved y
            return z + y
        if self.how == "in_mul":
            return self.c0((x * 1.1).mul_(0.9))
        y = self.c0(x)
        if self.how == "out_add":
            return y.add_(x)
        if self.how == "out_relu":
            y = y + 0.0
            return F.leaky_relu_(y, 0.2)
        y.view(-1)[: self.width].mul_(0.5)
        return y


Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    first: Tensor
    second: Tensor | None = None
    extra: Any = None


@dataclasses.dataclass
class Output(OrderedDict):
    """A dataclass whose fields are also items, and whose items cannot be updated, as in
    transformers' ModelOutput."""

    first: Tensor
    second: Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("an Output has no update")


def output_of(values: Any, context: Context) -> Output:
    return Output(**dict(zip(context, values, strict=True)))


register_pytree_node(Output, lambda o: (list(o.values()), list(o)), output_of)


class Several(nn.Module):
    """A module that returns its child's output and a second output, in a container."""

    def __init__(self, child, width, form):
        super().__init__()
        self.child, self.form = child, form
        self.side = nn.Linear(width, width)

    def forward(self, x):
        first, second = self.child(x), torch.tanh(self.side(x))
        if self.form == "tuple":
            return first, second
        if self.form == "list":
            return [first, None, [second, "text"]]
        if self.form == "dict":
            return {"first": first, "second": {"x": second, "n": 3}}
        if self.form == "named":
            return Pair(first, second)
        if self.form == "deque":
            return deque([first, second])
        if self.form == "output":
            return Output(first, second)
        return Record(first, second, {"input": x})


class Outputs(Around):
    """A node that uses both outputs of its child, or one of them, or detaches the second one."""

    def __init__(self, width, rng, *children):
        form = rng.choice(["tuple", "list", "dict", "named", "record", "deque", "output"])
        super().__init__(width, rng)
        inner = Several(children[0], width, form)
        inner.wrapped = rng.random() < 0.6
        self.c0, self.size = inner, 1
        self.type_name = {"named": "pair"}.get(form, form)
        self.use = rng.choice(["both", "first", "second", "detached"])
        self.note = f"{form} {self.use}{' inner*' if inner.wrapped else ''}"

    def forward(self, x):
        out = self.c0(x)
        assert type(out).__name__.lower() == self.type_name, type(out)
        if isinstance(out, Record | Output):
            first, second = out.first, out.second
        elif isinstance(out, dict):
            first, second = out["first"], out["second"]["x"]
        elif isinstance(out, list):
            first, second = out[0], out[2][0]
        else:
            first, second = out
        first, second = first.to(x.dtype), second.to(x.dtype)
        if self.use == "first":
            return first
        if self.use == "second":
            return second
        return first + (second.detach() if self.use == "detached" else second) * 0.5


class Cross(Around):
    """A node whose second child takes the input plus the first child's output."""

    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        self.mix = nn.Linear(2 * width, width)

    def forward(self, x):
        context = self.c0(x)
        return torch.tanh(self.mix(torch.cat([self.c1(x + context), context], -1)))


class TakesKeywords(nn.Module):
    def __init__(self, child, width):
        super().__init__()
        self.child, self.scale = child, nn.Parameter(torch.ones(width) * 0.5)

    def forward(self, *, values, options=None):
        return self.child(values["x"]) * self.scale + options[0]


class Keyword(Around):
    def __init__(self, width, rng, *children):
        super().__init__(width, rng)
        self.c0, self.size = TakesKeywords(children[0], width), 1
        self.c0.wrapped = rng.random() < 0.6
        self.note = "inner*" if self.c0.wrapped else ""

    def forward(self, x):
        return self.c0(values={"x": x}, options=[x * 0.5, None])


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, now, later):
        ctx.later = later
        time.sleep(now)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.later)
        return Sleep.apply(grad, 0.0, 0.0), None, None


class Slow(Around):
    """A node in which one rank is late, in forward, in backward or in both."""

    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        self.now, self.later = rng.choice([(0.003, 0.0), (0.0, 0.005), (0.002, 0.002)])
        self.on = rng.randrange(4)

    def forward(self, x):
        late = STATE.rank == self.on % 2
        y = Sleep.apply(x, self.now if late else 0.0, self.later if late else 0.0)
        return (
            self.c0(y)
            if self.on < 2
            else Sleep.apply(self.c0(x), self.now if late else 0.0, self.later if late else 0.0)
        )


class Hooked(Around):
    """A node with a hook of the user, on an activation or on the child."""

    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        self.how = rng.choice(["tensor", "forward", "pre"])
        if self.how == "forward":
            children[0].register_forward_hook(halve_output)
        elif self.how == "pre":
            children[0].register_forward_pre_hook(halve_input)

    def forward(self, x):
        y = self.c0(x)
        if self.how == "tensor" and y.requires_grad:
            y = y + 0.0
            y.register_hook(double)
        return y


def halve_output(module, args, output):
    return output * 0.5


def halve_input(module, args):
    return (args[0] * 0.5,)


def double(grad):
    return grad * 2.0


class Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if STATE.fail == "backward":
            raise Planted("planted in backward")
        return Burn.apply(grad)


class Fuse(Around):
    """A node that raises an error in forward or in backward, as STATE.fail says."""

    def forward(self, x):
        y = self.c0(x)
        if STATE.fail == "forward":
            raise Planted("planted in forward")
        return Burn.apply(y)


class Positions(nn.Module):
    """Returns views of its weight."""

    def __init__(self, width, how, trains):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, width) * 0.5, requires_grad=trains)
        self.how = how

    def forward(self, rows):
        if self.how == "slice":
            return self.table[:rows]
        if self.how == "expand":
            return self.table[0].expand(rows, -1)
        return self.table.narrow(0, 1, rows).view(rows, -1)


class ReturnsView(Around):
    """A node that takes positional embeddings before its children run, and adds them after its
    children."""

    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        self.table = Positions(width, rng.choice(["slice", "expand", "view"]), rng.random() < 0.7)
        self.table.wrapped = rng.random() < 0.7

    def forward(self, x):
        positions = self.table(x.shape[0])
        for part in self.parts():
            x = part(x)
        return x + positions


class Temperature(nn.Module):
    def __init__(self, child, width):
        super().__init__()
        self.child, self.scale = child, nn.Parameter(torch.ones(width))

    def forward(self, x):
        return {"x": self.child(x), "scale": self.scale}


class ReturnsParam(Around):
    def __init__(self, width, rng, *children):
        super().__init__(width, rng)
        self.c0, self.size = Temperature(children[0], width), 1
        self.c0.wrapped = rng.random() < 0.7

    def forward(self, x):
        out = self.c0(x)
        return out["x"] * out["scale"]


class Yields(nn.Module):
    def __init__(self, child, width):
        super().__init__()
        self.child, self.weight = child, weight(width, width)

    def forward(self, x):
        yield self.child(x)
        yield torch.tanh(F.linear(x, self.weight))


class GeneratorOut(Around):
    def __init__(self, width, rng, *children):
        super().__init__(width, rng)
        self.c0, self.size = Yields(children[0], width), 1
        self.c0.wrapped = rng.random() < 0.7

    def forward(self, x):
        return sum(self.c0(x), torch.zeros_like(x))


class TiedByHand(Around):
    """A node whose last operation reads the weight of an embedding outside of the embedding's
    forward."""

    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        self.table = nn.Embedding(width, width)
        self.table.wrapped = rng.random() < 0.5

    def forward(self, x):
        y = self.c0(x + self.table(torch.arange(x.shape[0]) % self.width))
        return torch.tanh(F.linear(y, self.table.weight))


class Teacher(Around):
    """A node that evaluates another model, which is no module of the tree."""

    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        teacher = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        teacher[0].wrapped = rng.random() < 0.5
        self.box = [teacher]

    def forward(self, x):
        with torch.no_grad():
            target = self.box[0](x)
        return self.c0(x) - 0.3 * target


class Compressed(Around):
    """A node whose saved tensors are compressed, on both sides of the comparison."""

    def __init__(self, width, rng, *children):
        super().__init__(width, rng, *children)
        self.to = self.note = rng.choice(["int8", "bf16"])

    def forward(self, x):
        with activations.compress(self, self.to, min_bytes=0):
            return self.c0(x)


class Checked(Around):
    """A node whose block is recomputed in backward on the sharded side, but not on the unsharded
    side."""

    def __init__(self, width, rng, *children):
        super().__init__(width, rng)
        self.c0, self.size = Block(children[0]), 1

    def forward(self, x):
        return self.c0(x)


class Block(nn.Module):
    def __init__(self, child):
        super().__init__()
        self.child = child

    def forward(self, x):
        return self.child(x)


class Renamed(Around):
    """A node whose child has different names on different ranks."""

    def __init__(self, width, rng, *children):
        super().__init__(width, rng)
        self.called, self.size = f"of_{STATE.rank % 2}", 1
        setattr(self, self.called, children[0])

    def parts(self):
        return [getattr(self, self.called)]

    def forward(self, x):
        return self.parts()[0](x)
