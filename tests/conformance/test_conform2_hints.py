"""Divide factors, hints and refused methods of FSDPModule; resets, moves and conversions."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from outcome import raises
from rows_library import RowsLibrary, linear, shown
from suite import BOTH, Cases
from toys import loss_of, toy

case = Cases(__name__, __file__, library=RowsLibrary)


# --- factors -------------------------------------------------------------------------------------


@case(over={"factor": [1.0, 2.0, 3.0, 8.0, 0.5], "name": ["gradient", "reduce_scatter"]})
def divide_factors(lib, factor, name):
    """The reductions are forced to be sums, because gloo has no PREMUL_SUM for divide factors."""
    model = lib.shard_blocks(toy())
    for module in model.modules():
        if isinstance(module, lib.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            getattr(module, f"set_{name}_divide_factor")(factor)
    return lib.gradients_after(model)


@case()
def the_divide_factor_of_one_unit(lib):
    model = lib.shard_blocks(toy())
    block = model.blocks[1]
    block.set_force_sum_reduction_for_comms(True)
    block.set_gradient_divide_factor(1.0)
    return lib.gradients_after(model)


@case(world=4, over={"factor": [1.0, 4.0, 16.0]})
def divide_factors_with_replicas(lib, factor):
    model = lib.fully_shard(toy(), mesh=lib.mesh(2, 2))
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(factor)
    return lib.gradients_after(model)


@case()
def a_divide_factor_set_between_steps(lib):
    model = lib.fully_shard(toy())
    model.set_force_sum_reduction_for_comms(True)
    loss_of(model, lib.batch()).backward()
    before = lib.gradients(model)
    model.zero_grad()
    model.set_gradient_divide_factor(1.0)
    loss_of(model, lib.batch()).backward()
    return before, lib.gradients(model)


@case()
def a_divide_factor_with_accumulation(lib):
    model = lib.fully_shard(toy())
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(3.0)
    return lib.gradients_after(model, "01")


# --- hints ---------------------------------------------------------------------------------------


@case(over={"direction": ["forward", "backward"], "ahead": [1, 2]})
def prefetching(lib, direction, ahead):
    model = lib.shard_blocks(toy(blocks=3))
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        after = blocks[i + 1 : i + 1 + ahead] if direction == "forward" else blocks[:i][-ahead:]
        getattr(block, f"set_modules_to_{direction}_prefetch")(after)
    return lib.train(model)


@case(raises=ValueError, words="Expects FSDPModule", over={"direction": ["forward", "backward"]})
def prefetching_of_plain_modules(lib, direction):
    model = lib.fully_shard(linear())
    getattr(model, f"set_modules_to_{direction}_prefetch")([linear()])


@case(over={"direction": ["forward", "backward"]})
def prefetching_in_the_wrong_order(lib, direction):
    """Prefetching in a wrong order changes no result, because a prefetch is only a hint."""
    model = lib.shard_blocks(toy(blocks=3))
    blocks = list(model.blocks)
    for block in blocks:
        getattr(block, f"set_modules_to_{direction}_prefetch")([blocks[0], blocks[2]])
    return lib.train(model)


EITHER = [{"recurse": True}, {"recurse": False}]
# The name of a setter without "set_" -> the values and the options that the setter is called with.
SETTERS = {
    "force_sum_reduction_for_comms": (BOTH, [{}]),
    "allocate_memory_from_process_group_for_comm": (BOTH, [{}]),
    "reduce_scatter_unused_params": (BOTH, EITHER),
    "reduce_scatter_max_input_buffers": ([1, 2, 5], EITHER),
    "separate_reduce_scatter_group": (BOTH, EITHER),
}


@case(over={"name": [name for name in SETTERS if hasattr(torch_fsdp.FSDPModule, f"set_{name}")]})
def setters_that_change_no_result(lib, name):
    found = []
    for value, options in itertools.product(*SETTERS[name]):
        model = lib.shard_blocks(toy())
        getattr(model, f"set_{name}")(value, **options)
        found.append(lib.train(model))
    return found


@case(
    needs="set_reduce_scatter_max_input_buffers",
    raises=TypeError,
    words="must be an int",
    over={"value": [1.5, "2", None]},
)
def reductions_in_flight_of_another_type(lib, value):
    lib.fully_shard(linear()).set_reduce_scatter_max_input_buffers(value)


@case(
    needs="set_reduce_scatter_max_input_buffers",
    raises=ValueError,
    words="must be a positive int",
    over={"value": [0, -1]},
)
def reductions_in_flight_below_one(lib, value):
    lib.fully_shard(linear()).set_reduce_scatter_max_input_buffers(value)


@case()
def an_event_after_the_optimizer(lib):
    model = lib.fully_shard(toy())
    model.set_post_optim_event(torch.Event("cpu") if hasattr(torch, "Event") else None)
    return True


@case(over={"value": BOTH})
def asynchronous_gathers(lib, value):
    model = lib.shard_blocks(toy())
    for module in model.modules():
        if isinstance(module, lib.FSDPModule):
            module._set_unshard_async_op(value)
    return lib.train(model)


@case()
def a_hook_on_reduced_gradients(lib):
    """set_all_reduce_hook"""
    model = lib.fully_shard(linear())
    model.set_all_reduce_hook(lambda flat: flat.mul_(2))
    model(torch.ones(1, 3)).sum().backward()
    return lib.gradients(model)


# --- what fsdpc refuses --------------------------------------------------------------------------


class Gather:
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class Scatter(Gather):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


@case(
    fsdpc=raises(NotImplementedError, "in place on slots"),
    over={"comm": [Gather, Scatter]},
)
def custom_collectives(lib, comm):
    """set_custom_all_gather, set_custom_reduce_scatter"""
    model = lib.fully_shard(linear())
    name = "all_gather" if comm is Gather else "reduce_scatter"
    getattr(model, f"set_custom_{name}")(comm())
    model(torch.ones(1, 3)).sum().backward()
    return lib.gradients(model)


@case(raises=Exception)
def symmetric_memory_on_the_cpu(lib):
    model = lib.fully_shard(linear())
    model.set_symm_mem_for_comm()
    model(torch.ones(1, 3)).sum().backward()


# --- the root ------------------------------------------------------------------------------------


@case(needs="reset_iter_state", raises=RuntimeError, words="must be called on the root")
def resetting_an_inner_unit(lib):
    model = lib.shard_blocks(toy())
    model(lib.batch())
    model.blocks[0].reset_iter_state()


@case(needs="reset_iter_state")
def resetting_between_steps(lib):
    model = lib.shard_blocks(toy())
    loss_of(model, lib.batch()).backward()
    before = lib.gradients(model)
    model.reset_iter_state()
    return before, lib.gradients(model), lib.train(model)


@case(needs="reset_iter_state")
def resetting_after_a_forward(lib):
    """reset_iter_state after a forward abandons the graph of that forward."""
    model = lib.shard_blocks(toy())
    model(lib.batch())
    model.reset_iter_state()
    return shown(model) == [n for n, _ in model.named_parameters()], lib.train(model)


@case(needs="reset_iter_state")
def resetting_drops_what_was_kept_unreduced(lib):
    model = lib.shard_blocks(toy())
    lib.backward(model, 0, 0, sync=False)
    model.reset_iter_state()
    lib.backward(model, 0, 1)
    return lib.gradients(model)


# --- moving and converting -----------------------------------------------------------------------


@case(over={"dtype": [torch.bfloat16, torch.float64, torch.float16]})
def converting_before_the_first_forward(lib, dtype):
    model = lib.shard_blocks(toy()).to(dtype)
    return {str(p.dtype) for p in model.parameters()}, lib.full(model)


@case(over={"name": ["half", "double", "bfloat16", "float"]})
def converting_by_name(lib, name):
    model = getattr(lib.shard_blocks(toy()), name)()
    return {str(p.dtype) for p in model.parameters()}


@case(rtol=2e-2)
def training_after_a_conversion(lib):
    return lib.gradients_after(lib.shard_blocks(toy()).to(torch.bfloat16))


@case(over={"call": ["cpu", "to"]})
def moving_to_where_a_model_is(lib, call):
    model = lib.shard_blocks(toy())
    ids = [id(p) for p in model.parameters()]
    model = model.cpu() if call == "cpu" else model.to("cpu")
    same = ids == [id(p) for p in model.parameters()]
    return same, lib.train(model)


@case()
def moving_between_steps(lib):
    model = lib.shard_blocks(toy())
    first = lib.train(model, 1)
    return first, lib.train(model.to("cpu"), 1)


@case(over={"value": BOTH})
def freezing_the_whole_model(lib, value):
    model = lib.shard_blocks(toy()).requires_grad_(value)
    return [p.requires_grad for p in model.parameters()], model(lib.batch()).requires_grad


test_torch, test_fsdpc = case.tests()
