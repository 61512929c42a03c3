"""Optimizers that step in one pass over parameters, gradients and states. The parameters may be
shards or plain tensors. A step runs in C in host memory, or as kernels on a GPU.

The optimizers subclass ``torch.optim.Optimizer`` through ``FusedOptimizer``, which has their common
methods, and take torch's arguments. Constructing an optimizer is local. See docs/optimizers.md.
"""

from fsdpc.optim._disk import Disk, DiskError
from fsdpc.optim._host import Host
from fsdpc.optim._in_backward import in_backward
from fsdpc.optim.adafactor import Adafactor
from fsdpc.optim.adam import Adam, AdamW
from fsdpc.optim.adam_mini import AdamMini
from fsdpc.optim.adamw_8bit import AdamW8bit
from fsdpc.optim.adamw_bf16 import AdamWBF16
from fsdpc.optim.average import Average
from fsdpc.optim.lion import Lion
from fsdpc.optim.muon import Muon
from fsdpc.optim.sgd import SGD
from fsdpc.optim.shampoo import Shampoo
from fsdpc.optim.soap import SOAP

__all__ = [
    "SGD",
    "SOAP",
    "Adafactor",
    "Adam",
    "AdamMini",
    "AdamW",
    "AdamW8bit",
    "AdamWBF16",
    "Average",
    "Disk",
    "DiskError",
    "Host",
    "Lion",
    "Muon",
    "Shampoo",
    "in_backward",
]
