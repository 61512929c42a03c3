"""Where torch.compile meets units.

A unit's own work (gathering, swapping what modules show) must happen outside of compiled code: the
frame of ``forward`` is never traced, and what it calls is compiled by itself. A compiled module is
wrapped as a whole, because it has bound the module inside before anybody could wrap that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from fsdpc import _torch

Function = TypeVar("Function", bound=Callable[..., Any])


def not_traced(function: Function) -> Function:
    """Keep torch.compile out of ``function`` itself, but not out of what it calls. Costs nothing
    per call and does not import the compiler.
    """
    _torch.set_code_exec_strategy(function.__code__, _torch.SKIP_FRAME)
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = (
        "an FSDP unit gathers and frees its parameters here; the modules inside are compiled one "
        "by one"
    )
    return function


def call_untraced(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, with torch.compile kept out of all that it calls: for what runs once."""
    if _torch.COMPILER in sys.modules:
        function = torch.compiler.disable(function)
    return function(*args)


def inside(module: nn.Module) -> nn.Module:
    """What ``torch.compile`` was given, for a module that it returned; any other module itself."""
    compiled = _torch.compiled_class()
    if compiled is not None and isinstance(module, compiled):
        return inside(_torch.compiled_from(module))
    return module
