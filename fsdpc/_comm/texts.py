"""Exchange of short texts between all ranks of a process group, by one of torch's collectives.

torch's ``all_gather_object`` would need two collectives and would unpickle what peers send. If
the backend is gloo, collectives take most of the time that making a communicator takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

TEXT_BYTES = 512  # bytes sent for each text; longer texts are cut
# torch 2.13 renamed this collective and warns about the older name. Callers look the name up at
# each call, because a program may have replaced torch's function, for example to count calls.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def gather_texts(pg: dist.ProcessGroup, texts: Sequence[str]) -> list[list[str]]:
    """Return every rank's texts, in rank order. Collective.

    All ranks pass the same number of texts. A text ends at its first zero byte.
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
    """Return a device that the group's backends support: the CPU if possible, else the GPU."""
    if "cpu" in dist.get_backend_config(pg):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _pack(texts: Sequence[str]) -> bytes:
    return b"".join(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0") for text in texts)


def _unpack(piece: bytes) -> list[str]:
    lines = [piece[at : at + TEXT_BYTES] for at in range(0, len(piece), TEXT_BYTES)]
    return [line.partition(b"\0")[0].decode(errors="ignore") for line in lines]
