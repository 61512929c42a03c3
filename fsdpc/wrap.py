"""Wrap policies and the manual wrapping context: torch's own objects under fsdpc's name.

``enable_wrap(wrapper_cls=fsdpc.FSDP, ...)`` and ``wrap(module)`` work with fsdpc's wrapper as with
torch's. ``fsdpc/_fsdp1/wrap.py`` applies policies to module trees.
"""

from torch.distributed.fsdp.wrap import *

from fsdpc._torch import _or_policy, _Policy

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "_Policy",
    "_or_policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
