"""Materialisation of modules on the meta device by the user's ``param_init_fn`` or by
``reset_parameters()``.

Tied weights stay tied: ``to_empty`` makes a Parameter per registration site, so the first of these
Parameters is registered at all sites again. Values that stay uninitialised are reported:
floating-point tensors are filled with NaN before ``reset_parameters()``, and one warning names the
tensors that contain only NaN afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fsdpc._fsdp1.collect import Ignored, owned_modules
from fsdpc._fsdp1.names import join

Site = tuple[nn.Module, str]


def materialize(
    root: nn.Module,
    ignored: Ignored,
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
    *,
    warn_unwritten: bool,
) -> None:
    """Materialise the unit's own modules if any of the unit's own parameters or buffers is on the
    meta device. Local.

    ``warn_unwritten`` is False if the broadcast of ``sync_module_states`` overwrites the values.
    """
    modules = list(owned_modules(root, ignored.modules))
    if not any(
        tensor.is_meta for _, module in modules for _, tensor in _own_tensors(module, ignored)
    ):
        return
    ties = tied_sites(modules)
    if param_init_fn is not None:
        for _, module in modules:
            param_init_fn(module)
    else:
        _reset_all(modules, device, warn_unwritten)
    for sites in ties:
        retie(sites)


def _own_tensors(module: nn.Module, ignored: Ignored) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in module._parameters.items():
        if param is not None and param not in ignored.params:
            yield name, param
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer


def tied_sites(modules: list[tuple[str, nn.Module]]) -> list[list[Site]]:
    """Return the registration sites of each Parameter that has several sites, for ``retie``."""
    sites: dict[int, list[Site]] = {}
    for _, module in modules:
        for name, param in module._parameters.items():
            if param is not None:
                sites.setdefault(id(param), []).append((module, name))
    return [group for group in sites.values() if len(group) > 1]


def retie(sites: list[Site]) -> None:
    """Find the first Parameter with memory at ``sites``, and register this Parameter at all of
    them.
    """
    params = [module._parameters[name] for module, name in sites]
    param = next((p for p in params if p is not None and not p.is_meta), params[0])
    for module, name in sites:
        module._parameters[name] = param


def _reset_all(modules: list[tuple[str, nn.Module]], device: torch.device, warn: bool) -> None:
    unwritten: list[str] = []
    with torch.no_grad():
        for name, module in modules:
            if any(tensor.is_meta for _, tensor in _own_tensors(module, Ignored())):
                _reset(module, device, needed=warn)
                unwritten += [join(name, key) for key in _all_nan(module)]
    if warn and unwritten:
        warnings.warn(
            f"materialising the meta-device module left these values unwritten: {unwritten}. "
            "Set them in their modules' reset_parameters(), pass param_init_fn, or load a state "
            "dict before the first step.",
            stacklevel=5,
        )


def _reset(module: nn.Module, device: torch.device, *, needed: bool) -> None:
    """Allocate the module's own tensors and call ``reset_parameters()``. ``needed``: False if a
    broadcast will overwrite the values; the module may then lack ``reset_parameters()``.
    """
    try:
        with _real_buffers_kept(module):
            module.to_empty(device=device, recurse=False)
            for _, tensor in _own_tensors(module, Ignored()):
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        if needed or hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
    except BaseException as error:
        warnings.warn(
            f"Unable to call `reset_parameters()` for module on meta device with error {error}. "
            f"Please ensure that your module of type {type(module)} implements a "
            "`reset_parameters()` method.",
            stacklevel=6,
        )
        raise


@contextmanager
def _real_buffers_kept(module: nn.Module) -> Iterator[None]:
    """Keep the buffers that have values, for example if only parameters were made on the meta
    device.
    """
    real = {name: b for name, b in module._buffers.items() if b is not None and not b.is_meta}
    module._buffers.update(dict.fromkeys(real))
    try:
        yield
    finally:
        module._buffers.update(real)


def _all_nan(module: nn.Module) -> Iterator[str]:
    for name, tensor in _own_tensors(module, Ignored()):
        if tensor.is_floating_point() and tensor.numel() and bool(tensor.isnan().all()):
            yield name
