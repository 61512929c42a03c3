"""Wrap policies, manual wrapping, and which modules become units."""

from __future__ import annotations

import functools

import torch
from outcome import raises, wrong
from suite import Cases
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from toys import Block, clean, toy

case = Cases(__name__, __file__)

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def units(lib, model):
    """Return the clean names of the units, in the order of named_modules()."""
    return [clean(name + ".") for name, m in model.named_modules() if isinstance(m, lib.FSDP)]


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
        nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)]),
    )


POLICIES = {
    "always": always_wrap_policy,
    "blocks": ModuleWrapPolicy({Block}),
    "blocks-and-linear": ModuleWrapPolicy({Block, nn.Linear}),
    "nothing": ModuleWrapPolicy({nn.Conv2d}),
    "list-of-classes": ModuleWrapPolicy([Block]),
    "transformer": functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.Embedding}
    ),
    "lambda": functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda m: getattr(m, "out_features", 0) == 13
    ),
    "custom-true": CustomPolicy(lambda m: isinstance(m, nn.LayerNorm)),
    "custom-dict": CustomPolicy(
        lambda m: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        if isinstance(m, Block)
        else False
    ),
    "custom-empty-dict": CustomPolicy(lambda m: {} if isinstance(m, Block) else False),
    "or": functools.partial(
        _or_policy,
        policies=[
            ModuleWrapPolicy({Block}),
            functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: type(m) is nn.Embedding),
        ],
    ),
    "size-100": functools.partial(size_based_auto_wrap_policy, min_num_params=100),
    "size-1000": functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
    "function": lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel > 90,
    "no-recursion": lambda module, recurse, nonwrapped_numel: not recurse,
}


@case(over={"policy": list(POLICIES)})
def units_of_a_policy(lib, policy):
    model = lib.wrap(toy(), auto_wrap_policy=POLICIES[policy])
    return units(lib, model), [m.sharding_strategy for m in lib.FSDP.fsdp_modules(model)]


@case(over={"policy": ["always", "blocks", "transformer", "or", "size-100", "custom-dict"]})
def training_under_a_policy(lib, policy):
    return lib.train(lib.wrap(toy(), auto_wrap_policy=POLICIES[policy]))


@case(over={"numel": [1, 50, 70, 150, 300, 400, 600]})
def sizes_count_what_is_not_wrapped_yet(lib, numel):
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=numel)
    return units(lib, lib.wrap(mlp(), auto_wrap_policy=policy))


@case()
def leaves_that_sizes_do_not_look_into(lib):
    policy = functools.partial(
        size_based_auto_wrap_policy, min_num_params=60, force_leaf_modules={nn.Sequential}
    )
    return units(lib, lib.wrap(nn.ModuleDict({"a": mlp()}), auto_wrap_policy=policy))


@case()
def classes_that_sizes_do_not_wrap(lib):
    policy = functools.partial(
        size_based_auto_wrap_policy, min_num_params=60, exclude_wrap_modules={nn.Linear}
    )
    return units(lib, lib.wrap(mlp(), auto_wrap_policy=policy))


@case()
def attention_is_a_leaf_for_sizes(lib):
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=50)
    return units(lib, lib.wrap(model, auto_wrap_policy=policy))


@case()
def a_policy_is_asked_on_the_way_down_and_up(lib):
    asked = []

    def policy(module, recurse, nonwrapped_numel):
        asked.append((type(module).__name__, recurse, nonwrapped_numel))
        return recurse or isinstance(module, nn.ReLU | nn.Linear)

    lib.wrap(mlp(), auto_wrap_policy=policy)
    return asked


@case()
def a_custom_policy_is_asked_once_for_each_module(lib):
    asked = []

    def choose(module):
        asked.append(type(module).__name__)
        return False

    lib.wrap(toy(), auto_wrap_policy=CustomPolicy(choose))
    return asked


@case(raises=ValueError)
def a_custom_policy_that_returns_something_else(lib):
    lib.wrap(toy(), auto_wrap_policy=CustomPolicy(lambda m: "yes"))


@case()
def options_of_the_root_reach_the_children(lib):
    model = lib.wrap_blocks(
        toy(),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        mixed_precision=BF16,
        forward_prefetch=True,
        use_orig_params=True,
        backward_prefetch=None,
    )
    return [
        (
            m.sharding_strategy,
            m.mixed_precision,
            m.forward_prefetch,
            m._use_orig_params,
            m.backward_prefetch,
        )
        for m in lib.FSDP.fsdp_modules(model)
    ]


@case()
def a_custom_policy_changes_options(lib):
    special = MixedPrecision(param_dtype=torch.float16)
    policy = CustomPolicy(lambda m: {"mixed_precision": special} if type(m) is Block else False)
    model = lib.wrap(toy(), auto_wrap_policy=policy, mixed_precision=BF16)
    return [m.mixed_precision.param_dtype for m in lib.FSDP.fsdp_modules(model)]


@case()
def the_root_is_not_wrapped_twice(lib):
    model = lib.wrap(Block(6), auto_wrap_policy=ModuleWrapPolicy({Block, nn.Linear}))
    return units(lib, model)


@case()
def ignored_modules_are_not_wrapped(lib):
    model = toy()
    policy = ModuleWrapPolicy({Block})
    model = lib.wrap(model, auto_wrap_policy=policy, ignored_modules=[model.blocks[1]])
    return units(lib, model)


@case()
def ignored_modules_are_not_counted(lib):
    model = mlp()
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    model = lib.wrap(model, auto_wrap_policy=policy, ignored_modules=[model[1][0]])
    return units(lib, model)


@case()
def a_class_is_matched_with_its_subclasses(lib):
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(3, 3), nn.Linear(3, 3), nn.ReLU())
    return units(lib, lib.wrap(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})))


@case()
def policies_are_torchs_own_objects(lib):
    names = [
        "ModuleWrapPolicy",
        "CustomPolicy",
        "always_wrap_policy",
        "wrap",
        "enable_wrap",
        "size_based_auto_wrap_policy",
        "transformer_auto_wrap_policy",
        "lambda_auto_wrap_policy",
        "_or_policy",
    ]
    home = torch.distributed.fsdp.wrap
    return [getattr(lib.submodule("wrap"), name) is getattr(home, name) for name in names]


@case()
def modules_that_never_had_parameters_become_units(lib):
    model = lib.wrap(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), auto_wrap_policy=always_wrap_policy)
    return [m._has_params for m in lib.FSDP.fsdp_modules(model)]


@case(torch=wrong(), fsdpc_does="one unit at both places")
def a_module_registered_twice_under_a_policy(lib):
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    model = lib.wrap(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert model["a"] is model["b"][0], "the two places hold different modules"


# --- by hand -------------------------------------------------------------------------------------


@case()
def wrapping_by_hand(lib):
    model = toy()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = lib.wrap(block)
    model = lib.wrap(model)
    return units(lib, model), lib.train(model)


@case()
def units_in_a_plain_root(lib):
    model = toy()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = lib.wrap(block)
    model(lib.batch()).sum().backward()
    assert all(block.check_is_root() for block in model.blocks)
    assert model.head.weight.grad is not None
    return units(lib, model), [lib.gradients(block) for block in model.blocks]


@case()
def the_wrapping_context(lib):
    with enable_wrap(wrapper_cls=lib.FSDP, device_id=torch.device("cpu"), forward_prefetch=True):
        model = nn.Sequential(wrap(nn.Linear(3, 4)), nn.ReLU(), wrap(nn.Linear(4, 2)))
        model = wrap(model, forward_prefetch=False)
    return units(lib, model), [m.forward_prefetch for m in lib.FSDP.fsdp_modules(model)]


@case()
def wrapping_outside_of_the_context(lib):
    layer = nn.Linear(2, 2)
    return wrap(layer) is layer


@case()
def the_context_does_not_nest(lib):
    def nested():
        with enable_wrap(wrapper_cls=lib.FSDP), enable_wrap(wrapper_cls=lib.FSDP):
            pass

    return lib.refuses(NotImplementedError, nested)


@case()
def a_units_classes_are_its_own(lib):
    model = lib.wrap_blocks(toy())
    return [type(m.module).__name__ for m in lib.FSDP.fsdp_modules(model)]


@case()
def nested_units_are_listed_depth_first(lib):
    model = lib.wrap(toy(), auto_wrap_policy=ModuleWrapPolicy({Block, nn.Linear}))
    names = {id(m): clean(name + ".") for name, m in model.named_modules()}
    return [names[id(m)] for m in lib.FSDP.fsdp_modules(model)]


@case()
def units_below_a_plain_module_are_listed(lib):
    model = nn.Sequential(lib.wrap(nn.Linear(2, 2)), nn.Linear(2, 2))
    return len(lib.FSDP.fsdp_modules(model)), len(lib.FSDP.fsdp_modules(model[1]))


@case()
def only_roots_are_listed(lib):
    model = nn.Sequential(lib.wrap_blocks(toy()), lib.wrap_blocks(toy()))
    found = lib.FSDP.fsdp_modules(model, root_only=True)
    assert [id(m) for m in found] == [id(model[0]), id(model[1])]
    return len(lib.FSDP.fsdp_modules(model))


@case()
def the_outermost_unit_is_the_root(lib):
    model = lib.wrap_blocks(toy())
    before = [m._is_root for m in lib.FSDP.fsdp_modules(model)]
    assert model.check_is_root() and not model.blocks[0].check_is_root()
    return before, [m._is_root for m in lib.FSDP.fsdp_modules(model)]


@case(torch=raises(AssertionError), fsdpc_does="the outer unit takes over")
def an_inner_unit_used_before_the_outer_one(lib):
    model = lib.wrap_blocks(toy())
    model.blocks[0](torch.ones(2, 6)).sum().backward()
    model.zero_grad()
    model(lib.batch()).sum().backward()


@case()
def a_unit_reused_in_two_places_by_hand(lib):
    shared = lib.wrap(nn.Linear(3, 3))
    model = lib.wrap(nn.Sequential(shared, nn.ReLU(), shared))
    model(torch.full((1, 3), 1.0 + lib.rank)).sum().backward()
    return lib.gradients(model), len(lib.FSDP.fsdp_modules(model))


test_torch, test_fsdpc = case.tests()
