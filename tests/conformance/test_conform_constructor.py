"""The constructor: its arguments, refused values and warnings, and the state after it."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from outcome import raises
from suite import HYBRIDS, Cases, S
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision
from torch.distributed.fsdp.wrap import always_wrap_policy
from toys import toy

case = Cases(__name__, __file__)


def flat_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


# --- process groups and meshes -------------------------------------------------------------------


@case(raises=ValueError, words="process_group")
def hybrid_with_three_groups(lib):
    world = dist.group.WORLD
    lib.wrap(toy(), sharding_strategy=S.HYBRID_SHARD, process_group=(world, world, world))


@case()
def no_group_means_the_default_one(lib):
    model = lib.wrap(toy())
    assert model.process_group is dist.group.WORLD
    return model.rank, model.world_size


@case()
def a_flat_mesh_gives_its_group(lib):
    model = lib.wrap(toy(), device_mesh=flat_mesh())
    assert dist.get_process_group_ranks(model.process_group) == [0, 1]
    return model.rank, model.world_size, lib.full(model)


@case(world=3)
def a_group_of_some_ranks(lib):
    """Ranks 0 and 2 train in one group, while rank 1 trains in another group."""
    halves = [dist.new_group([0, 2]), dist.new_group([1])]
    model = lib.wrap_blocks(toy(), process_group=halves[lib.rank % 2])
    assert model.world_size == (2 if lib.rank % 2 == 0 else 1)
    return model.rank, model.world_size, model.sharding_strategy, lib.train(model)


@case(world=4, over={"strategy": HYBRIDS})
def a_mesh_of_two_dimensions(lib, strategy):
    mesh = init_device_mesh("cpu", (2, 2))
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, device_mesh=mesh)
    inner = model.blocks[0]
    return [
        (
            m.rank,
            m.world_size,
            dist.get_process_group_ranks(m.process_group),
            dist.get_process_group_ranks(m._inter_node_pg),
            m.sharding_strategy,
        )
        for m in (model, inner)
    ]


@case(world=4, over={"strategy": HYBRIDS})
def a_pair_of_groups_is_handed_down(lib, strategy):
    mesh = init_device_mesh("cpu", (2, 2))
    pair = (mesh.get_group(1), mesh.get_group(0))
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, process_group=pair)
    for unit in lib.FSDP.fsdp_modules(model):
        assert (unit.process_group, unit._inter_node_pg) == pair
    return lib.train(model)


@case(world=4)
def named_mesh_dimensions(lib):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = lib.wrap(toy(), sharding_strategy=S.HYBRID_SHARD, device_mesh=mesh)
    return dist.get_process_group_ranks(model.process_group), lib.full(model)


# --- strategies ----------------------------------------------------------------------------------


@case(over={"strategy": [None, S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD]})
def the_strategy_is_kept(lib, strategy):
    model = lib.wrap(toy(), sharding_strategy=strategy)
    return model.sharding_strategy, lib.warned("NO_SHARD")


@case(world=1, over={"strategy": [None, S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD]})
def one_rank_switches_to_no_shard(lib, strategy):
    model = lib.wrap(toy(), sharding_strategy=strategy)
    assert model.sharding_strategy is S.NO_SHARD
    return lib.warned("switching to use `NO_SHARD`"), lib.warned("deprecated")


@case(world=1)
def one_rank_trains_like_an_unsharded_model(lib):
    return lib.train(lib.wrap_blocks(toy()))


# --- options -------------------------------------------------------------------------------------

DEFAULTS = {
    "cpu_offload": CPUOffload(offload_params=False),
    "mixed_precision": MixedPrecision(),
    "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
    "forward_prefetch": False,
    "limit_all_gathers": True,
}
GIVEN = {
    "mixed_precision": MixedPrecision(reduce_dtype=torch.float32),
    "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
    "forward_prefetch": True,
    "limit_all_gathers": False,
    "cpu_offload": CPUOffload(offload_params=False),
}


@case(over={"name": list(DEFAULTS)})
def defaults_are_attributes(lib, name):
    value = getattr(lib.wrap(toy()), name)
    assert value == DEFAULTS[name]
    return value


@case(over={"name": list(GIVEN)})
def options_are_attributes_of_every_unit(lib, name):
    model = lib.wrap_blocks(toy(), **{name: GIVEN[name]})
    assert all(getattr(m, name) == GIVEN[name] for m in lib.FSDP.fsdp_modules(model))


@case()
def no_backward_prefetch(lib):
    return lib.wrap(toy(), backward_prefetch=None).backward_prefetch


@case()
def options_are_positional_in_order(lib):
    model = lib.FSDP(
        toy(),
        None,
        S.SHARD_GRAD_OP,
        None,
        None,
        None,
        MixedPrecision(),
        None,
        None,
        torch.device("cpu"),
        False,
        True,
        False,
        True,
        None,
        None,
    )
    return (
        model.sharding_strategy,
        model.backward_prefetch,
        model.forward_prefetch,
        model.limit_all_gathers,
        model._use_orig_params,
    )


@case()
def the_signature(lib):
    parameters = inspect.signature(lib.FSDP.__init__).parameters
    return [(name, p.default, p.kind) for name, p in parameters.items()]


@case()
def unknown_options(lib):
    return lib.refuses(TypeError, lib.wrap, toy(), reshard=True)


@case(over={"orig": [True, False]})
def use_orig_params_is_kept(lib, orig):
    return lib.wrap(toy(), use_orig_params=orig)._use_orig_params


@case(raises=ValueError, words="_use_orig_params")
def use_orig_params_differs_in_the_tree(lib):
    model = toy()
    model.head = lib.wrap(model.head, use_orig_params=True)
    lib.wrap(model, use_orig_params=False)(lib.batch())


@case()
def prefetching_may_differ_in_the_tree(lib):
    model = toy()
    model.head = lib.wrap(model.head, backward_prefetch=None)
    return lib.train(lib.wrap(model, forward_prefetch=True))


# --- devices -------------------------------------------------------------------------------------


@case()
def the_compute_device(lib):
    model = lib.wrap(toy(), device_id=torch.device("cpu"))
    return model.compute_device, lib.train(model)


@case(torch=raises(ValueError, "Inconsistent"), fsdpc_does="is the CPU")
def the_cpu_with_an_index(lib):
    """device_id=torch.device("cpu", 0)"""
    lib.train(lib.wrap(toy(), device_id=torch.device("cpu", 0)))


@case(torch=raises(RuntimeError, "accelerator"), fsdpc_does="trains on the CPU")
def no_device_and_no_accelerator(lib):
    model = lib.wrap(toy(), device_id=None)
    assert model.compute_device == torch.device("cpu")
    lib.train(model)


@case(torch=raises(ValueError), fsdpc_does="takes rank 0's values")
def sync_module_states_on_the_cpu(lib):
    model = lib.wrap_blocks(toy(seed=lib.rank), sync_module_states=True)
    values = lib.full(model)
    assert all(torch.equal(values[name], p.detach()) for name, p in toy(0).named_parameters())


# --- modules -------------------------------------------------------------------------------------


@case(over={"kind": [nn.ModuleList, nn.ModuleDict]})
def containers_without_forward_are_warned_of(lib, kind):
    layer = nn.Linear(2, 2)
    lib.wrap(kind([layer]) if kind is nn.ModuleList else kind({"a": layer}))
    assert lib.warned("do not implement forward") == ["UserWarning"]


@case()
def a_sequential_is_not_warned_of(lib):
    lib.wrap(nn.Sequential(nn.Linear(2, 2)))
    assert lib.warned("do not implement forward") == []


@case()
def a_module_without_parameters(lib):
    model = lib.wrap(nn.Sequential(nn.ReLU(), nn.Tanh()))
    assert not model._has_params and model._handle is None and list(model.params) == []
    return model(torch.arange(-2.0, 2.0)), model.check_is_root()


@case()
def a_root_without_parameters_of_its_own(lib):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model = lib.wrap(model, auto_wrap_policy=always_wrap_policy)
    model(torch.full((2, 3), 1.0 + lib.rank)).sum().backward()
    roots = [m.check_is_root() for m in lib.FSDP.fsdp_modules(model)]
    return roots, model._has_params, lib.gradients(model)


@case()
def one_parameter_of_one_element(lib):
    """The parameter has fewer elements than there are ranks."""
    model = nn.Linear(1, 1, bias=False)
    model = lib.wrap(model)
    model(torch.ones(1, 1)).sum().backward()
    return lib.full(model), lib.gradients(model)


@case(torch=raises(ValueError, "scalar"), fsdpc_does="shards and trains it")
def a_parameter_without_dimensions(lib):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.scale

    model = lib.wrap(Scaled(), use_orig_params=True)
    model(torch.tensor(3.0)).backward()
    assert lib.full(model)["scale"].shape == () and lib.gradients(model)["scale"] == 3.0


@case(
    torch=raises(ValueError, "dtype"), fsdpc_does="keeps each dtype", over={"orig": [True, False]}
)
def two_dtypes_in_one_unit(lib, orig):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16())
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    got = lib.full(lib.wrap(model, use_orig_params=orig))
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@case(torch=raises(ValueError, "dtype"), fsdpc_does="shards it, without gradient")
def an_integer_parameter(lib):
    model = nn.Linear(3, 3)
    model.codes = nn.Parameter(torch.arange(7), requires_grad=False)
    got = lib.full(lib.wrap(model))
    assert got["codes"].tolist() == list(range(7))


@case(torch=raises(ValueError, "requires_grad"), fsdpc_does="keeps both kinds apart")
def frozen_beside_trainable_with_flat_parameters(lib):
    model = toy()
    model.embed.weight.requires_grad_(False)
    model = lib.wrap(model, use_orig_params=False)
    result = lib.train(model)["parameters"]
    assert torch.equal(result["embed.weight"], toy().embed.weight.detach())
    assert not torch.equal(result["head.weight"], toy().head.weight.detach())


@case()
def frozen_beside_trainable_with_original_parameters(lib):
    model = toy()
    model.embed.weight.requires_grad_(False)
    return lib.train(lib.wrap(model, use_orig_params=True))


@case()
def wrapping_leaves_the_module_inside(lib):
    inner = toy()
    model = lib.wrap(inner)
    return model.module is inner, model._fsdp_wrapped_module is inner, type(model).__name__


@case()
def the_training_flag_is_passed_on(lib):
    inner = toy().eval()
    model = lib.wrap(inner)
    first = (model.training, model.module.training)
    model.train()
    model.eval()
    return first, inner.training, inner.blocks[0].training


@case(
    fsdpc=raises(ValueError, "common memory"),
    fsdpc_does="refuses them by name",
    over={"orig": [True, False]},
)
def parameters_that_share_memory_before(lib, orig):
    """Two Parameters share the memory of one tensor.

    torch silently makes them two independent parameters; fsdpc refuses them.
    """
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight.data = model["a"].weight.data
    return lib.full(lib.wrap(model, use_orig_params=orig))


@case(over={"orig": [True, False]})
def parameters_that_are_not_contiguous(lib, orig):
    model = nn.Linear(3, 4, bias=False)
    model.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    model = lib.wrap(model, use_orig_params=orig)
    model(torch.ones(1, 3)).sum().backward()
    return {k: v.contiguous() for k, v in lib.full(model).items()}, model(torch.ones(1, 3)).detach()


@case()
def a_unit_in_a_unit(lib):
    model = lib.wrap(lib.wrap(nn.Linear(3, 2)))
    model(torch.ones(1, 3)).sum().backward()
    return model._has_params, lib.gradients(model), len(lib.FSDP.fsdp_modules(model))


test_torch, test_fsdpc = case.tests()
