"""MixedPrecisionPolicy, OffloadPolicy, and dtypes."""

from __future__ import annotations

import dataclasses

import torch
from outcome import any_of, raises
from rows_library import RowsLibrary, linear
from suite import BOTH, Cases
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from toys import loss_of, toy

case = Cases(__name__, __file__, library=RowsLibrary, rtol=2e-2)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [None, BF16, FP16, FP32]


@case(over={"param": DTYPES, "reduce": DTYPES})
def gradients_of_a_policy(lib, param, reduce):
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    return lib.gradients_after(lib.shard_blocks(toy(), mp_policy=policy))


@case(over={"param": [BF16, FP16], "reduce": [None, FP32], "reshard": [None, True, False]})
def training_under_a_policy(lib, param, reduce, reshard):
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    model = lib.shard_blocks(toy(), mp_policy=policy, reshard_after_forward=reshard)
    return lib.train(model)


@case(over={"stored": [BF16, FP16, FP64], "reduce": [None, FP32]})
def models_of_other_dtypes(lib, stored, reduce):
    policy = MixedPrecisionPolicy(reduce_dtype=reduce)
    return lib.gradients_after(lib.shard_blocks(toy(dtype=stored), mp_policy=policy))


@case(world=4, over={"reduce": [None, FP32]})
def replicas_under_a_policy(lib, reduce):
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce)
    return lib.gradients_after(lib.shard_blocks(toy(), mp_policy=policy, mesh=lib.mesh(2, 2)))


@case(over={"output": DTYPES, "param": [None, BF16]})
def dtypes_of_outputs(lib, output, param):
    policy = MixedPrecisionPolicy(param_dtype=param, output_dtype=output)
    model = lib.fully_shard(linear(), mp_policy=policy)
    out = model(torch.ones(2, 3))
    out.float().sum().backward()
    return str(out.dtype), lib.gradients(model)


class Nested(nn.Module):
    """A module that returns the dtypes that reach its forward."""

    def __init__(self):
        super().__init__()
        self.inner = linear(3, 3)

    def forward(self, a, pair, *, table, number=1.0):
        y = self.inner(a.to(self.inner.weight.dtype))
        kinds = [a.dtype, pair[0].dtype, pair[1].dtype, table["x"].dtype, type(number)]
        return {"y": y, "kinds": [*map(str, kinds)], "more": (y * 2, [y + 1])}


@case(over={"cast": BOTH, "output": [None, FP32]})
def nested_inputs_and_outputs(lib, cast, output):
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=cast, output_dtype=output)
    model = lib.fully_shard(Nested(), mp_policy=policy)
    x = torch.ones(1, 3)
    found = model(x, (x, torch.ones(1, dtype=torch.int64)), table={"x": x.double()})
    outputs = [found["y"], found["more"][0], found["more"][1][0]]
    return found["kinds"], [str(t.dtype) for t in outputs]


@case(over={"where": ["blocks", "root"]})
def policies_that_differ_between_units(lib, where):
    low = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)
    model = toy()
    for block in model.blocks:
        lib.fully_shard(block, **({"mp_policy": low} if where == "blocks" else {}))
    if where == "root":
        low = dataclasses.replace(low, cast_forward_inputs=True)
        for block in model.blocks:
            block.register_forward_pre_hook(lambda m, args: (args[0].float(),), prepend=True)
            block.register_forward_hook(lambda m, args, out: out.to(BF16))
    lib.fully_shard(model, **({"mp_policy": low} if where == "root" else {}))
    return lib.gradients_after(model)


@case()
def norms_kept_in_full_precision(lib):
    low = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=BF16)
    full = MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16)
    model = toy()
    for module in list(model.modules()):
        if isinstance(module, nn.LayerNorm):
            lib.fully_shard(module, mp_policy=full)
    lib.shard_blocks(model, mp_policy=low)
    return lib.gradients_after(model)


@case()
def buffers_are_never_cast(lib):
    model = nn.Sequential(nn.BatchNorm1d(3), linear(3, 3))
    lib.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    return {n: str(b.dtype) for n, b in model.named_buffers()}


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = linear(3, 3)
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)

    def forward(self, x):
        assert self.table.dtype == torch.int64
        return self.inner(x) + self.table[:3]


@case()
def integers_are_never_cast(lib):
    model = lib.fully_shard(Counted(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    out = model(torch.ones(2, 3) + lib.rank)
    out.float().sum().backward()
    return lib.gradients(model), lib.full(model)


@case(over={"optimizer": ["SGD", "AdamW"]})
def dtypes_of_gradients_and_states(lib, optimizer):
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    model = lib.fully_shard(toy(), mp_policy=policy)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    loss_of(model, lib.batch()).backward()
    model.reshard()
    kinds = {str(p.grad.dtype) for p in model.parameters()}
    made.step()
    states = {str(v.dtype) for s in made.state.values() for v in s.values() if v is not None}
    return kinds, states


@case()
def full_parameters_in_forward(lib):
    """A forward pre-hook sees the full parameters; both libraries give them the same dtype."""
    model, seen = linear(), []
    model.register_forward_pre_hook(lambda m, args: seen.append(str(m.weight.dtype)))
    lib.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model(torch.ones(1, 3))
    return seen


@case()
def unsharding_under_a_policy(lib):
    model = lib.fully_shard(linear(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model.unshard()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@case(over={"when": ["before", "after"]})
def a_model_converted_around_sharding(lib, when):
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    model = toy()
    if when == "before":
        model = model.to(BF16)
    lib.fully_shard(model, mp_policy=policy)
    if when == "after":
        model = model.to(BF16)
    return lib.gradients_after(model)


@case(over={"which": ["param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"]})
def fields_of_a_policy(lib, which):
    """Both libraries have the same frozen class, with the same defaults."""
    kind = lib.name_of("MixedPrecisionPolicy")
    assert kind is MixedPrecisionPolicy
    lib.refuses(dataclasses.FrozenInstanceError, setattr, kind(), which, None)
    return getattr(kind(), which)


@case()
def frozen_parameters_of_several_dtypes(lib):
    model = nn.Sequential(linear(3, 3, dtype=BF16), linear(3, 3)).requires_grad_(False)
    model[0].register_forward_hook(lambda m, args, out: out.float())
    model[0].register_forward_pre_hook(lambda m, args: (args[0].bfloat16(),))
    lib.fully_shard(model)
    return model(torch.ones(1, 3)), lib.full(model)


@case(
    torch=raises(AssertionError, "uniform original parameter dtype"),
    fsdpc_does="trains parameters of several dtypes in one unit",
)
def trainable_parameters_of_several_dtypes(lib):
    model = nn.Sequential(linear(3, 3, dtype=BF16), linear(3, 3))
    model[0].register_forward_hook(lambda m, args, out: out.float())
    model[0].register_forward_pre_hook(lambda m, args: (args[0].bfloat16(),))
    reference = [linear(3, 3, dtype=BF16), linear(3, 3)]
    lib.fully_shard(model)
    model(torch.ones(1, 3)).sum().backward()
    reference[1](reference[0](torch.ones(1, 3, dtype=BF16)).float()).sum().backward()
    for part, plain in zip(model, reference, strict=True):
        for name, grad in lib.gradients(part).items():
            assert torch.equal(grad, getattr(plain, name).grad), name


@case(over={"dtype": [BF16, FP16]})
def autocast(lib, dtype):
    model = lib.shard_blocks(toy())
    return lib.train(model, within=lambda: torch.autocast("cpu", dtype=dtype))


@case()
def autocast_inside_a_module(lib):
    class Careful(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", dtype=BF16):
                return super().forward(x).float()

    torch.manual_seed(0)
    model = lib.fully_shard(Careful(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    return lib.gradients(model)


@case()
def accumulation_keeps_small_gradients(lib):
    """Gradients of micro-batches are added in reduce_dtype, because 256 + 1 is 256 in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    model = nn.Linear(2, 1, bias=False)
    lib.fully_shard(model, mp_policy=policy)
    for micro, value in enumerate([256.0, 1.0, 1.0, 1.0]):
        model.set_requires_gradient_sync(micro == 3)
        model(torch.full((1, 2), value)).sum().backward()
    grad = lib.gradients(model)["weight"]
    assert torch.equal(grad, torch.full((1, 2), 259.0)), grad


# --- offload -------------------------------------------------------------------------------------


@case(over={"reshard": [None, True, False]})
def offloading_without_pinned_memory(lib, reshard):
    policy = CPUOffloadPolicy(pin_memory=False)
    model = lib.shard_blocks(toy(), offload_policy=policy, reshard_after_forward=reshard)
    return lib.train(model)


@case(
    torch=any_of(raises(RuntimeError, "accelerator"), raises(RuntimeError, "NVIDIA")),
    fsdpc_does="keeps shards in host memory, where they are",
)
def offloading_on_the_cpu(lib):
    """CPUOffloadPolicy() without an accelerator"""
    model = lib.shard_blocks(toy(), offload_policy=CPUOffloadPolicy())
    plain = lib.train(lib.shard_blocks(toy()))
    got = lib.train(model)
    for name, value in plain["parameters"].items():
        assert torch.equal(got["parameters"][name], value), name


@case()
def no_offloading(lib):
    return lib.train(lib.shard_blocks(toy(), offload_policy=OffloadPolicy()))


@case()
def offloading_one_unit(lib):
    model = toy()
    lib.fully_shard(model.blocks[0], offload_policy=CPUOffloadPolicy(pin_memory=False))
    return lib.train(lib.fully_shard(model))


@case(over={"sync": BOTH})
def offloading_with_accumulation(lib, sync):
    model = lib.shard_blocks(toy(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    lib.backward(model, 0, 0, sync)
    lib.backward(model, 0, 1)
    return lib.gradients(model)


test_torch, test_fsdpc = case.tests()
