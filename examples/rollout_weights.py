"""Trains a model while an engine generates with the model's newest weights, as in reinforcement
learning. After each step the engine's process receives all weights, without files and without a
second model in the training processes.

torchrun --nproc-per-node 2 examples/rollout_weights.py

In this example the engine is the unsharded model. `into_vllm` and `into_sglang` show how to pass
the weights to vLLM and SGLang. Both functions follow the documents of these engines (vLLM 0.26 to
0.32, SGLang's "SGLang for RL Systems"). This project's tests do not run these functions, because
both engines need GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch import Tensor

from fsdpc import FullyShardedDataParallel as FSDP
from fsdpc import checkpoint
from fsdpc.wrap import ModuleWrapPolicy

CONFIG = GPTConfig(layers=2, width=64, heads=2, context=32)
STEPS = 3


def train(path: str) -> None:
    """Train the model. Every rank calls this function; rank 0 also starts the engine."""
    from gpt import Block

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FSDP(GPT(CONFIG), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = None
    if dist.get_rank() == 0:
        engine = subprocess.Popen([sys.executable, __file__, "--engine", path])
    with checkpoint.stream(model, dtype=torch.bfloat16) as tap:
        for step in range(STEPS):
            tokens = torch.randint(CONFIG.vocab, (2, CONFIG.context + 1))
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tap.publish(path, step=step, deadline=300)  # the engine may be busy
    if engine is not None and engine.wait() != 0:
        raise SystemExit("the engine has failed")
    dist.destroy_process_group()


def serve(path: str) -> None:
    """Run the engine in its own process, which joins no process group."""
    model = GPT(CONFIG).to(torch.bfloat16)
    params = dict(model.state_dict())
    with checkpoint.StreamReader(path, deadline=300) as reader, torch.no_grad():
        for weights in reader:  # ends when the training closes its stream
            for name, tensor in weights:
                params[name].copy_(tensor)
            logits = model(torch.zeros(1, 1, dtype=torch.int64))
            print(
                f"step {weights.step}: the next byte is {int(logits[0, -1].argmax())}", flush=True
            )


class WeightSource:
    """A source of weights for vLLM's `TrainerWeightTransferEngine.send_weights`. To use it, derive
    the class from `vllm.distributed.weight_transfer.base.WeightSource`, which has these two
    methods. Every rank must iterate, as vLLM requires for sharded models.
    """

    def __init__(self, tap: checkpoint.WeightStream) -> None:
        self._tap = tap

    def metadata(self) -> list[Any]:
        """Return one entry per tensor, with the same fields as vLLM's `ParamMeta`."""
        return list(self._tap.metadata())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tap)


def into_vllm(reader: checkpoint.StreamReader, model: Any) -> None:
    """Load the next set of weights into a worker of vLLM on this host. Call this, for example, in
    `receive_weights` of an engine of your own (`WeightTransferEngineFactory.register_engine`) or in
    a worker extension. Each worker has its own reader, and `publish(readers=...)` takes the number
    of readers. vLLM cuts and fuses the tensors itself.
    """
    model.load_weights(iter(next(reader)))


def into_sglang(tap: checkpoint.WeightStream, engine: Any) -> None:
    """Send a set of weights to an SGLang engine in rank 0's process, one bucket per request. Every
    rank must call this, with a `tap` from `stream(..., rank0_only=True)`. After the last bucket,
    rank 0 flushes the engine's cache of prefixes.
    """
    tap.send(lambda bucket: engine.update_weights_from_tensor(bucket, flush_cache=False))
    if dist.get_rank() == 0:
        engine.flush_cache()


def main() -> None:
    if sys.argv[1:2] == ["--engine"]:
        serve(sys.argv[2])
        return
    name = f"fsdpc-{os.environ.get('MASTER_PORT', 'weights')}.sock"
    train(str(Path(tempfile.gettempdir()) / name))


if __name__ == "__main__":
    main()
