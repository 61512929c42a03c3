"""Parameter names with and without wrapper segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from fsdpc._engine.modules import join as join

FSDP_WRAPPED = "_fsdp_wrapped_module"
FSDP_PREFIX = FSDP_WRAPPED + "."
CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"
FLAT_PARAM = "_flat_param"

_PARALLEL, _COMPILED = "module", "_orig_mod"  # what DDP and torch.compile call the module inside
_WRAPPERS = frozenset({FSDP_WRAPPED, CHECKPOINT_WRAPPED})


def clean_fqn(name: str) -> str:
    """``a._fsdp_wrapped_module.b`` -> ``a.b``; also removes activation wrappers' segments."""
    if FSDP_WRAPPED not in name and CHECKPOINT_WRAPPED not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def cleaner(model: nn.Module) -> Callable[[str], str]:
    """A function from a name without FSDP's segments to the name in the bare model: it removes the
    segments of DistributedDataParallel and torch.compile.
    """
    parallel = (
        join(clean_fqn(name), _PARALLEL)
        for name, module in model.named_modules()
        if isinstance(module, nn.parallel.DistributedDataParallel)
    )
    inner_first = sorted(parallel, key=len, reverse=True)

    def clean(name: str) -> str:
        for prefix in inner_first:
            if name == prefix or name.startswith(f"{prefix}."):
                name = prefix.removesuffix(_PARALLEL) + name[len(prefix) + 1 :]
        if _COMPILED not in name:
            return name
        return ".".join(part for part in name.split(".") if part != _COMPILED)

    return clean


def flat_param_name(index: int) -> str:
    """Registered name of a unit's ``index``-th flat parameter (torch has only one)."""
    return FLAT_PARAM if index == 0 else f"{FLAT_PARAM}_{index}"


_announced: list[str] = []


@contextmanager
def announced(name: str) -> Iterator[None]:
    """Pass the next unit constructed in this block its name in the model being wrapped: the
    constructor's signature is torch's and has no argument for a name.
    """
    _announced[:] = [name]
    try:
        yield
    finally:
        _announced.clear()


def take_announced(default: str) -> str:
    """The announced name, once; ``default`` for a unit constructed by the user."""
    return _announced.pop() if _announced else default
