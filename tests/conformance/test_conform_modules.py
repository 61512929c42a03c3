"""Ignored modules and states, meta-device models, param_init_fn."""

from __future__ import annotations

import torch
from outcome import wrong
from suite import BOTH, Cases
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from toys import Block, clean, loss_of, toy

case = Cases(__name__, __file__)


# --- ignored -------------------------------------------------------------------------------------


@case(raises=ValueError, words="ignored_modules and ignored_states")
def both_spellings(lib):
    model = toy()
    lib.wrap(model, ignored_modules=[model.head], ignored_states=[model.norm])


@case(raises=ValueError, over={"name": ["ignored_modules", "ignored_states"]})
def elements_of_another_type(lib, name):
    lib.wrap(toy(), **{name: [1]})


@case(raises=TypeError, words="iterable", over={"name": ["ignored_modules", "ignored_states"]})
def not_iterable(lib, name):
    lib.wrap(toy(), **{name: 3})


@case()
def nothing_ignored(lib):
    return lib.full(lib.wrap(toy(), ignored_modules=[])), lib.full(
        lib.wrap(toy(), ignored_states=iter([]))
    )


@case()
def everything_ignored(lib):
    model = toy()
    model = lib.wrap(model, ignored_modules=[model])
    return (
        lib.warned("top-level module"),
        model._has_params,
        [n for n, _ in model.named_parameters()],
    )


KINDS = {
    "module": lambda m: {"ignored_modules": [m.head]},
    "states-module": lambda m: {"ignored_states": [m.head]},
    "states-parameters": lambda m: {"ignored_states": list(m.head.parameters())},
    "generator": lambda m: {"ignored_states": (p for p in m.head.parameters())},
    "set": lambda m: {"ignored_modules": {m.head}},
}


@case(over={"kind": list(KINDS), "orig": BOTH})
def ignored_parameters_stay_as_they_are(lib, kind, orig):
    model = toy()
    weight = model.head.weight
    model = lib.wrap_blocks(model, use_orig_params=orig, **KINDS[kind](model))
    assert model.head.weight is weight and weight.shape == (13, 6)
    batch = torch.arange(10).reshape(2, 5)
    loss_of(model, batch).backward()
    return weight.grad, sorted({clean(n) for n, _ in model.named_parameters()})


@case()
def ignored_gradients_are_not_reduced(lib):
    model = toy()
    model = lib.wrap(model, ignored_modules=[model.head])
    loss_of(model, lib.batch()).backward()
    reference = toy()
    loss_of(reference, lib.batch()).backward()
    assert torch.allclose(model.head.weight.grad, reference.head.weight.grad)
    return model.head.weight.grad


@case()
def children_of_an_ignored_module(lib):
    model = toy()
    model = lib.wrap(model, ignored_modules=[model.blocks[0]])
    return model.blocks[0].up.weight.shape, sorted(lib.full(model))


@case()
def ignored_parameters_in_state_dicts(lib):
    model = toy()
    model = lib.wrap_blocks(model, ignored_modules=[model.head, model.blocks[0].norm])
    return model.state_dict()


@case()
def what_a_nested_unit_ignores(lib):
    model = toy()
    block = model.blocks[0]
    model.blocks[0] = lib.wrap(block, ignored_modules=[block.up])
    model = lib.wrap(model)
    return model.blocks[0].up.weight.shape, model.state_dict()


@case()
def ignored_parameters_are_not_cast(lib):
    model = toy()
    model = lib.wrap(
        model,
        ignored_modules=[model.embed],
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, cast_root_forward_inputs=False),
    )
    seen = []
    model.embed.register_forward_hook(lambda m, a, out: seen.append((m.weight.dtype, out.dtype)))
    lib.refuses(RuntimeError, model, lib.batch())
    return seen


@case()
def ignored_buffers_are_not_cast(lib):
    model = nn.ModuleDict({"a": nn.BatchNorm1d(3), "b": nn.BatchNorm1d(3)})
    mixed = MixedPrecision(buffer_dtype=torch.float64, _module_classes_to_ignore=())
    model = lib.wrap(model, mixed_precision=mixed, ignored_modules=[model["b"]])
    model.check_is_root()
    return {clean(n): b.dtype for n, b in model.named_buffers()}


@case()
def ignored_in_a_policy(lib):
    """Ignored parameters stay out of the units that a policy makes."""
    model = toy()
    ignored = [model.blocks[1].up.weight]
    model = lib.wrap_blocks(model, ignored_states=ignored)
    return model.blocks[1].up.weight.shape, lib.train(model)["losses"]


@case()
def a_shared_parameter_that_is_ignored(lib):
    model = toy(width=6, vocabulary=13)
    model.head.weight = model.embed.weight
    model = lib.wrap_blocks(model, nn.Embedding, ignored_states=[model.embed.weight])
    return model.head.weight is model.embed.weight, model.embed.weight.shape


# --- meta device ---------------------------------------------------------------------------------


class Filled(nn.Module):
    """A module that resets itself to known values."""

    def __init__(self, value=0.5, device="meta"):
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.empty(3, 2, device=device))
        self.register_buffer("scale", torch.empty(2, device=device))

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.fill_(self.value)
            self.scale.fill_(2 * self.value)

    def forward(self, x):
        return x @ self.weight * self.scale


@case(over={"orig": BOTH})
def resetting_parameters(lib, orig):
    model = nn.Sequential(Filled(0.5), nn.Sequential(Filled(0.25)))
    policy = ModuleWrapPolicy({nn.Sequential})
    model = lib.wrap(model, auto_wrap_policy=policy, use_orig_params=orig)
    return lib.full(model), [b.clone() for b in model.buffers()]


@case()
def torchs_modules_reset_themselves(lib):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4))
    values = lib.full(lib.wrap(model))
    assert all(v.isfinite().all() for v in values.values())
    return {n: (tuple(v.shape), v.dtype) for n, v in values.items()}, values["1.weight"]


@case()
def an_init_function(lib):
    asked = []

    def initialise(module):
        asked.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for p in module.parameters(recurse=False):
                p.fill_(0.5)

    model = lib.wrap_blocks(toy().to("meta"), param_init_fn=initialise)
    return sorted(asked), lib.full(model)


@case()
def an_init_function_without_meta_parameters(lib):
    """Without meta parameters, param_init_fn is not called."""
    asked = []
    values = lib.full(lib.wrap(toy(), param_init_fn=asked.append))
    return asked, values


@case()
def a_module_that_cannot_reset_itself(lib):
    class NoReset(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, device="meta"))

    return lib.refuses(AttributeError, lib.wrap, NoReset()), lib.warned("reset_parameters")


@case(raises=KeyError)
def an_exception_in_an_init_function(lib):
    def initialise(module):
        raise KeyError("mine")

    lib.wrap(toy().to("meta"), param_init_fn=initialise)


@case()
def units_on_meta_in_a_real_model(lib):
    model = nn.Sequential(Filled(0.5, "cpu"), lib.wrap(Filled(0.25)))
    model[0].reset_parameters()
    model = lib.wrap(model)
    return lib.full(model)


@case()
def meta_with_ignored_modules(lib):
    model = nn.ModuleDict({"a": Filled(0.5), "b": Filled(0.25)})
    model = lib.wrap(model, ignored_modules=[model["b"]])
    return model["b"].weight.is_meta, lib.full(model)["a.weight"]


@case()
def buffers_alone_on_meta(lib):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.empty(3, device="meta"))

        def reset_parameters(self):
            self.table.fill_(3.0)

    model = lib.wrap(nn.Sequential(Table(), nn.Linear(3, 3)))
    return model[0].table


@case(torch=wrong("tie"), fsdpc_does="keeps the tie")
def ties_on_meta(lib):
    """Tied weights on the meta device"""
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model = lib.wrap(model)
    with lib.FSDP.summon_full_params(model):
        assert model["a"].weight is model["b"].weight, "the tie is gone"


@case()
def training_after_meta(lib):
    def initialise(module):
        module.to_empty(device="cpu", recurse=False)
        torch.manual_seed(len(list(module.parameters())))
        with torch.no_grad():
            for p in module.parameters(recurse=False):
                p.normal_(std=0.3)

    return lib.train(lib.wrap_blocks(toy().to("meta"), param_init_fn=initialise))


@case()
def what_is_on_meta_in_an_outer_unit(lib):
    model = nn.Sequential(Block(6), Filled())
    torch.manual_seed(2)
    model[0] = lib.wrap(Block(6))
    return lib.full(lib.wrap(model))["1.weight"]


test_torch, test_fsdpc = case.tests()
