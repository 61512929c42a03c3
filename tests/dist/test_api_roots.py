"""Units that are used under one root and then under another, as when a model is wrapped again."""

from __future__ import annotations

import gc

import pytest
import torch
from harness import ranks
from torch import nn
from toys import check_equal, full_gradients, full_parameters, wrap

from fsdpc import StateError

BOTH = pytest.mark.parametrize("use_orig_params", [True, False])


def parts(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


def batch(rank, step=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


@ranks(1, 2)
@BOTH
def test_two_models_use_a_unit_alternately(rank, world, use_orig_params):
    """Two models with one encoder and different heads run in turn; the encoder also runs alone."""
    options = {"use_orig_params": use_orig_params}
    plain = parts()
    encoder, *heads = (wrap("fsdpc", part, **options) for part in parts())
    models = [wrap("fsdpc", nn.Sequential(encoder, head), **options) for head in heads]
    optimizers = [
        torch.optim.SGD([p for part in group for p in part.parameters()], 0.1)
        for group in (plain, (encoder, *heads))
    ]
    for step in range(3):
        for model, head in zip(models, plain[1:], strict=True):
            loss = model(batch(rank, step)).square().mean()
            loss.backward()
            for other in range(world):
                expected = head(plain[0](batch(other, step))).square().mean()
                (expected / world).backward()
                if other == rank:
                    check_equal({"loss": loss.detach()}, {"loss": expected.detach()}, "", rtol=1e-6)
        with torch.no_grad():
            check_equal(
                {"y": encoder(batch(rank))}, {"y": plain[0](batch(rank))}, "alone", rtol=1e-6
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model, head in zip(models, plain[1:], strict=True):
        whole = nn.Sequential(plain[0], head)
        check_equal(full_parameters(model), dict(whole.named_parameters()), "values", rtol=1e-5)


@ranks(2)
@BOTH
@pytest.mark.parametrize("keep", [True, False])
def test_wrapped_again(rank, world, use_orig_params, keep):
    """A model that was used becomes part of a larger one, with its old root or without it."""
    options = {"use_orig_params": use_orig_params}
    first, second, third = parts()
    plain = parts()
    inner = wrap("fsdpc", first, **options)
    model = wrap("fsdpc", nn.Sequential(inner, second), **options)
    model(batch(rank)).sum().backward()
    model.zero_grad()
    if keep:
        larger = wrap("fsdpc", nn.Sequential(model, third), **options)
    else:
        with type(model).summon_full_params(model):
            second = nn.Linear(4, 4)
            second.load_state_dict(plain[1].state_dict())
        del model
        gc.collect()
        larger = wrap("fsdpc", nn.Sequential(nn.Sequential(inner, second), third), **options)
    larger(batch(rank)).sum().backward()
    for other in range(world):
        (plain[2](plain[1](plain[0](batch(other)))).sum() / world).backward()
    expected = {
        n: p.grad for n, p in nn.Sequential(nn.Sequential(*plain[:2]), plain[2]).named_parameters()
    }
    check_equal(full_gradients(larger), expected, "gradients", rtol=1e-5)


@ranks(2)
def test_not_while_the_other_model_is_in_a_step(rank, world):
    encoder, head, other = (wrap("fsdpc", part) for part in parts())
    model = wrap("fsdpc", nn.Sequential(encoder, head))
    second = wrap("fsdpc", nn.Sequential(encoder, other))

    def attempt(*args):
        text = r"is in forward as part of another model on rank . so Sequential .*copy\.deepcopy"
        with pytest.raises(StateError, match=text.replace("rank . so", "rank ., so")):
            second(batch(rank))

    handle = head.module.register_forward_hook(attempt)
    model(batch(rank)).sum().backward()
    handle.remove()
    second(batch(rank)).sum().backward()
    model(batch(rank)).sum().backward()
