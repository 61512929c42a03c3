"""Parameter names: which wrapper segments a fully qualified name carries, and the name without
them.
"""

from __future__ import annotations

FSDP_WRAPPED = "_fsdp_wrapped_module"
FSDP_PREFIX = FSDP_WRAPPED + "."
CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"
FLAT_PARAM = "_flat_param"

_WRAPPERS = frozenset({FSDP_WRAPPED, CHECKPOINT_WRAPPED})


def clean_fqn(name: str) -> str:
    """``a._fsdp_wrapped_module.b`` -> ``a.b``; activation wrappers' segments go too."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def join(prefix: str, name: str) -> str:
    """``prefix.name``, or ``name`` alone under an empty prefix."""
    return f"{prefix}.{name}" if prefix else name


def flat_param_name(index: int) -> str:
    """Registered name of a unit's ``index``-th flat parameter (torch knows only the first)."""
    return FLAT_PARAM if index == 0 else f"{FLAT_PARAM}_{index}"
