"""What autograd saves for backward, in host memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_said: list[str] = []  # the sentence, once a process has read it


@contextmanager
def offload(model: nn.Module) -> Iterator[None]:
    """Keep what autograd saves inside the ``with`` block in host memory, for ``model``'s forward.

    On ranks that compute on processors, the model is in host memory already: nothing is copied, no
    hook is set, and one warning per process says so. Local. ``NotImplementedError``: a parameter on
    another device.
    """
    for name, param in model.named_parameters():
        if param.device.type not in ("cpu", "meta"):
            raise NotImplementedError(
                f"fsdpc.activations.offload() copies nothing from {param.device}, where parameter "
                f"{name!r} is: use torch.autograd.graph.save_on_cpu(pin_memory=True), or "
                "fsdpc.activations.checkpoint()"
            )
    if not _said:
        _said.append("said")
        warnings.warn(
            "fsdpc.activations.offload(): the model is in host memory, where offloaded activations "
            "would be: nothing is copied. compress() and checkpoint() save memory there",
            stacklevel=3,
        )
    yield
