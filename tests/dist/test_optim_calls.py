"""Tests of the calls around optimizer state dicts: older methods, optimizers with names, unmanaged
parameters, state of unusual shapes, mistakes, and the memory that the calls need.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks, shorten_deadlines
from optim_runs import (
    Run,
    adam,
    both,
    check_dict,
    check_states,
    load,
    mixed,
    named,
    on_rank_0,
    save,
    start,
)
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType, ShardingStrategy
from toys import Toy, loss_of, tokens, toy, wrap, wrap_blocks

import fsdpc
from fsdpc import FSDP

# --- the older methods ---------------------------------------------------------------------------


@ranks(2)
@both
def test_older_methods(rank, world, use_orig_params):
    run = start(rank, mixed(), use_orig_params=use_orig_params)
    expected = run.expected()
    with pytest.warns(FutureWarning, match="full_optim_state_dict"):
        first = FSDP.full_optim_state_dict(run.model, run.optim)
    assert bool(first) == (rank == 0)
    with pytest.warns(FutureWarning, match="sharded_optim_state_dict"):
        rows = FSDP.sharded_optim_state_dict(run.model, run.optim)
    warnings.simplefilter("ignore", FutureWarning)
    whole = FSDP.full_optim_state_dict(run.model, run.optim, rank0_only=False)
    check_dict(whole, expected)
    check_dict(
        FSDP.full_optim_state_dict(run.model, run.optim, run.model.parameters(), rank0_only=False),
        expected,
    )
    new = start(rank, mixed(), steps=0, use_orig_params=use_orig_params)
    ways = {
        "shard_full_optim_state_dict": [
            lambda call: call(whole, new.model, optim=new.optim),
            lambda call: call(whole, new.model),
            lambda call: call(whole, new.model, new.optim.param_groups),
        ],
        "scatter_full_optim_state_dict": [
            lambda call: call(first or None, new.model, optim=new.optim),
            lambda call: call(first or None, new.model, group=dist.group.WORLD),
        ],
        "flatten_sharded_optim_state_dict": [lambda call: call(rows, new.model, new.optim)],
    }
    for name, calls in ways.items():
        for call in calls:
            with pytest.warns(FutureWarning, match=name):
                to_load = call(getattr(FSDP, name))
            new.optim.load_state_dict(to_load)
            check_dict(save(new), expected)
            new.optim.load_state_dict(adam(new.model).state_dict())


@ranks(2)
def test_rekey(rank, world):
    run = start(rank, toy())
    whole, plain = save(run), run.reference.master
    by_id = FSDP.rekey_optim_state_dict(whole, OptimStateKeyType.PARAM_ID, plain)
    fresh = adam(plain)
    fresh.load_state_dict(by_id)
    check_dict(named(plain, fresh), run.expected())
    by_name = FSDP.rekey_optim_state_dict(
        fresh.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=fresh
    )
    check_dict(by_name, whole)
    assert FSDP.rekey_optim_state_dict(by_name, OptimStateKeyType.PARAM_NAME, plain) is by_name
    new = start(rank, toy(), steps=0)
    load(new, by_name)
    check_dict(save(new), whole)
    with pytest.raises(ValueError, match="Invalid parameter keys"):
        FSDP.rekey_optim_state_dict({"state": {"a": {}, 1: {}}}, OptimStateKeyType.PARAM_ID, plain)
    with pytest.raises(AssertionError, match="PARAM_NAME or PARAM_ID"):
        FSDP.rekey_optim_state_dict(by_name, "names", plain)
    tied = Toy()
    tied.head.weight = tied.embed.weight
    with pytest.raises(RuntimeError, match=r"one parameter name but got 2"):
        FSDP.rekey_optim_state_dict(by_id, OptimStateKeyType.PARAM_NAME, tied)


# --- optimizers with names -----------------------------------------------------------------------


@ranks(2)
@both
def test_named_optimizer(rank, world, use_orig_params):
    from torch.distributed.optim.named_optimizer import _NamedOptimizer  # this import takes long

    fsdpc.install()  # the optimizer asks torch's class for the state of its module
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    optim = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, None, model, lr=1e-2)
    run = start(rank, toy(), use_orig_params=use_orig_params)
    for number in range(2):
        loss_of(model, tokens(rank, number)).backward()
        optim.step()
        optim._optimizer.zero_grad()
    saved = FSDP.optim_state_dict(model, optim, optim.state_dict())
    check_states(saved["state"], run.expected()["state"])
    other = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    fresh = _NamedOptimizer(other.named_parameters(), torch.optim.Adam, None, other, lr=1e-2)
    fresh.init_state()
    fresh.load_state_dict(saved)
    check_states(FSDP.optim_state_dict(other, fresh._optimizer)["state"], saved["state"])


# --- what the optimizer holds beside the units ---------------------------------------------------


def with_plain(rank, use_orig_params):
    model = toy()
    return wrap_blocks(
        "fsdpc",
        model,
        ignored_states=list(model.head.parameters()),
        use_orig_params=use_orig_params,
    )


@ranks(2)
@both
def test_unmanaged_parameters(rank, world, use_orig_params):
    model = with_plain(rank, use_orig_params)
    run = Run(model, adam(model), None, None, rank)
    batch = tokens(0, 0)  # the same batch on all ranks, because no one reduces unmanaged gradients
    loss_of(model, batch).backward()
    run.optim.step()
    saved = save(run)
    mine = run.optim.state[model.head.bias]
    assert torch.equal(saved["state"]["head.bias"]["exp_avg"], mine["exp_avg"])
    assert saved["state"]["head.bias"]["exp_avg"].data_ptr() != mine["exp_avg"].data_ptr()
    assert set(saved["state"]) == {n for n, _ in toy().named_parameters()}
    for where in ("all", "rank 0"):
        other = with_plain(rank, use_orig_params)
        again = Run(other, adam(other), None, None, rank)
        if where == "all":
            load(again, saved)
        else:
            with on_rank_0(other):
                load(again, saved if rank == 0 else {})
        check_dict(save(again), saved)


@ranks(2)
@both
def test_units_inside_a_plain_model(rank, world, use_orig_params):
    model = toy()
    for i in range(2):
        model.blocks[i] = wrap("fsdpc", model.blocks[i], use_orig_params=use_orig_params)
    run = Run(model, adam(model), None, None, rank)
    loss_of(model, tokens(0, 0)).backward()
    run.optim.step()
    saved = FSDP.optim_state_dict(model, run.optim)
    assert set(saved["state"]) == {n for n, _ in toy().named_parameters()}
    fresh = adam(model)
    FSDP.optim_state_dict_to_load(model, fresh, saved, load_directly=True)
    check_dict(FSDP.optim_state_dict(model, fresh), saved)


@ranks(2)
def test_entries_that_are_no_parameters_go_along(rank, world):
    run = start(rank, toy())
    state = run.optim.state_dict()
    state["state"]["schedule"] = {"calls": 3, "table": torch.arange(4)}
    with pytest.warns(UserWarning, match="Found a optim state, schedule"):
        saved = FSDP.optim_state_dict(run.model, run.optim, state)
    assert saved["state"]["schedule"]["calls"] == 3
    with on_rank_0(run.model):
        loaded = FSDP.optim_state_dict_to_load(run.model, run.optim, saved if rank == 0 else {})
    assert loaded["state"]["schedule"]["calls"] == 3
    assert torch.equal(loaded["state"]["schedule"]["table"], torch.arange(4))


@ranks(2)
@both
def test_parameters_without_state(rank, world, use_orig_params):
    class Unused(Toy):
        def __init__(self):
            super().__init__()
            self.spare = nn.Parameter(torch.ones(5, 3))

    torch.manual_seed(0)
    run = start(rank, Unused(), use_orig_params=use_orig_params)
    saved = save(run)
    if use_orig_params:
        check_dict(saved, run.expected())
        assert "spare" not in saved["state"]
    else:  # the flat parameter also has state for the unused `spare`
        assert not saved["state"]["spare"]["exp_avg"].any()
    torch.manual_seed(0)
    again = start(rank, Unused(), steps=0, use_orig_params=not use_orig_params)
    load(again, saved)
    got = save(again)
    for name, state in run.expected()["state"].items():
        check_states({name: got["state"][name]}, {name: state})
    empty = start(rank, toy(), steps=0, use_orig_params=use_orig_params)
    assert save(empty)["state"] == {}
    load(run, {**saved, "state": {}})
    assert not run.optim.state


class Table(torch.optim.SGD):
    """An optimizer whose state of each parameter has a list and a table. The shape of the table
    does not depend on the shape of the parameter.
    """

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("table", torch.arange(4.0)).add_(1)
                    self.state[p].setdefault("calls", []).append(1)
        return super().step(closure)


@ranks(3)  # on 2 ranks, no parameter of these units would be on both ranks
@both
def test_state_of_its_own_shape_is_kept_where_ranks_agree(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    run = Run(model, Table(model.parameters(), lr=0.1), None, None, rank)
    loss_of(model, tokens(rank, 0)).backward()
    run.optim.step()
    saved = save(run)
    for state in saved["state"].values():
        assert torch.equal(state["table"], torch.arange(1.0, 5.0)) and state["calls"] == [1]
    other = wrap_blocks("fsdpc", toy(), use_orig_params=not use_orig_params)
    again = Run(other, Table(other.parameters(), lr=0.1), None, None, rank)
    load(again, saved)
    check_dict(save(again), saved)
    if rank == 2:
        for state in run.optim.state.values():
            state["table"][0] = 7
    with pytest.raises(AssertionError, match=r"different values for table.*cannot be assembled"):
        save(run)


def factored(rank, **options):
    model = wrap_blocks("fsdpc", toy(), **options)
    return Run(model, torch.optim.Adafactor(model.parameters(), lr=1e-2), None, None, rank)


@ranks(2)
def test_state_per_row(rank, world):
    plain = toy()
    optim = torch.optim.Adafactor(plain.parameters(), lr=1e-2)
    loss_of(plain, tokens(0, 0)).backward()
    optim.step()
    rows = named(plain, optim)
    assert rows["state"]["head.weight"]["row_var"].shape == (13, 1)
    whole = factored(rank, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    load(whole, rows)  # NO_SHARD splits no parameter
    check_dict(save(whole), rows)
    with pytest.raises(ValueError, match=r"row_var of .*weight.*range of elements"):
        load(factored(rank, use_orig_params=True), rows)
    cut = factored(rank)
    with pytest.raises(ValueError, match="Differing optimizer state names"):
        load(cut, rows)
    loss_of(cut.model, tokens(rank, 0)).backward()
    cut.optim.step()
    saved = save(cut)  # on shards, Adafactor keeps states per element
    assert saved["state"]["head.weight"]["variance"].shape == (13, 6)
    again = factored(rank)
    load(again, saved)
    check_dict(save(again), saved)


@ranks(3)
@both
def test_a_group_of_some_ranks(rank, world, use_orig_params):
    pair = dist.new_group([1, 2])
    if rank == 0:
        return
    model = wrap_blocks("fsdpc", toy(), process_group=pair, use_orig_params=use_orig_params)
    run = Run(model, adam(model), None, None, rank)
    loss_of(model, tokens(rank, 0)).backward()
    run.optim.step()
    expected = save(run)
    with on_rank_0(model):
        saved = FSDP.optim_state_dict(model, run.optim, group=pair)
        assert bool(saved) == (rank == 1)
        fresh = adam(model)
        FSDP.optim_state_dict_to_load(model, fresh, saved, load_directly=True, group=pair)
    check_dict(FSDP.optim_state_dict(model, fresh), expected)


# --- mistakes ------------------------------------------------------------------------------------


@ranks(3)
@both
def test_state_that_a_rank_lacks(rank, world, use_orig_params):
    run = start(rank, toy(), use_orig_params=use_orig_params)
    state = run.optim.state_dict()
    if rank == 2:
        names = [n for n, _ in run.model.named_parameters()]
        mine = [
            i
            for i, n in enumerate(names)
            if "blocks" not in n and n.endswith("head.weight" if use_orig_params else "flat_param")
        ]
        del state["state"][mine[0]]
    text = r"each rank to have at least(.|\n)*Rank 2 is missing states.*head\.weight"
    with pytest.raises(RuntimeError, match=text):
        FSDP.optim_state_dict(run.model, run.optim, state)


@ranks(3)
@both
def test_numbers_that_differ(rank, world, use_orig_params):
    run = start(rank, toy(), use_orig_params=use_orig_params)
    if rank == 2:
        for state in run.optim.state.values():
            state["step"] += 1
    with pytest.raises(AssertionError, match="Rank 2 has different values for step"):
        save(run)


@ranks(2)
def test_a_trainable_parameter_that_the_optimizer_lacks(rank, world):
    run = start(
        rank,
        toy(),
        use_orig_params=True,
        make=lambda m: torch.optim.Adam([p for n, p in m.named_parameters() if "up.bias" not in n]),
    )
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.bias is not in the optimizer state"):
        save(run)
    for block in run.model.blocks:
        block.up.bias.requires_grad_(False)
    check_dict(save(run), run.expected())


@ranks(2)
def test_dicts_that_do_not_fit(rank, world):
    run = start(rank, toy())
    saved = save(run)
    cases = [
        (ValueError, 'must have the keys "state"', {"param_groups": []}),
        (ValueError, "parameter ids for keys", run.expected_optim.state_dict()),
        (
            KeyError,
            "not in the model",
            {**saved, "param_groups": [{**saved["param_groups"][0], "params": ["nobody"]}]},
        ),
    ]
    for error, text, given in cases:
        with pytest.raises(error, match=text):
            FSDP.optim_state_dict_to_load(run.model, run.optim, given)
        with on_rank_0(run.model), pytest.raises(error, match=text):
            FSDP.optim_state_dict_to_load(run.model, run.optim, given if rank == 0 else {})
    half = adam(run.model.blocks)
    with pytest.raises(KeyError, match="not in the optimizer"):
        FSDP.optim_state_dict_to_load(run.model, half, saved)
    flat = start(rank, toy(), steps=0, use_orig_params=False)
    for key, value, text in (
        ("step", torch.tensor(7.0), "scalar state with the same value"),
        ("exp_avg", torch.zeros(11, dtype=torch.float64), "same dtype"),
        ("extra", 1, "Differing optimizer state names"),
    ):
        changed = copy.deepcopy(saved)
        changed["state"]["blocks.0.up.bias"][key] = value
        with pytest.raises(ValueError, match=text):
            load(flat, changed)


@ranks(2)
def test_models_that_do_not_fit(rank, world):
    run = start(rank, toy())
    with pytest.raises(ValueError, match="contains no FullyShardedDataParallel"):
        FSDP.optim_state_dict(toy(), adam(toy()))
    with pytest.raises(ValueError, match="not in the given model"):
        FSDP.optim_state_dict(run.model.module, run.optim)
    with pytest.raises(KeyError, match="not in the model"):
        FSDP.optim_state_dict(run.model, adam(toy()))
    with pytest.raises(TypeError, match="iterable"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        FSDP.shard_full_optim_state_dict(save(run), run.model, 3)


def one_rank_alone(rank, world):
    run = start(rank, toy())
    shorten_deadlines(here=rank == 0)
    if rank == 0:
        save(run)


def test_a_call_on_one_rank_ends_and_names_the_missing_ranks():
    outcomes = run_ranks(one_rank_alone, 2, faults=True)
    assert "optimizer state of unit" in outcomes[0].error and "rank 1" in outcomes[0].error
