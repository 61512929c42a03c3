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

_PARALLEL, _COMPILED = "module", "_orig_mod"  # DDP's and torch.compile's names of the inner module
_WRAPPERS = frozenset({FSDP_WRAPPED, CHECKPOINT_WRAPPED})


def clean_fqn(name: str) -> str:
    """Remove the name segments of FSDP and of activation wrappers: ``a._fsdp_wrapped_module.b``
    becomes ``a.b``.
    """
    if FSDP_WRAPPED not in name and CHECKPOINT_WRAPPED not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def cleaner(model: nn.Module) -> Callable[[str], str]:
    """Return a function that converts a name without FSDP's segments to the name in the bare model.
    The function removes the segments of DistributedDataParallel and torch.compile.
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
    """Return the registered name of a unit's ``index``-th flat parameter. In torch a unit has only
    one flat parameter.
    """
    return FLAT_PARAM if index == 0 else f"{FLAT_PARAM}_{index}"


_announced: list[str] = []


@contextmanager
def announced(name: str) -> Iterator[None]:
    """Keep ``name``, a unit's name in the model being wrapped, for the next unit that is
    constructed in this context. The constructor's signature is torch's and has no argument for a
    name.
    """
    _announced[:] = [name]
    try:
        yield
    finally:
        _announced.clear()


def take_announced(default: str) -> str:
    """Return the announced name and forget the name. If no name is announced, because the user
    constructs the unit, return ``default``.
    """
    return _announced.pop() if _announced else default
