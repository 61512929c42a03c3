"""Errors and warnings that users, and the code of frameworks, read.

If torch raises the same error, fsdpc's text begins with torch's words. If the caller has swapped
two arguments, the text names them. No text mentions fsdpc's internals.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from checkpoints import LOCAL, SHARDED, typed
from harness import ranks
from torch import nn
from toys import check_equal, loss_of, tokens, toy, wrap, wrap_blocks

import fsdpc
from fsdpc import FullyShardedDataParallel as FSDP

BOTH = pytest.mark.parametrize("use_orig_params", [True, False])


@ranks(2)
@BOTH
@pytest.mark.parametrize("kind", [SHARDED, LOCAL], ids=lambda kind: kind.name)
def test_our_own_calls_warn_of_nothing(rank, world, use_orig_params, kind):
    """torch warns if the user uses a ShardedTensor, but not if fsdpc uses one."""
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model, tokens(rank, 0)).backward()
    optimizer.step()
    with typed(model, kind), warnings.catch_warnings():
        warnings.simplefilter("error")
        state = model.state_dict()
        model.load_state_dict(state)
        moments = FSDP.optim_state_dict(model, optimizer)
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, moments)
        optimizer.load_state_dict(loaded)
    value = next(v for v in state.values() if hasattr(v, "local_shards"))
    with pytest.warns(FutureWarning, match="deprecating ShardedTensor"):
        _ = value.dtype


@ranks(2)
@BOTH
def test_an_optimizer_of_other_parameters(rank, world, use_orig_params):
    module = toy()
    optimizer = torch.optim.Adam(module.parameters())
    model = wrap_blocks("fsdpc", module, use_orig_params=use_orig_params)
    other = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    loss_of(model, tokens(rank, 0)).backward()
    optimizer.step()
    if use_orig_params:
        FSDP.optim_state_dict(model, optimizer)
        text = r"parameter 'embed.weight' of unit .*is not in the given model"
        with pytest.raises(KeyError, match=text):
            FSDP.optim_state_dict(other, optimizer)
        return
    text = (
        r"made before the model was wrapped: a flat parameter has replaced parameter "
        r"'embed\.weight' of unit .*steps change nothing\. Make the optimizer from "
        r"model\.parameters\(\) after wrapping"
    )
    with pytest.raises(KeyError, match=text):
        FSDP.optim_state_dict(model, optimizer)
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(KeyError, match=r"of shape \(3,\) that is not in the model"):
        FSDP.optim_state_dict(model, stranger)


@ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_swapped_arguments_are_named(rank, world):
    model = wrap_blocks("fsdpc", toy())
    optimizer = torch.optim.Adam(model.parameters())
    state = FSDP.optim_state_dict(model, optimizer)
    of_model = r"optim_state_dict.*the model must be an nn\.Module but got {}; check the order"
    of_optim = r"optim_state_dict.*optim must be an optimizer but got {}; check the order"
    for call, text in [
        (lambda: FSDP.optim_state_dict(optimizer, model), of_model.format("Adam")),
        (lambda: FSDP.optim_state_dict(model, state), of_optim.format("dict")),
        # These calls pass the arguments in the order of older releases.
        (lambda: FSDP.optim_state_dict_to_load(state, model, optimizer), of_model.format("dict")),
        (lambda: FSDP.optim_state_dict_to_load(model, state, optimizer), of_optim.format("dict")),
        (lambda: FSDP.full_optim_state_dict(optimizer, model), of_model.format("Adam")),
        (lambda: FSDP.sharded_optim_state_dict(optimizer, model), of_model.format("Adam")),
        (lambda: FSDP.shard_full_optim_state_dict(model, state), of_model.format("dict")),
        (lambda: FSDP.scatter_full_optim_state_dict(model, state), of_model.format("dict")),
        (
            lambda: FSDP.flatten_sharded_optim_state_dict(state, optimizer, model),
            of_model.format("Adam"),
        ),
        (lambda: FSDP.rekey_optim_state_dict(state, model, None), of_model.format("NoneType")),
        (lambda: FSDP.state_dict_type(SHARDED, model).__enter__(), "state_dict_type: the model"),
        (lambda: FSDP.set_state_dict_type(model, model), "is not a StateDictType"),
        (lambda: FSDP.get_state_dict_type(state), "get_state_dict_type: the model"),
        (lambda: FSDP.summon_full_params(state), "summon_full_params: the model"),
        (lambda: FSDP.fsdp_modules(state), "fsdp_modules: the model"),
    ]:
        with pytest.raises(TypeError, match=text):
            call()
    with pytest.raises(KeyError, match="not a StateDictType"):
        FSDP.set_state_dict_type(model, "sharded")
    wrap("fsdpc", toy())


def convolutions():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3), torch.nn.Flatten()
    )


@ranks(1, 2)
@BOTH
@pytest.mark.parametrize("when", ["before", "after"])
def test_channels_last_is_not_dropped_without_a_word(rank, world, use_orig_params, when):
    plain, model = convolutions(), convolutions()
    text = r"channels_last is not kept for parameters '0\.weight', '2\.weight' of unit"

    def last(module):
        return module.to(memory_format=torch.channels_last)

    if when == "before":
        last(model)
        with pytest.warns(UserWarning, match=text):
            model = wrap("fsdpc", model, use_orig_params=use_orig_params)
    else:
        model = wrap("fsdpc", model, use_orig_params=use_orig_params)
        with pytest.warns(UserWarning, match=text):
            last(model)
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x), plain(x))
    check = {name: value.clone() for name, value in plain.state_dict().items()}
    check_equal(model.state_dict(), check, "state dict")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.double()


@ranks(2)
@pytest.mark.parametrize("shard", [fsdpc.fully_shard, fsdpc.FullyShardedDataParallel])
def test_modules_that_cannot_be_sharded_say_the_way_out(rank, world, shard):
    scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    for module, words in (
        (scripted, "'0.weight' of .* belongs to a TorchScript module.*shard the module that"),
        (nn.Sequential(nn.LazyLinear(4)), "'0.weight' of .* has no shape yet.*run a forward"),
    ):
        with pytest.raises(ValueError, match=words):
            shard(module)
    model = shard(nn.Embedding(10, 4, sparse=True))
    with pytest.raises(fsdpc.StateError, match="weight of unit .* is sparse.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
