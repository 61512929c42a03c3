"""Mixed precision: the dtypes of parameters, inputs, gradients, outputs and buffers."""

from __future__ import annotations

import collections
import dataclasses

import torch
from outcome import wrong
from suite import BOTH, Cases
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy
from torch.nn.utils.rnn import pack_sequence
from toys import Block, loss_of, toy

case = Cases(__name__, __file__, rtol=2e-2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Pair = collections.namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    label: str


class Spy(nn.Module):
    """A module that records the arguments of its forward and the dtypes of its parameters."""

    def __init__(self, *children):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.inner = nn.Sequential(*children)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, x, *rest, **named):
        self.seen = (x, rest, named)
        self.weight_dtype = self.linear.weight.dtype
        return self.inner(self.linear(x.to(self.weight_dtype)))


COMBINATIONS = {
    "param": MixedPrecision(param_dtype=BF16),
    "reduce": MixedPrecision(reduce_dtype=BF16),
    "param-reduce": MixedPrecision(param_dtype=BF16, reduce_dtype=F32),
    "fp16": MixedPrecision(param_dtype=F16),
    "buffer": MixedPrecision(buffer_dtype=BF16),
    "all": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16),
    "uncast": MixedPrecision(param_dtype=BF16, cast_root_forward_inputs=False),
    "forward": MixedPrecision(param_dtype=BF16, cast_forward_inputs=True),
    "keep": MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True),
}


def run(lib, name, orig=False):
    model = Spy(nn.Linear(2, 2))
    model = lib.wrap(model, mixed_precision=COMBINATIONS[name], use_orig_params=orig)
    x = torch.full((3, 2), 1.0 + lib.rank, requires_grad=True)
    output = model(x)
    output.float().sum().backward()
    return model, x, output


@case(over={"name": list(COMBINATIONS), "orig": BOTH})
def dtypes_of_a_step(lib, name, orig):
    model, x, output = run(lib, name, orig)
    return {
        "compute": model.weight_dtype,
        "input": model.seen[0].dtype,
        "output": output.dtype,
        "input gradient": x.grad.dtype,
        "parameters": {p.dtype for p in model.parameters()},
        "gradients": {p.grad.dtype for p in model.parameters() if p.grad is not None and p.numel()},
        "buffers": [b.dtype for b in model.buffers()],
        "state dict": {k: v.dtype for k, v in model.state_dict().items()},
        "summoned": {v.dtype for v in lib.full(model).values()},
    }


@case(over={"name": [n for n in COMBINATIONS if n not in ("uncast", "keep", "buffer")]})
def gradients_of_a_step(lib, name):
    return lib.gradients(run(lib, name)[0])


@case(
    over={
        "strategy": [
            ShardingStrategy.FULL_SHARD,
            ShardingStrategy.SHARD_GRAD_OP,
            ShardingStrategy.NO_SHARD,
        ],
        "orig": BOTH,
    }
)
def training_in_bf16(lib, strategy, orig):
    mixed = MixedPrecision(param_dtype=BF16, reduce_dtype=F32)
    model = lib.wrap_blocks(
        toy(), mixed_precision=mixed, sharding_strategy=strategy, use_orig_params=orig
    )
    return lib.train(model)


VALUES = {
    "tensor": lambda f, i: f,
    "integers": lambda f, i: i,
    "list": lambda f, i: [f, i, 3],
    "tuple": lambda f, i: (f, None, "text"),
    "dict": lambda f, i: {"f": f, "i": i},
    "ordered dict": lambda f, i: collections.OrderedDict(f=f, i=i),
    "namedtuple": lambda f, i: Pair(f, i),
    "dataclass": lambda f, i: Batch(f, "label"),
    "nested": lambda f, i: [{"a": (f, [i])}, Pair([f], None)],
}


def dtypes(value):
    """Return the structure of a value, with each tensor replaced by its dtype."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if dataclasses.is_dataclass(value):
        return (type(value).__name__, *(dtypes(v) for v in vars(value).values()))
    if isinstance(value, dict):
        return (type(value).__name__, *((k, dtypes(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(dtypes(v) for v in value))
    return value


@case(over={"kind": list(VALUES)})
def inputs_are_cast_wherever_they_are(lib, kind):
    model = lib.wrap(Spy(), mixed_precision=COMBINATIONS["param"])
    value = VALUES[kind](torch.ones(2, 2), torch.ones(2, dtype=torch.int64))
    model(torch.ones(3, 2), value, named=value)
    _, rest, named = model.seen
    return dtypes(rest), dtypes(named["named"]), dtypes(value)


@case(torch=wrong("stays"), fsdpc_does="casts its data like any other tensor")
def a_packed_sequence_as_input(lib):
    model = lib.wrap(Spy(), mixed_precision=COMBINATIONS["param"])
    model(torch.ones(3, 2), pack_sequence([torch.ones(2, 2), torch.ones(1, 2)]))
    assert model.seen[1][0].data.dtype == BF16, "stays in float32 beside bfloat16 parameters"


@case(over={"inner": BOTH, "outer": BOTH, "own": BOTH})
def inputs_of_nested_units(lib, inner, outer, own):
    mixed = MixedPrecision(
        param_dtype=BF16, cast_forward_inputs=inner, cast_root_forward_inputs=outer
    )
    child = lib.wrap(Spy(), mixed_precision=mixed)

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child, self.linear = child, nn.Linear(2, 2) if own else None

        def forward(self, x):
            self.seen = x.dtype
            return self.child(x.float())

    model = lib.wrap(Parent(), mixed_precision=mixed)
    model(torch.ones(3, 2))
    return model.seen, child.seen[0].dtype


@case()
def units_of_different_precision(lib):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0] = lib.wrap(
        model[0], mixed_precision=MixedPrecision(param_dtype=F16, cast_forward_inputs=True)
    )
    model[1] = lib.wrap(
        model[1], mixed_precision=MixedPrecision(param_dtype=BF16, cast_forward_inputs=True)
    )
    model = lib.wrap(model)
    output = model(torch.full((1, 4), 1.0 + lib.rank))
    output.float().sum().backward()
    return output.dtype, lib.gradients(model)


@case()
def batch_norm_stays_in_full_precision(lib):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    mixed = MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16)
    model = lib.wrap(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=mixed)
    words = lib.warned("mixed precision")
    seen = []
    model[1].register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    model(torch.arange(12.0).reshape(3, 4) * (1 + lib.rank)).float().sum().backward()
    return (
        words,
        seen,
        [m.mixed_precision.param_dtype for m in lib.FSDP.fsdp_modules(model)],
        [(n.split(".")[-1], b.dtype) for n, b in model.named_buffers()],
    )


@case()
def own_classes_stay_in_full_precision(lib):
    mixed = MixedPrecision(param_dtype=BF16, _module_classes_to_ignore=(nn.LayerNorm,))
    model = lib.wrap_blocks(toy(), mixed_precision=mixed)
    output = model(lib.batch())
    return (
        output.dtype,
        lib.warned("mixed precision"),
        [
            (type(m.module).__name__, m.mixed_precision.param_dtype)
            for m in lib.FSDP.fsdp_modules(model)
        ],
    )


@case()
def full_precision_classes_under_a_callable_policy(lib):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = lib.wrap(
        model, auto_wrap_policy=always_wrap_policy, mixed_precision=MixedPrecision(param_dtype=BF16)
    )
    return [m.mixed_precision.param_dtype for m in lib.FSDP.fsdp_modules(model)]


@case()
def accumulating_in_bf16(lib):
    return lib.gradients_after(lib.wrap_blocks(toy(), mixed_precision=COMBINATIONS["param"]), "11")


@case(env={"FSDP_USE_FULL_PREC_IN_EVAL": "1"}, over={"use_orig_params": [True, False]})
def evaluation_in_full_precision(lib, use_orig_params):
    """FSDP_USE_FULL_PREC_IN_EVAL=1"""
    model = lib.wrap_blocks(
        toy(), mixed_precision=COMBINATIONS["all"], use_orig_params=use_orig_params
    )
    outputs = []
    for step in range(2):
        loss_of(model, lib.batch(step)).backward()
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            outputs.append(model(lib.batch(step)))
        model.train()
    assert outputs[0].dtype == F32
    return outputs


@case()
def a_float64_model_computes_in_float32(lib):
    model = lib.wrap(toy(dtype=F64), mixed_precision=MixedPrecision(param_dtype=F32))
    loss_of(model, lib.batch()).backward()
    return lib.gradients(model), {p.dtype for p in model.parameters()}


@case(over={"name": ["double", "half", "bfloat16"]})
def conversion_before_the_first_forward(lib, name):
    model = lib.wrap(Block(6), use_orig_params=True)
    getattr(model, name)()
    values = lib.full(model)
    x = torch.ones(2, 6, dtype=next(iter(values.values())).dtype)
    model(x).sum().backward()
    return values, lib.gradients(model)


@case()
def no_mixed_precision_at_all(lib):
    model = lib.wrap(Spy(), mixed_precision=MixedPrecision())
    x = torch.ones(1, 2)
    model(x)
    return model.seen[0] is x, model.weight_dtype, model.mixed_precision == MixedPrecision()


@case()
def the_configuration_is_not_changed(lib):
    mixed = MixedPrecision(param_dtype=BF16)
    model = lib.wrap_blocks(toy(), mixed_precision=mixed)
    model(lib.batch())
    return mixed == MixedPrecision(param_dtype=BF16), model.mixed_precision == mixed


test_torch, test_fsdpc = case.tests()
