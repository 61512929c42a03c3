"""Units inside code that ``torch.compile`` compiles, and units around compiled modules.

A unit must gather and swap its parameters outside compiled code. The compiler therefore never
traces the frame of a unit's ``forward``; the functions that the frame calls are compiled
separately. A compiled module is wrapped as a whole, because the compiled module refers to the
original module, which can no longer be replaced by a wrapped one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from fsdpc import _torch

Function = TypeVar("Function", bound=Callable[..., Any])


def hook(function: Function) -> Function:
    """Make torch.compile skip the frame of ``function`` and the functions that it calls.

    A hook may run inside a module that is compiled with ``fullgraph=True``, which raises for all
    code that the compiler cannot trace.
    """
    return not_traced(function, _torch.SKIP_CALLEES)


def not_traced(function: Function, strategy: Any = _torch.SKIP_FRAME) -> Function:
    """Make torch.compile skip the frame of ``function``, but not the functions that it calls.

    Marking a function in this way costs nothing per call and does not import the compiler.
    """
    _torch.set_code_exec_strategy(function.__code__, strategy)
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = (
        "an FSDP unit gathers and frees its parameters here, or an optimizer steps them; the "
        "modules inside are compiled one by one"
    )
    return function


def call_untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``. The function and all functions that it calls run outside
    torch.compile and outside torch.func's transforms. Use this function only for calls that run
    once.
    """
    if _torch.COMPILER in sys.modules:
        function = torch.compiler.disable(function)
    with _torch.without_transforms():
        return function(*args)


def inside(module: nn.Module) -> nn.Module:
    """Return the original of a module that ``torch.compile`` has made. Return any other module
    unchanged.
    """
    compiled = _torch.compiled_class()
    if compiled is not None and isinstance(module, compiled):
        return inside(_torch.compiled_from(module))
    return module
