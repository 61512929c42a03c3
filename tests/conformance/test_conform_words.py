"""Texts of errors: where both libraries raise the same type, fsdpc's text begins as torch's does.

Programs that catch an error may read its text. The errors that the other test modules expect have
texts of fsdpc's own.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from suite import HYBRIDS, Cases
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from toys import Block, tokens, toy

case = Cases(__name__, __file__)

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
BLOCKS = ModuleWrapPolicy({Block})

LOCAL_ON_A_MESH = "Found state_dict_type LOCAL_STATE_DICT"
# Before torch 2.13, these sentences are further arguments of the exception.
if hasattr(torch_fsdp, "DataParallelMeshDims"):
    LOCAL_ON_A_MESH += (
        ". DeviceMesh is not compatible with LOCAL_STATE_DICT. Please set state_dict_type to "
        "SHARDED_STATE_DICT to get DTensor state_dict."
    )


def mesh(*shape):
    return init_device_mesh("cpu", shape or (2,))


def differing_kinds(lib, of):
    model = lib.wrap_blocks(toy())
    inner = model.blocks[0]
    if of == "type":
        inner._state_dict_type = SHARDED
    elif of == "config":
        inner._state_dict_config = ShardedStateDictConfig()
    elif of == "optim":
        inner._optim_state_dict_config = None
    lib.FSDP.set_state_dict_type(model, FULL)


def differing_settings(lib):
    model = lib.wrap_blocks(toy())
    model.blocks[0]._state_dict_config = FullStateDictConfig(offload_to_cpu=True)
    lib.FSDP.get_state_dict_type(model)


def wrong_config(lib, optim):
    model = lib.wrap(toy())
    wrong = (FullStateDictConfig(), None) if not optim else (None, FullOptimStateDictConfig())
    lib.FSDP.set_state_dict_type(model, SHARDED, *wrong)


def local_on_a_mesh(lib, call):
    model = lib.wrap(toy(), device_mesh=mesh())
    with lib.FSDP.state_dict_type(model, LOCAL):
        if call == "save":
            model.state_dict()
        elif call == "settings":
            lib.FSDP.get_state_dict_type(model)
        else:
            lib.FSDP.optim_state_dict(model, torch.optim.SGD(model.parameters(), 0.1))


def inner(lib, call):
    model = lib.wrap_blocks(toy())
    loss = model(tokens(0, 0)).sum()
    if call == "no_sync":
        with model.blocks[0].no_sync():
            pass
    elif call == "clip":
        loss.backward()
        model.blocks[0].clip_grad_norm_(1.0)
    else:
        model.blocks[0].register_comm_hook(None, lambda state, grad: None)


def hook_twice(lib):
    model = lib.wrap(toy())
    for _ in range(2):
        model.register_comm_hook(None, lambda *args: None)


def differing_flags(lib, name):
    model = toy()
    model.blocks[0] = lib.wrap(model.blocks[0], **{name: False})
    lib.wrap(model, **{name: True})(tokens(0, 0))


def summon_twice(lib):
    model = lib.wrap(toy())
    with lib.FSDP.summon_full_params(model), lib.FSDP.summon_full_params(model):
        pass


def summon_in_forward(lib):
    model = lib.wrap_blocks(toy())

    def call(*args):
        with lib.FSDP.summon_full_params(model.blocks[0]):
            pass

    model.blocks[0].module.up.register_forward_hook(call)
    model(tokens(0, 0))


def save_in_forward(lib):
    model = lib.wrap_blocks(toy())
    model.blocks[0].module.up.register_forward_hook(lambda *args: model.blocks[0].state_dict())
    model(tokens(0, 0))


def optimizer_with(lib, left_out=(), **options):
    model = lib.wrap(toy(), **options)
    params = [p for name, p in model.named_parameters() if not name.endswith(left_out)]
    optimizer = torch.optim.SGD(params, 0.1, momentum=0.9)
    model(tokens(lib.rank, 0)).sum().backward()
    optimizer.step()
    return model, optimizer


def loading(lib, change):
    model, optimizer = optimizer_with(lib)
    state = lib.FSDP.optim_state_dict(model, optimizer)
    change(state)
    lib.FSDP.optim_state_dict_to_load(model, optimizer, state)


def other_names(state):
    state["state"]["head.bias"]["more"] = state["state"]["head.bias"]["momentum_buffer"]


def other_dtypes(state):
    values = state["state"]["head.bias"]
    values["momentum_buffer"] = values["momentum_buffer"].double()


def other_numbers(state):
    for i, name in enumerate(state["state"]):
        state["state"][name]["momentum_buffer"] = torch.tensor(float(i))


def left_out(lib):
    lib.FSDP.optim_state_dict(*optimizer_with(lib, ("head.bias",), use_orig_params=True))


def key_type(lib, keys, kind):
    model, optimizer = optimizer_with(lib)
    lib.FSDP.rekey_optim_state_dict(
        {"state": dict.fromkeys(keys, {}), "param_groups": []}, kind, model, optim=optimizer
    )


def several_names(lib):
    model, optimizer = optimizer_with(lib)
    lib.FSDP.rekey_optim_state_dict(
        optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer
    )


def shard_full(lib, optim_input):
    model = lib.wrap(toy())
    lib.FSDP.shard_full_optim_state_dict({"state": {}}, model, optim_input)


OF_HYBRIDS = {
    "by hand": "Manual wrapping with {} requires explicit specification of process group or "
    "device_mesh.",
    "flat mesh": "Expected device_mesh to have ndim=2 but got 1",
    "one group": "Expected process_group to be passed in as either None or "
    "Tuple[dist.ProcessGroup, dist.ProcessGroup] but got <class",
}


def hybrid(lib, strategy, given):
    options = {"device_mesh": mesh()} if given == "flat mesh" else {}
    if given == "one group":
        options["process_group"] = dist.group.WORLD
    lib.wrap(toy(), sharding_strategy=strategy, **options)


# name -> (program, type of the error, beginning of torch's text)
WORDS = {
    "wrapped already": (
        lambda lib: lib.wrap(lib.wrap_blocks(toy()), auto_wrap_policy=BLOCKS),
        ValueError,
        "FSDP auto wrapping requires modules to not already have FSDP applied but found  in\n",
    ),
    "inner wrapped already": (
        lambda lib: lib.wrap(nn.Sequential(lib.wrap(toy())), auto_wrap_policy=BLOCKS),
        ValueError,
        "FSDP auto wrapping requires modules to not already have FSDP applied but found 0 in\n"
        "Sequential(",
    ),
    "group and mesh": (
        lambda lib: lib.wrap(toy(), process_group=dist.group.WORLD, device_mesh=mesh()),
        ValueError,
        "Cannot pass both process_group and device_mesh at the same time. Please just pass only one"
        " of them.",
    ),
    **{
        f"{given}, {strategy.name}": (
            functools.partial(hybrid, strategy=strategy, given=given),
            ValueError,
            words.format(strategy),
        )
        for strategy in HYBRIDS
        for given, words in OF_HYBRIDS.items()
    },
    "both ignored": (
        lambda lib: lib.wrap(toy(), ignored_modules=[], ignored_states=[]),
        ValueError,
        "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass "
        "ignored_states.",
    ),
    "ignored mix": (
        lambda lib: lib.wrap(m := toy(), ignored_states=[m.head, m.norm.weight]),
        ValueError,
        "ignored_states expects all nn.Parameter or all nn.Module list elements but got types [",
    ),
    "ignored others": (
        lambda lib: lib.wrap(m := toy(), ignored_modules=[m.head.weight]),
        ValueError,
        "ignored_modules expects nn.Module list elements but got types [",
    ),
    "ignored units": (
        lambda lib: lib.wrap(m := lib.wrap_blocks(toy()), ignored_modules=[m.blocks[0]]),
        ValueError,
        "`ignored_modules` should not include FSDP modules",
    ),
    "init function": (
        lambda lib: lib.wrap(nn.Linear(2, 2, device="meta"), param_init_fn="zeros"),
        ValueError,
        "Expected zeros to be callable but got <class 'str'>",
    ),
    "config": (
        lambda lib: wrong_config(lib, False),
        RuntimeError,
        "Expected state_dict_config of type <class",
    ),
    "optimizer config": (
        lambda lib: wrong_config(lib, True),
        RuntimeError,
        "Expected optim_state_dict_config of type <class",
    ),
    "types": (
        lambda lib: differing_kinds(lib, "type"),
        AssertionError,
        "All FSDP modules should have the same state_dict_type.",
    ),
    "configs": (
        lambda lib: differing_kinds(lib, "config"),
        AssertionError,
        "All FSDP modules must have the same type of state_dict_config.",
    ),
    "optimizer configs": (
        lambda lib: differing_kinds(lib, "optim"),
        AssertionError,
        "All FSDP modules must have the same type of optim_state_dict_config.",
    ),
    "settings": (
        differing_settings,
        AssertionError,
        "All FSDP modules must have the same state dict settings.Got StateDictSettings(",
    ),
    **{
        f"local on a mesh, {call}": (
            functools.partial(local_on_a_mesh, call=call),
            RuntimeError,
            LOCAL_ON_A_MESH,
        )
        for call in ("save", "settings", "optimizer")
    },
    "inner no_sync": (
        lambda lib: inner(lib, "no_sync"),
        RuntimeError,
        "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP"
        " module.",
    ),
    "inner clip": (
        lambda lib: inner(lib, "clip"),
        RuntimeError,
        "`clip_grad_norm_()` should only be called on the root FSDP instance",
    ),
    "inner hook": (
        lambda lib: inner(lib, "hook"),
        AssertionError,
        "register_comm_hook can only be called on a root instance.",
    ),
    "hook twice": (hook_twice, AssertionError, "A communication hook is already registered"),
    "hook": (
        lambda lib: lib.wrap(toy()).register_comm_hook(None, 3),
        ValueError,
        "The communication hook must be callable but got 3",
    ),
    "use_orig_params": (
        lambda lib: differing_flags(lib, "use_orig_params"),
        ValueError,
        "Expects one homogeneous value for _use_orig_params but got ",
    ),
    "limit_all_gathers": (
        lambda lib: differing_flags(lib, "limit_all_gathers"),
        ValueError,
        "Expects one homogeneous value for limit_all_gathers but got ",
    ),
    "summon on rank 0": (
        lambda lib: lib.FSDP.summon_full_params(lib.wrap(toy()), rank0_only=True).__enter__(),
        NotImplementedError,
        "writeback=True and rank0_only=True is not supported yet",
    ),
    "summon twice": (
        summon_twice,
        AssertionError,
        "Cannot manually unshard parameters when already unsharding parameters",
    ),
    "summon in forward": (
        summon_in_forward,
        AssertionError,
        "Cannot manually unshard parameters during forward/backward",
    ),
    "save in forward": (
        save_in_forward,
        AssertionError,
        "Expects the handle training to be IDLE but got HandleTrainingState.FORWARD",
    ),
    "no state": (
        lambda lib: loading(lib, lambda state: state.pop("state")),
        ValueError,
        '`optim_state_dict` must have the keys "state"',
    ),
    "names of states": (
        lambda lib: loading(lib, other_names),
        ValueError,
        "Differing optimizer state names for the unflattened parameters: [",
    ),
    "dtypes of states": (
        lambda lib: loading(lib, other_dtypes),
        ValueError,
        "All unflattened parameters comprising a single flat parameter must have positive-dimension"
        " tensor state with the same dtype but got dtypes ",
    ),
    "numbers": (
        lambda lib: loading(lib, other_numbers),
        ValueError,
        "All unflattened parameters comprising a single flat parameter must have scalar state with "
        "the same value and dtype but got values ",
    ),
    "left out": (
        left_out,
        RuntimeError,
        "head.bias is not in the optimizer state. The FSDPParamInfo has the param keys [",
    ),
    "keys": (
        lambda lib: key_type(lib, ["a", 1], OptimStateKeyType.PARAM_ID),
        ValueError,
        "Invalid parameter keys: dict_keys(",
    ),
    "kind of keys": (
        lambda lib: key_type(lib, ["a"], "id"),
        AssertionError,
        "Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got id",
    ),
    "several names": (
        several_names,
        RuntimeError,
        "Each parameter should only map to one parameter name but got ",
    ),
    "input": (
        lambda lib: shard_full(lib, 3),
        TypeError,
        "Optimizer input should be an iterable of Tensors or dicts, but got 3",
    ),
    "empty input": (
        lambda lib: shard_full(lib, []),
        ValueError,
        "Optimizer input should not be empty",
    ),
    "state": (
        lambda lib: lib.wrap(toy())._assert_state(TrainingState.FORWARD_BACKWARD),
        ValueError,
        "expected to be in states [<TrainingState.FORWARD_BACKWARD: 2>] but current state is "
        "TrainingState.IDLE",
    ),
}


@case(over={"name": list(WORDS)})
def error_begins_as_torchs(lib, name):
    program, kind, words = WORDS[name]
    try:
        program(lib)
    except kind as error:
        text = str(error.args[0])
        assert text.startswith(words), f"{text[:300]!r} begins in another way"
        return kind.__name__
    raise AssertionError("no error")


test_torch, test_fsdpc = case.tests()
