"""Short texts that all ranks of a process group show each other, by one collective of torch's.

``all_gather_object`` needs two collectives for the same and unpickles what peers sent; over gloo,
collectives are most of the time that making a group's communicator takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

TEXT_BYTES = 512  # of each text; what is longer is cut
# torch 2.13 renamed this collective and warns about the older name. Callers look the name up at
# each call, because a program may have replaced torch's function, for example to count calls.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def gather_texts(pg: dist.ProcessGroup, texts: Sequence[str]) -> list[list[str]]:
    """Every rank's texts, in the order of ranks. Collective; all ranks give equally many texts.

    A zero byte ends a text.
    """
    where = _device(pg)
    mine = torch.tensor(list(_pack(texts)), dtype=torch.uint8, device=where)
    whole = torch.empty(pg.size() * mine.numel(), dtype=torch.uint8, device=where)
    getattr(dist, ALL_GATHER)(whole, mine, group=pg)
    everything = bytes(whole.tolist())
    return [
        _unpack(everything[at : at + mine.numel()])
        for at in range(0, len(everything), mine.numel())
    ]


def _device(pg: dist.ProcessGroup) -> torch.device:
    """A device whose tensors the group's backends carry: the CPU, if they carry its tensors."""
    if "cpu" in dist.get_backend_config(pg):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _pack(texts: Sequence[str]) -> bytes:
    return b"".join(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0") for text in texts)


def _unpack(piece: bytes) -> list[str]:
    lines = [piece[at : at + TEXT_BYTES] for at in range(0, len(piece), TEXT_BYTES)]
    return [line.partition(b"\0")[0].decode(errors="ignore") for line in lines]
