"""Optimizers whose steps are one pass in C, on shards and on plain tensors in host memory.

They subclass ``torch.optim.Optimizer`` and take torch's arguments. See docs/optimizers.md.
"""

from fsdpc.optim.adam import Adam, AdamW
from fsdpc.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
