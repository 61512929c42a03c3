"""Cases that run on both interfaces: steps, clipping, accumulation, state dicts."""

from __future__ import annotations

import torch
from outcome import wrong
from suite import BOTH, DOORS, Cases
from torch import nn
from toys import Block, loss_of, toy

case = Cases(__name__, __file__)

TWO = [door for door in DOORS if door != "original"]
SHOWN = [door for door in DOORS if door != "flat"]  # the interfaces that show parameters by name


# --- steps ---------------------------------------------------------------------------------------


@case(doors=DOORS)
def backwards_add_up(lib):
    return lib.gradients_after(lib.units(toy()), "111")


@case(over={"set_to_none": BOTH}, doors=DOORS)
def zero_grad_of_an_optimizer(lib, set_to_none):
    return lib.train(lib.units(toy()), set_to_none=set_to_none)


@case(over={"set_to_none": BOTH}, doors=DOORS)
def zero_grad_of_a_model(lib, set_to_none):
    model = lib.units(toy())
    lib.backward(model)
    model.zero_grad(set_to_none=set_to_none)
    cleared = lib.gradients(model), {p.grad is None for p in model.parameters() if p.numel()}
    return cleared, lib.gradients_after(model)


@case(doors=SHOWN)
def groups_of_parameters(lib):
    model = lib.units(toy())
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": rest, "weight_decay": 0.5}, {"params": norms, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, weight_decay=0.0)
    return lib.full_after(model, optimizer=optimizer)


@case(over={"when": ["before forward", "before backward", "after step"]}, doors=TWO)
def an_evaluation_in_between(lib, when):
    model = lib.units(toy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []

    def evaluate(now):
        if when == now:
            model.eval()
            with torch.no_grad():
                outputs.append(model(lib.batch(9)))
            model.train()

    for step in range(3):
        evaluate("before forward")
        loss = loss_of(model, lib.batch(step))
        evaluate("before backward")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        evaluate("after step")
    return outputs, lib.full(model)


@case(over={"by": ["backward", "autograd.grad"]}, doors=DOORS)
def gradients_of_inputs(lib, by):
    model = lib.units(nn.Sequential(Block(6), Block(6)))
    x = torch.full((2, 6), 0.5 + lib.rank, requires_grad=True)
    loss = model(x).square().sum()
    if by == "autograd.grad":
        return torch.autograd.grad(loss, x)
    loss.backward()
    return x.grad, lib.gradients(model)


@case(world=4, torch=wrong("elements"), fsdpc_does="adds in fp32 and rounds once", doors=SHOWN)
def a_mean_in_bfloat16(lib):
    """the mean over four ranks of gradients in bfloat16"""
    model = nn.Linear(64, 64, bias=False)
    model = lib.units(model, **lib.precision(reduce_dtype=torch.bfloat16))
    grads = [
        torch.randn(64, 64, generator=torch.Generator().manual_seed(r)).bfloat16().float()
        for r in range(lib.world)
    ]
    (model(torch.eye(64)) * grads[lib.rank].t()).sum().backward()
    mean = sum(g.double() for g in grads) / lib.world
    got = lib.gradients(model)["weight"].double()
    far = int(((got - mean).abs() > mean.abs() * 2.0**-8 * 1.01).sum())
    assert far == 0, f"{far} elements differ by more than one rounding"


# --- accumulation --------------------------------------------------------------------------------


@case(over={"pattern": ["01", "001", "0101", "1001", "0011", "1101", "0110"]}, doors=TWO)
def passes_with_and_without_sync(lib, pattern):
    model = lib.units(toy())
    if pattern[-1] == "1":
        return lib.gradients_after(model, pattern)
    # If the last pass does not reduce, .grad is not specified, and the case returns nothing.
    for micro, letter in enumerate(pattern):
        lib.backward(model, 0, micro, letter == "1")


@case(over={"param": [torch.bfloat16, torch.float16]}, rtol=2e-2, doors=TWO)
def accumulation_in_low_precision(lib, param):
    model = lib.units(toy(), **lib.precision(param_dtype=param, reduce_dtype=torch.float32))
    return lib.gradients_after(model, "001")


# --- clipping ------------------------------------------------------------------------------------


@case(world=4, doors=TWO)
def clipping_with_replicas(lib):
    model = lib.units(toy(), **lib.replicas())
    lib.backward(model)
    return lib.clip(model, 0.1), lib.gradients(model)


@case(doors=TWO)
def the_norm_of_the_unsharded_model(lib):
    model, reference = lib.units(toy()), toy()
    batch = torch.arange(10).reshape(2, 5)
    loss_of(model, batch).backward()
    loss_of(reference, batch).backward()
    norm = lib.clip(model, 0.1)
    assert torch.allclose(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    return norm


@case(doors=SHOWN)
def clipping_in_training(lib):
    model = lib.units(toy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        lib.backward(model, step)
        lib.clip(model, 0.2)
        optimizer.step()
        optimizer.zero_grad()
    return lib.full(model)


# --- state dicts ---------------------------------------------------------------------------------


@case(over={"keep": BOTH, "prefix": ["", "model."]}, doors=TWO)
def arguments_of_state_dict(lib, keep, prefix):
    state = lib.units(toy()).state_dict(keep_vars=keep, prefix=prefix)
    return lib.values(state), not keep and [v.requires_grad for v in state.values()]


@case(doors=TWO)
def state_dict_of_an_inner_unit(lib):
    return lib.values(lib.units(toy()).blocks[1].state_dict())


@case(doors=DOORS)
def state_dict_with_tied_weights(lib):
    model = toy()
    model.head.weight = model.embed.weight
    state = lib.units(model).state_dict()
    return dict(sorted(lib.values(state).items()))


def without(state, *names):
    return {k: v for k, v in state.items() if k not in names}


def loaded(lib, state, **options):
    model = lib.units(toy(seed=1))
    return model, model.load_state_dict(state, **options)


def saved(lib, **sizes):
    return lib.units(toy(seed=2, **sizes)).state_dict()


@case(
    raises=RuntimeError,
    words="missing key",
    over={"key": ["head.bias", "blocks.0.up.weight"]},
    doors=TWO,
)
def a_missing_key(lib, key):
    loaded(lib, without(saved(lib), key))


@case(raises=RuntimeError, words="unexpected key", doors=TWO)
def an_unexpected_key(lib):
    loaded(lib, {**saved(lib), "other": torch.ones(1)})


@case(raises=RuntimeError, words="size mismatch", doors=TWO)
def a_value_of_another_shape(lib):
    loaded(lib, saved(lib, vocabulary=14))


@case(doors=TWO)
def not_strict(lib):
    state = {**without(saved(lib), "blocks.0.up.weight"), "other": torch.ones(1)}
    model, result = loaded(lib, state, strict=False)
    return result.missing_keys, result.unexpected_keys, lib.full(model)


test_torch, test_fsdpc = case.tests()
