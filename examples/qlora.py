"""QLoRA: adapters over a base in 4 bits, which fsdpc shards as it shards any model.

    pip install bitsandbytes peft transformers accelerate
    torchrun --nproc-per-node 2 examples/qlora.py

A tiny Llama with random weights stands for a model of yours: pass the name of its folder instead.
"""

import functools
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdpc import FullyShardedDataParallel as FSDP

QUANTISE = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)  # any bnb_4bit_quant_storage will do, the default too


def tiny(folder: Path) -> Path:
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    return folder


def main() -> None:
    dist.init_process_group("gloo")
    name = [sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()]
    dist.broadcast_object_list(name)
    folder = Path(name[0]) if len(sys.argv) > 1 else tiny(Path(name[0]))
    base = functools.partial(LlamaForCausalLM.from_pretrained, folder, quantization_config=QUANTISE)
    adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(1)  # the same adapters on every rank
    blocks = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
    )
    model = FSDP(get_peft_model(base(), adapters), auto_wrap_policy=blocks, use_orig_params=True)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

    text = torch.tensor(list(Path(__file__).read_bytes()))
    for step in range(20):
        generator = torch.Generator().manual_seed(dist.get_world_size() * step + dist.get_rank())
        starts = torch.randint(len(text) - 64, (4,), generator=generator)
        tokens = torch.stack([text[start : start + 64] for start in starts])
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    state = model.state_dict()  # codes, their scales and the adapters
    if dist.get_rank() == 0:
        saved = folder / "adapters"
        get_peft_model(base(), adapters).save_pretrained(saved, state_dict=state)
        merged = PeftModel.from_pretrained(base(), saved).merge_and_unload()
        print(f"adapters in {saved}; merged: loss {merged(tokens, labels=tokens).loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
