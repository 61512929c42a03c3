"""Marks that a user puts on modules and the engine reads."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

DATA_DEPENDENT = "_fsdpc_data_dependent"


def mark_data_dependent(module: M) -> M:
    """Declare that which units below ``module`` run depends on the data, rank by rank.

    Mark the container of a mixture of experts whose router picks experts from each rank's own
    batch. Where ranks cannot see each other's requests cheaply, the units below a marked module are
    gathered on every rank in a fixed order; over shared memory the mark changes nothing, since
    there any rank may ask for any unit.

    Local; call it on every rank, before the first forward. Returns ``module``.
    Raises ``TypeError`` when ``module`` is not an ``nn.Module``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"mark_data_dependent expects an nn.Module but got {type(module).__name__}")
    setattr(module, DATA_DEPENDENT, True)
    return module


def attach_marked(root: nn.Module) -> list[Any]:
    """Hooks for the marked modules below ``root``, for trees whose ranks cannot see each other's
    requests: around a marked forward all its units are gathered in module order on every rank, and
    again when the first gradient reaches an output. Returns the handles. Local.
    """
    from fsdpc._fsdp1.collect import unit_modules  # with it comes torch.distributed.fsdp

    handles = []
    for module in root.modules():
        if getattr(module, DATA_DEPENDENT, False):
            units = [m._unit for m in unit_modules(module) if m._unit is not None]
            if units:
                marked = _Marked(units)
                handles.append(module.register_forward_pre_hook(marked.before))
                handles.append(module.register_forward_hook(marked.after))
    return handles


class _Marked:
    def __init__(self, units: list[Any]) -> None:
        self.units = units
        self.backward = [unit.flat.hook("pre_backward") for unit in units]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Marked:
        """In a copy of the model, whose own hooks come with its first forward: nothing to do."""
        return _Marked([])

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for unit in self.units:
            unit.flat.enter_forward()

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        for unit in self.units:
            unit.flat.leave_forward()
        if not self.units or not torch.is_grad_enabled():
            return None
        from fsdpc._torch import tree_map_only  # as above

        return tree_map_only(Tensor, self.watched, output)

    def watched(self, tensor: Tensor) -> Tensor:
        """The tensor behind an autograd node of its own: what a module hands through unchanged
        would share a node with an earlier module, and the order of gathers would depend on that.
        """
        if not tensor.requires_grad:
            return tensor
        tensor = tensor.view_as(tensor)
        tensor.grad_fn.register_prehook(self.gather)  # type: ignore[union-attr]
        return tensor

    def gather(self, gradients: tuple[Tensor | None, ...]) -> None:
        for hook in self.backward:
            hook(gradients)
