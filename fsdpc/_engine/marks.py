"""Marks that the user sets on modules and parameters, and that the engine reads."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
P = TypeVar("P", bound=nn.Module | nn.Parameter)

DATA_DEPENDENT = "_fsdpc_data_dependent"
REPLICATED = "_fsdpc_replicated"


def mark_data_dependent(module: M) -> M:
    """Declare that data decides, on each rank separately, which units below ``module`` run.

    Mark the container of a mixture of experts whose router picks experts from each rank's batch.
    Without shared memory, all units below a marked module are gathered on every rank, in a fixed
    order. Over shared memory the mark is a no-op, because each rank may gather any unit.

    Local; call on every rank, before the first forward. Returns ``module``. ``TypeError``:
    ``module`` is not an ``nn.Module``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"mark_data_dependent expects an nn.Module but got {type(module).__name__}")
    setattr(module, DATA_DEPENDENT, True)
    return module


def mark_replicated(what: P) -> P:
    """Declare that the program itself keeps a parameter, or the parameters of a module, equal on
    all ranks.

    Without this mark each forward raises if trainable parameters that no unit manages were added
    below a sharded module. The program must average the gradients of marked parameters
    (``dist.all_reduce`` before the optimizer's step).

    Local; call on every rank. Returns ``what``. ``TypeError``: ``what`` is no module or parameter.
    """
    if not isinstance(what, nn.Module | nn.Parameter):
        raise TypeError(
            f"mark_replicated expects an nn.Module or nn.Parameter but got {type(what).__name__}"
        )
    what.__dict__[REPLICATED] = True
    return what


def is_replicated(what: nn.Module | nn.Parameter) -> bool:
    """Whether ``mark_replicated`` has marked this module or parameter. Local."""
    return REPLICATED in what.__dict__


def hosts(model: nn.Module) -> list[Any]:
    """Return the objects in ``model`` that own units (``UnitHost``), in module order: those of
    FSDP1 and those of ``fully_shard``. Local.
    """
    found = [getattr(module, "_fsdpc_host", None) for module in model.modules()]
    whole = [each for host in found if host is not None for each in (host, *host._others)]
    return list({id(host): host for host in whole}.values())


def attach_marked(root: nn.Module) -> list[Any]:
    """Register hooks on the modules below ``root`` that are marked as data-dependent, for trees
    without shared memory. Return the hooks' handles. Local.

    The hooks let every rank gather all units of a marked module in module order: for the module's
    forward, and again in backward when the first gradient reaches an output of the module.
    """
    handles = []
    for module in root.modules():
        if getattr(module, DATA_DEPENDENT, False):
            units = [host._unit for host in hosts(module) if host._unit is not None]
            if units:
                marked, inner = _Marked(units), getattr(module, "_fsdp_wrapped_module", module)
                handles.append(inner.register_forward_pre_hook(marked.before))
                # With `prepend` the hook runs before a unit's own hook on the same module. With
                # `always_call` it also runs if the forward raises an exception, as torch's
                # checkpoint does to end a recomputation.
                after = inner.register_forward_hook(marked.after, prepend=True, always_call=True)
                handles.append(after)
    return handles


def enter_marked(module: nn.Module) -> None:
    """Run the pre-hooks that ``attach_marked`` has registered on ``module`` during a call of
    ``module``. torch does not run these pre-hooks in this call, because it has already listed the
    pre-hooks to run. Local.
    """
    for hook in list(module._forward_pre_hooks.values()):
        marked = getattr(hook, "__self__", None)
        if isinstance(marked, _Marked):
            marked.before(module, ())


class _Marked:
    def __init__(self, units: list[Any]) -> None:
        self.units = units
        self.backward = [unit.flat.hook("pre_backward") for unit in units]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Marked:
        """Return hooks that do nothing: a copied model gets its hooks at its first forward."""
        return _Marked([])

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for unit in self.units:
            unit.flat.enter_forward()

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        for unit in self.units:
            unit.flat.leave_forward()
        if not self.units or not torch.is_grad_enabled():
            return None
        from fsdpc._torch import tree_map_only  # imports torch's FSDP, which takes long

        if self.leaves_out(output):
            output = tree_map_only(Tensor, with_gradient, output)
        return tree_map_only(Tensor, self.watched, output)

    def leaves_out(self, output: Any) -> bool:
        """Whether no gradient can reach the outputs on this rank, although gradients may reach the
        outputs of other ranks, which have run units. Only those other ranks would gather the units
        in backward.
        """
        from fsdpc._torch import tree_leaves  # imports torch's FSDP, which takes long

        tensors = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
        if any(tensor.requires_grad for tensor in tensors):
            return False
        return any(param.requires_grad for unit in self.units for param in unit.shard_params)

    def watched(self, tensor: Tensor) -> Tensor:
        """Return a view of ``tensor`` whose autograd node has a hook that gathers the units.

        The view gives the output a node of its own. If the module returned an input unchanged, the
        hook would otherwise be on an earlier module's node, and run at another time.
        """
        if not tensor.requires_grad:
            return tensor
        tensor = tensor.view_as(tensor)
        tensor.grad_fn.register_prehook(self.gather)  # type: ignore[union-attr]
        return tensor

    def gather(self, gradients: tuple[Tensor | None, ...]) -> None:
        for hook in self.backward:
            hook(gradients)


def with_gradient(tensor: Tensor) -> Tensor:
    """Return a new tensor that has the values of ``tensor`` and requires a gradient. If ``tensor``
    is not floating-point, return it unchanged.
    """
    if not tensor.is_floating_point():
        return tensor
    return tensor * torch.ones((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)
