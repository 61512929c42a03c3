"""``torch.compile`` around units.

A unit must gather and swap parameters outside of compiled code: the frame of ``forward`` is never
traced, and its callees are compiled separately. A compiled module is wrapped as a whole, because
the compiler binds the original module before that could be wrapped.
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
    """As ``not_traced``, callees included: a hook may run inside a module that is compiled with
    ``fullgraph=True``, where whatever the compiler cannot trace raises.
    """
    return not_traced(function, _torch.SKIP_CALLEES)


def not_traced(function: Function, strategy: Any = _torch.SKIP_FRAME) -> Function:
    """Make torch.compile skip the frame of ``function``, not its callees. Costs nothing per call
    and does not import the compiler.
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
    """``function(*args)`` without torch.compile and transforms of torch.func, callees included: for
    calls that run once.
    """
    if _torch.COMPILER in sys.modules:
        function = torch.compiler.disable(function)
    with _torch.without_transforms():
        return function(*args)


def inside(module: nn.Module) -> nn.Module:
    """The original of a module that ``torch.compile`` returned; any other module unchanged."""
    compiled = _torch.compiled_class()
    if compiled is not None and isinstance(module, compiled):
        return inside(_torch.compiled_from(module))
    return module
