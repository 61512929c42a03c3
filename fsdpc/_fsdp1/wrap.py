"""The two algorithms that apply a wrap policy to a module tree.

A policy object selects all modules to wrap by one call; the tree is then rewritten from the leaves
up. Callable policies are called twice per module: on the way down to decide whether to recurse, and
on the way up to decide whether to wrap the parameters that are not in a unit yet. Neither algorithm
wraps the root, because FSDP's constructor, which calls the algorithm, does this. A module
registered twice becomes one unit registered twice. A compiled module is wrapped as a whole if the
policy selects its original module.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdpc._engine.compiled import inside
from fsdpc._fsdp1.collect import Ignored, is_unit_module, own_params
from fsdpc._fsdp1.mixed import FullPrecisionHooks
from fsdpc._fsdp1.names import announced, join
from fsdpc.api import MixedPrecision
from fsdpc.wrap import _Policy

Wrap = Callable[..., nn.Module]


def auto_wrap(
    root: nn.Module, policy: Any, ignored: Ignored, kwargs: dict[str, Any], wrapper: Wrap
) -> None:
    """Wrap the descendants of ``root`` that ``policy`` selects, each as
    ``wrapper(child, **kwargs)``. Collective. ``ValueError``: a descendant is an FSDP instance
    already.
    """
    _check_unwrapped(root)
    full_precision = _full_precision_classes(root, kwargs["mixed_precision"])
    apply_policy(root, policy, full_precision, ignored, kwargs, wrapper)


def apply_policy(
    root: nn.Module,
    policy: Any,
    full_precision: tuple[type[nn.Module], ...],
    ignored: Ignored,
    kwargs: dict[str, Any],
    wrapper: Wrap,
) -> None:
    """Replace the descendants of ``root`` that ``policy`` selects, and the instances of
    ``full_precision``, by ``wrapper(child, **kwargs)``. Local if ``wrapper`` is local.
    """
    if isinstance(policy, _Policy):
        targets = policy._run_policy(root, ignored.modules, dict(kwargs))
        _add_full_precision(root, full_precision, ignored, kwargs, targets)
        _TreeRewriter(root, _compiled_as_a_whole(root, targets), wrapper).run()
    else:
        _Recursion(policy, full_precision, ignored, kwargs, wrapper).run(root)


def _check_unwrapped(root: nn.Module) -> None:
    for name, module in root.named_modules():
        if is_unit_module(module):
            raise ValueError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{name} in\n{root}\nWrap by hand or by policy, not both"
            )


def _full_precision_classes(
    root: nn.Module, mixed_precision: MixedPrecision | None
) -> tuple[type[nn.Module], ...]:
    """Return the classes to keep in fp32. Register casting hooks on the instances of these classes
    in ``root``, and warn once, with the names of the classes found.
    """
    if mixed_precision is None:
        return ()
    classes = tuple(mixed_precision._module_classes_to_ignore)
    found = [module for module in root.modules() if isinstance(module, classes)]
    for module in found:
        FullPrecisionHooks(module)
    if found:
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the "
            "wrapped module has submodules of "
            f"type:\n{ {type(module) for module in found} }\nThese modules will be wrapped as "
            "separate FSDP instances with mixed precision disabled.",
            stacklevel=4,
        )
    return classes


def _add_full_precision(
    root: nn.Module,
    classes: tuple[type[nn.Module], ...],
    ignored: Ignored,
    kwargs: dict[str, Any],
    targets: dict[nn.Module, dict[str, Any]],
) -> None:
    for module in root.modules():
        if isinstance(module, classes) and module not in ignored.modules:
            target = targets.setdefault(module, copy.copy(kwargs))
            target["mixed_precision"] = None


def _compiled_as_a_whole(
    root: nn.Module, targets: dict[nn.Module, dict[str, Any]]
) -> dict[nn.Module, dict[str, Any]]:
    """Return the targets, with each compiled module in place of its original module."""
    result = dict(targets)
    for module in root.modules():  # outer compiled modules come before inner ones
        if inside(module) is not module and inside(module) in result:
            result[module] = result.pop(inside(module))
    return result


class _TreeRewriter:
    """The rewriter of a module tree. It replaces every target below the root by the target's unit,
    children first and each module once.
    """

    def __init__(self, root: nn.Module, targets: dict[nn.Module, dict[str, Any]], wrapper: Wrap):
        self.root = root
        self.targets = targets
        self.wrapper = wrapper
        self.done: dict[nn.Module, nn.Module] = {root: root}

    def run(self) -> None:
        self._children(self.root, "")

    def _children(self, parent: nn.Module, prefix: str) -> None:
        for name, child in list(parent._modules.items()):
            if child is not None:
                replacement = self._visit(child, join(prefix, name))
                if replacement is not child:
                    setattr(parent, name, replacement)

    def _visit(self, module: nn.Module, name: str) -> nn.Module:
        if module not in self.done:
            self.done[module] = module  # ends the recursion if the module contains itself
            self._children(module, name)
            kwargs = self.targets.get(module)
            if kwargs is not None:
                with announced(name):
                    self.done[module] = self.wrapper(module, **kwargs)
        return self.done[module]


class _Recursion:
    """The recursion for a callable policy. It calls the policy on the way down and on the way up,
    with the number of elements that are not in a unit yet.
    """

    def __init__(
        self,
        policy: Callable[..., bool],
        full_precision: tuple[type[nn.Module], ...],
        ignored: Ignored,
        kwargs: dict[str, Any],
        wrapper: Wrap,
    ):
        self.policy = policy
        self.full_precision = full_precision
        self.ignored = ignored
        self.kwargs = kwargs
        self.wrapper = wrapper
        self.done: dict[nn.Module, nn.Module] = {}

    def run(self, root: nn.Module) -> None:
        root = inside(root)
        self._children(root, "", self._ask(root, recurse=True))

    def _left_over(self, module: nn.Module) -> int:
        """Return the number of elements of the module's parameters that are neither ignored nor in
        a unit yet.
        """
        found = set(own_params(module, self.ignored))
        return sum(p.numel() for p in found if not getattr(p, "_fsdp_flattened", False))

    def _ask(self, module: nn.Module, *, recurse: bool) -> bool:
        numel = self._left_over(module)
        return bool(self.policy(module=module, recurse=recurse, nonwrapped_numel=numel))

    def _children(self, parent: nn.Module, prefix: str, allowed: bool) -> None:
        """Replace children by their units. A child that is registered at several places is replaced
        at each of them.

        If the policy refused to recurse (``allowed`` is False), only instances of the
        full-precision classes are wrapped.
        """
        if not (allowed or self.full_precision):
            return
        for name, child in list(parent._modules.items()):
            if child is None or child in self.ignored.modules:
                continue
            replacement = self._visit(child, join(prefix, name), allowed)
            if replacement is not child:
                setattr(parent, name, replacement)

    def _visit(self, module: nn.Module, name: str, allowed: bool) -> nn.Module:
        if module not in self.done:
            plain = inside(module)
            self.done[module] = module  # ends the recursion if the module contains itself
            look_inside = allowed and self._ask(plain, recurse=True)
            self._children(plain, name, look_inside)
            if self._wanted(plain, look_inside):
                self.done[module] = self._wrap(module, name)
        return self.done[module]

    def _wanted(self, module: nn.Module, allowed: bool) -> bool:
        if isinstance(module, self.full_precision):
            return True
        return allowed and self._ask(module, recurse=False)

    def _wrap(self, module: nn.Module, name: str) -> nn.Module:
        kwargs = {**self.kwargs, **getattr(module, "_wrap_overrides", {})}
        if isinstance(inside(module), self.full_precision):
            kwargs["mixed_precision"] = None
        with announced(name):
            return self.wrapper(module, **kwargs)
