"""fully_shard's arguments: modules, meshes, resharding, placements, ignored parameters."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist
from outcome import raises
from rows_library import RowsLibrary, linear, whole
from suite import Cases
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from toys import Block, loss_of, toy

with suppress(ImportError):  # torch 2.11 has no such class
    from torch.distributed.fsdp import DataParallelMeshDims

case = Cases(__name__, __file__, library=RowsLibrary)


# --- the module ----------------------------------------------------------------------------------


@case()
def the_module_itself_is_returned(lib):
    model = toy()
    return lib.fully_shard(model) is model, [*dict(model.named_parameters())]


@case()
def the_list_itself_is_returned(lib):
    both = [linear(), linear()]
    return lib.fully_shard(both) is both, [isinstance(m, lib.FSDPModule) for m in both]


@case(
    raises=ValueError,
    words="containers that do not implement forward",
    over={"kind": [nn.ModuleList, nn.ModuleDict]},
)
def containers(lib, kind):
    lib.fully_shard(kind([linear()] if kind is nn.ModuleList else {"a": linear()}))


@case()
def a_container_in_a_list(lib):
    """A container has no forward of its own: its children run in another module's forward."""
    model = nn.Module()
    model.first, model.more = linear(3, 3), nn.ModuleList([linear(3, 3, 1)])
    lib.fully_shard([model.first, model.more])
    return [isinstance(p, DTensor) for p in model.parameters()], lib.full(model)


class Stack(nn.ModuleList):
    def forward(self, x):
        for module in self:
            x = module(x)
        return x


@case()
def a_container_with_a_forward(lib):
    model = lib.fully_shard(Stack([linear(3, 3), linear(3, 3)]))
    model(torch.ones(1, 3)).sum().backward()
    return lib.gradients(model)


@case(raises=AssertionError, words="can only be applied to a module once")
def the_same_module_twice(lib):
    lib.fully_shard(lib.fully_shard(linear()))


@case(raises=AssertionError, words="can only be applied to a module once")
def a_sharded_module_in_a_list(lib):
    lib.fully_shard([lib.fully_shard(linear()), linear()])


@case(
    torch=raises(AssertionError, "can only be applied to a module once"),
    fsdpc_does="shards the module once",
)
def the_same_module_twice_in_a_list(lib):
    """one module twice in a list"""
    one = linear()
    lib.fully_shard([one, one])
    one(torch.ones(1, 3)).sum().backward()
    assert torch.equal(lib.gradients(one)["bias"], torch.ones(5))


@case(over={"value": [None, 3, "linear"]})
def no_module_at_all(lib, value):
    try:
        lib.fully_shard(value)
    except Exception as error:
        return isinstance(error, (TypeError, AttributeError, ValueError, AssertionError))


@case(raises=TypeError)
def options_as_positions(lib):
    lib.fully_shard(linear(), lib.mesh())


@case(raises=TypeError, words="unexpected keyword argument")
def an_unknown_option(lib):
    lib.fully_shard(linear(), sharding_strategy=1)


@case()
def a_module_without_parameters(lib):
    model = lib.fully_shard(nn.Tanh())
    x = torch.ones(2, requires_grad=True)
    model(x).sum().backward()
    return x.grad, list(model.parameters())


@case()
def a_root_whose_children_have_all_parameters(lib):
    model = nn.Sequential(linear(3, 3), nn.Tanh(), linear(3, 3))
    for child in model:
        lib.fully_shard(child)
    lib.fully_shard(model)
    model(torch.ones(1, 3) + lib.rank).sum().backward()
    return lib.gradients(model)


@case(raises=ValueError, words="doesn't support scalar parameters")
def a_parameter_without_dimensions(lib):
    model = linear()
    model.scale = nn.Parameter(torch.tensor(1.0))
    lib.fully_shard(model)


@case(raises=NotImplementedError, words="non-contiguous")
def a_transposed_parameter(lib):
    model = linear()
    model.weight = nn.Parameter(torch.ones(3, 5).t())
    lib.fully_shard(model)


@case(over={"shape": [(0, 4), (1,), (1, 1, 1), (2, 3, 2, 2), (7, 2)]})
def shapes_of_parameters(lib, shape):
    model = nn.Module()
    model.p = nn.Parameter(torch.arange(float(torch.Size(shape).numel())).reshape(shape))
    lib.fully_shard(model)
    return lib.full(model), tuple(model.p.shape), tuple(model.p.to_local().shape)


@case(
    torch=raises(RuntimeError, "Expected cond to be True"),
    fsdpc_does="gives an empty tensor of the right shape",
)
def a_parameter_of_empty_rows(lib):
    """full_tensor() of a parameter of shape (4, 0)"""
    model = nn.Module()
    model.p = nn.Parameter(torch.ones(4, 0))
    lib.fully_shard(model)
    assert lib.full(model)["p"].shape == (4, 0)


@case(over={"dtype": [torch.int64, torch.int32, torch.bool, torch.uint8, torch.complex64]})
def frozen_parameters_of_other_dtypes(lib, dtype):
    model = nn.Linear(3, 2)
    for name in ("weight", "bias"):
        p = getattr(model, name)
        setattr(model, name, nn.Parameter(torch.ones(p.shape).to(dtype), requires_grad=False))
    lib.fully_shard(model)
    return lib.full(model)


@case()
def a_parameter_registered_twice(lib):
    model = toy()
    model.head.weight = model.embed.weight
    lib.fully_shard(model)
    loss_of(model, lib.batch()).backward()
    return model.head.weight is model.embed.weight, lib.gradients(model)


@case()
def a_module_registered_twice(lib):
    model = toy()
    model.blocks[1] = model.blocks[0]
    lib.shard_blocks(model)
    loss_of(model, lib.batch()).backward()
    return model.blocks[1] is model.blocks[0], lib.gradients(model)


@case(raises=ValueError, words="shared with a parameter already managed by another FSDP group")
def a_tied_parameter_in_two_units(lib):
    model = toy()
    model.head.weight = model.embed.weight
    lib.fully_shard(model.head)
    lib.fully_shard(model)
    model(lib.batch())


@case()
def tied_parameters_in_one_list(lib):
    model = toy()
    model.head.weight = model.embed.weight
    for block in model.blocks:
        lib.fully_shard(block)
    lib.fully_shard([model.embed, model.norm, model.head], reshard_after_forward=False)
    lib.fully_shard(model)
    return lib.train(model)


@case()
def children_of_a_lists_member(lib):
    model = nn.Sequential(linear(3, 3), linear(3, 3))
    lib.fully_shard([model, model[0]])
    return isinstance(model[0], lib.FSDPModule), isinstance(model[0].weight, DTensor)


@case()
def marks_on_managed_modules(lib):
    model = lib.shard_blocks(toy())
    return {
        name: (module._is_fsdp_managed_module, module._fsdp_use_orig_params)
        for name, module in model.named_modules()
    }


@case()
def buffers_stay_plain(lib):
    model = nn.Sequential(nn.BatchNorm1d(3), linear(3, 3))
    lib.fully_shard(model)
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(lib.rank))).sum().backward()
    return dict(model.named_buffers()), lib.gradients(model)


# --- the mesh ------------------------------------------------------------------------------------


@case(over={"given": [True, False]})
def meshes_of_parameters(lib, given):
    mesh = lib.mesh()
    model = lib.fully_shard(linear(), **({"mesh": mesh} if given else {}))
    found = model.weight.device_mesh
    same = found is mesh or found == mesh
    return same, found.device_type, found.mesh, list(map(str, model.weight.placements))


@case(world=4, over={"shape": [(2, 2), (1, 4), (4, 1)]})
def replicas_on_a_mesh(lib, shape):
    mesh = lib.mesh(*shape)
    model = lib.fully_shard(linear(), mesh=mesh)
    assert model.weight.placements == (Replicate(), Shard(0))
    return tuple(model.weight.to_local().shape), model.weight.device_mesh.mesh


@case(world=4, over={"shape": [(2, 2), (1, 4), (4, 1)]})
def training_with_replicas(lib, shape):
    return lib.train(lib.shard_blocks(toy(), mesh=lib.mesh(*shape)))


@case(world=4)
def a_dimension_of_a_larger_mesh(lib):
    """Each row of a 2-D mesh trains a model of its own."""
    mesh = lib.mesh(2, 2)
    return lib.train(lib.shard_blocks(toy(), mesh=mesh["shard"]))


@case(world=4)
def two_meshes_in_one_model(lib):
    """Blocks are sharded over a mesh with replicas, and the root over all ranks."""
    hybrid, line = lib.mesh(2, 2), lib.mesh()
    model = toy()
    for block in model.blocks:
        lib.fully_shard(block, mesh=hybrid)
    return lib.train(lib.fully_shard(model, mesh=line))


@case(raises=ValueError, words="expects a 1D or 2D DeviceMesh")
def a_mesh_of_three_dimensions(lib):
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
    lib.fully_shard(linear(), mesh=mesh)


@case(raises=AssertionError, words="mesh_dim_names")
def a_mesh_without_names(lib):
    lib.fully_shard(linear(), mesh=init_device_mesh("cpu", (2, 1)))


SPMD = {
    "dp": ((2,), {"weight": (Replicate(),), "bias": (Replicate(),)}),
    "dp, tp": (
        (2, 2),
        {"weight": (Replicate(), Shard(0)), "bias": (Replicate(), Shard(0))},
    ),
    "tp, dp": (
        (2, 2),
        {"weight": (Shard(1), Replicate()), "bias": (Replicate(), Replicate())},
    ),
    "replicas, dp": (
        (2, 2),
        {"weight": (Replicate(), Replicate()), "bias": (Replicate(), Replicate())},
    ),
}


def spmd(names):
    """Return a mesh with these dimensions, and a module whose parameters are DTensors on it."""
    shape, placements = SPMD[names]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names.split(", ")))
    model = linear(6, 4)
    for name, where in placements.items():
        value = distribute_tensor(getattr(model, name).detach(), mesh, where)
        setattr(model, name, nn.Parameter(value))
    return mesh, model


def spmd_step(lib, mesh, model, step):
    place = [Shard(0) if name == "dp" else Replicate() for name in mesh.mesh_dim_names]
    torch.manual_seed(step)
    batch = distribute_tensor(torch.randn(4, 4), mesh, place)
    loss = model(batch).full_tensor().pow(2).mean()
    loss.backward()
    return float(loss)


@case(needs="DataParallelMeshDims", rtol=1e-4)
def dimensions_of_an_spmd_mesh(lib):
    return trained_on_a_mesh(lib, "dp")


@case(
    needs="DataParallelMeshDims",
    world=4,
    over={"names": [name for name in SPMD if name != "dp"]},
    rtol=1e-4,
)
def trained_on_a_mesh(lib, names):
    """dp_mesh_dims: modules, batches, gradients and sharded parameters are on one mesh."""
    mesh, model = spmd(names)
    dims = DataParallelMeshDims("dp", "replicas" if "replicas" in names else None)
    lib.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses, shown = [], []
    for step in range(3):
        losses.append(spmd_step(lib, mesh, model, step))
        lib.resharded(model)
        shown.append([(p.placements, p.grad.placements) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return losses, str(shown), lib.full(model)


@case(needs="DataParallelMeshDims", raises=ValueError, words="all parameters must be")
def plain_parameters_on_an_spmd_mesh(lib):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    lib.fully_shard(linear(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp"))


@case(needs="DataParallelMeshDims", raises=ValueError, words="same mesh")
def parameters_on_another_mesh(lib):
    model = spmd("dp")[1]
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    lib.fully_shard(model, mesh=other, dp_mesh_dims=DataParallelMeshDims("dp"))


@case(needs="DataParallelMeshDims", raises=ValueError, words="not found in mesh.mesh_dim_names")
def a_dimension_that_the_mesh_lacks(lib):
    mesh, model = spmd("dp")
    lib.fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("fsdp"))


@case(
    needs="DataParallelMeshDims", raises=NotImplementedError, words="reshard_after_forward as int"
)
def a_number_of_ranks_on_an_spmd_mesh(lib):
    mesh, model = spmd("dp")
    dims = DataParallelMeshDims("dp")
    lib.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=2)


@case(needs="DataParallelMeshDims", raises=ValueError)
def replicas_only_on_an_spmd_mesh(lib):
    """DataParallelMeshDims(shard=None)"""
    mesh, model = spmd("dp")
    lib.fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"))


# --- reshard_after_forward -----------------------------------------------------------------------


@case(over={"value": [None, True, False, 1, 2]})
def training_with_reshard_after_forward(lib, value):
    return lib.train(lib.shard_blocks(toy(), reshard_after_forward=value))


@case(world=4, over={"value": [2, 4]})
def training_with_resharding_to_some_ranks(lib, value):
    return lib.train(lib.shard_blocks(toy(), reshard_after_forward=value))


@case(over={"value": [True, 2]})
def what_modules_show_after_forward(lib, value):
    """Return whether parameters of the root and of a block are sharded, and their shapes."""
    model = lib.shard_blocks(toy(), reshard_after_forward=value)
    model(lib.batch())
    shown = [model.head.weight, model.blocks[0].up.weight]
    return [isinstance(p, DTensor) for p in shown], [tuple(p.shape) for p in shown]


@case(raises=ValueError, words="should be a bool or an int", over={"value": ["yes", 2.0, [2]]})
def reshard_after_forward_of_another_type(lib, value):
    lib.fully_shard(linear(), reshard_after_forward=value)


@case(raises=ValueError, words="should be a factor of", over={"value": [3, 4]})
def reshard_after_forward_that_divides_nothing(lib, value):
    lib.fully_shard(linear(), reshard_after_forward=value)


@case(over={"inner": [True, False], "outer": [True, False]})
def options_that_differ_between_units(lib, inner, outer):
    model = toy()
    for block in model.blocks:
        lib.fully_shard(block, reshard_after_forward=inner)
    return lib.train(lib.fully_shard(model, reshard_after_forward=outer))


# --- shard_placement_fn --------------------------------------------------------------------------


@case(over={"placement": [None, Shard(0), Shard(-2)]})
def placements_on_rows(lib, placement):
    model = lib.fully_shard(nn.Linear(3, 5, bias=False), shard_placement_fn=lambda p: placement)
    return str(model.weight.placements), lib.full(model)


@case(over={"placement": [Shard(1), Shard(-1)]})
def placements_on_columns(lib, placement):
    model = lib.fully_shard(nn.Linear(4, 5, bias=False), shard_placement_fn=lambda p: placement)
    model(torch.ones(1, 4)).sum().backward()
    local = model.weight.to_local()
    return str(model.weight.placements), local, lib.full(model), lib.gradients(model)


def by_last(param):
    return Shard(param.dim() - 1) if param.dim() > 1 else None


class Mixed(nn.Module):
    """A module with weights of two and of three dimensions. Tests shard their last dimension."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 8)
        self.up = nn.Linear(8, 5)
        self.conv = nn.Conv1d(5, 4, 4)
        self.own = nn.Parameter(torch.randn(3, 2, 4))

    def forward(self, tokens):
        hidden = self.up(self.embed(tokens)).relu().transpose(1, 2)
        return self.conv(hidden).pow(2).mean() + self.own.sin().mean()


def by_columns(lib, **options):
    model = Mixed()
    lib.fully_shard(model.up, shard_placement_fn=by_last, **options)
    return lib.fully_shard(model, shard_placement_fn=by_last, **options)


def columns_loss(lib, model, step):
    torch.manual_seed(10 * step + lib.rank)
    return model(torch.randint(0, 7, (3, 9)))


@case(rtol=2e-2)
def training_by_columns_in_bfloat16(lib):
    return training_by_columns(lib, None, MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@case(over={"fused": [None, True]}, rtol=1e-4)
def training_by_columns(lib, fused, precision=None):
    """The program assigns gradients, clips them, and loads states as full tensors."""
    model = by_columns(lib, mp_policy=precision or MixedPrecisionPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=fused)
    losses = []
    for step in range(4):
        losses.append(columns_loss(lib, model, step))
        losses[-1].backward()
        lib.resharded(model)
        if step == 1:
            for p in model.parameters():
                p.grad = distribute_tensor(2 * whole(p.grad), p.device_mesh, p.placements)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 1:
            options = StateDictOptions(full_state_dict=True)
            states = get_optimizer_state_dict(model, optimizer, options=options)
            set_optimizer_state_dict(model, optimizer, states, options=options)
        optimizer.zero_grad()
    return [float(loss) for loss in losses], lib.full(model)


@case(rtol=1e-4)
def columns_without_synchronisation(lib):
    model = by_columns(lib)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        columns_loss(lib, model, step).backward()
    return lib.gradients(model)


@case()
def columns_cast_and_loaded(lib):
    model = by_columns(lib).to(torch.bfloat16)
    state = {
        k: distribute_tensor(torch.full(v.shape, 0.5).bfloat16(), v.device_mesh, v.placements)
        for k, v in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    columns_loss(lib, model, 0).backward()
    return lib.full(model), lib.gradients(model)


@case(raises=NotImplementedError)
def uneven_columns(lib):
    lib.fully_shard(nn.Linear(3, 5, bias=False), shard_placement_fn=lambda p: Shard(1))


@case(raises=AssertionError, words="is invalid for 1D tensor", over={"dim": [1, 3]})
def a_placement_beyond_the_last_dimension(lib, dim):
    lib.fully_shard(linear(), shard_placement_fn=lambda p: Shard(dim) if p.dim() == 1 else None)


@case(over={"value": [Replicate(), 0, "Shard(0)"]})
def placements_that_are_none(lib, value):
    """Either exception that torch's documentation names is accepted."""
    try:
        lib.fully_shard(linear(), shard_placement_fn=lambda p: value)
    except (AssertionError, ValueError):
        return "refused"


@case(world=4)
def a_mesh_for_one_parameter(lib):
    """shard_placement_fn that returns a mesh of the parameter's own"""
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    mesh = lib.mesh(2, 2)
    whole = common.FSDPMeshInfo(mesh=lib.mesh(), shard_mesh_dim=0)
    small = common.FSDPMeshInfo(mesh=mesh["shard"], shard_mesh_dim=0)

    def choose(param):
        info = small if param.dim() == 1 else whole
        return common.ShardPlacementResult(placement=Shard(0), mesh_info=info)

    model = lib.fully_shard(linear(), mesh=whole.mesh, shard_placement_fn=choose)
    model(torch.ones(1, 3)).sum().backward()
    return [tuple(p.device_mesh.mesh.shape) for p in model.parameters()]


@case()
def what_the_placement_function_gets(lib):
    seen = []
    lib.fully_shard(linear(), shard_placement_fn=lambda p: seen.append(tuple(p.shape)))
    return set(seen)


# --- tensors that gather themselves --------------------------------------------------------------


class Low(torch.Tensor):
    """A tensor that is gathered in bfloat16. The module computes with it in float32."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.as_subclass(torch.Tensor).bfloat16(),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        if out is not None:
            out.copy_(gathered)
            return None
        return gathered.float(), (gathered,)


@case(over={"where": ["own", "inside", "list"]})
def a_tensor_that_gathers_itself(lib, where):
    """fsdp_pre_all_gather, fsdp_post_all_gather"""
    inner = linear(4, 3)
    inner.weight = nn.Parameter(inner.weight.detach().as_subclass(Low))
    model = inner if where == "own" else nn.Sequential(nn.Linear(3, 3), inner)
    if where == "list":
        lib.fully_shard([model[0], inner])
    if where != "own":
        torch.nn.init.ones_(inner.bias)
    lib.fully_shard(model)
    model(torch.ones(1, 3)).sum().backward()
    return [p.grad.full_tensor() for p in inner.parameters()]


@case()
def an_ignored_tensor_that_gathers_itself(lib):
    model = nn.Sequential(linear(), linear(4, 5))
    model[1].weight = nn.Parameter(model[1].weight.detach().as_subclass(Low))
    lib.fully_shard(model, ignored_params={model[1].weight})
    model(torch.ones(1, 3)).sum().backward()
    kind = type(model[1].weight).__name__, isinstance(model[1].weight, DTensor)
    return kind, lib.gradients(model[0])


# --- ignored parameters --------------------------------------------------------------------------


def sharded_beside_ignored(lib):
    model = toy()
    ignored = set(model.head.parameters())
    for block in model.blocks:
        lib.fully_shard(block)
    return lib.fully_shard(model, ignored_params=ignored)


@case()
def ignored_parameters_stay_plain(lib):
    model = sharded_beside_ignored(lib)
    loss_of(model, lib.batch()).backward()
    return type(model.head.weight).__name__, model.head.weight.grad, lib.gradients(model)


@case()
def training_with_ignored_parameters(lib):
    model = sharded_beside_ignored(lib)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, lib.batch(step)).backward()
        for p in model.head.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    return lib.full(model)


@case()
def ignoring_everything(lib):
    model = linear()
    lib.fully_shard(model, ignored_params=set(model.parameters()))
    model(torch.ones(1, 3) * lib.rank).sum().backward()
    return [type(p).__name__ for p in model.parameters()], model.weight.grad


@case()
def ignoring_in_an_inner_call_only(lib):
    """The outer call also shards the parameter that the inner call ignored."""
    model = toy()
    lib.fully_shard(model.blocks[0], ignored_params={model.blocks[0].up.weight})
    lib.fully_shard(model)
    loss_of(model, lib.batch()).backward()
    return isinstance(model.blocks[0].up.weight, DTensor), lib.gradients(model)


@case(over={"value": [None, set()]})
def nothing_ignored(lib, value):
    return lib.train(lib.fully_shard(toy(), ignored_params=value))


@case()
def other_classes_of_blocks(lib):
    return lib.train(lib.shard_blocks(toy(), Block, nn.Linear, nn.LayerNorm, nn.Embedding))


@case()
def another_call_for_a_subtree(lib):
    """Two blocks of a model are sharded, and the model itself is not."""
    model = toy()
    lib.fully_shard(model.blocks[0])
    lib.fully_shard(model.blocks[1])
    loss_of(model, lib.batch()).backward()
    return lib.gradients(model.blocks), model.head.weight.grad


test_torch, test_fsdpc = case.tests()
