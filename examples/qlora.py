"""QLoRA: adapters over a 4-bit base model, quantised while its files are read into shards.

    pip install peft transformers
    torchrun --nproc-per-node 2 examples/qlora.py

The script trains adapters over a tiny Llama with random weights. To use a model of your own, pass
the name of its folder. fsdpc also shards a base model that bitsandbytes has quantised: see
docs/low_bit.md.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fsdpc import checkpoint, fully_shard, lowbit

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = LoraConfig(r=8, target_modules=TARGETS, task_type="CAUSAL_LM")


def tiny(folder: Path) -> Path:
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    return folder


def named(name: str) -> str:
    """Return the name that peft gives to the tensor ``name`` of the files."""
    layer = name.removesuffix(".weight")
    inner = ".base_layer" if layer.endswith(TARGETS) else ""
    return f"base_model.model.{layer}{inner}.weight"


def shard(model: nn.Module) -> nn.Module:
    llama = model.base_model.model
    for module in (*llama.model.layers, llama.model.embed_tokens, llama.lm_head):
        fully_shard(module)
    return fully_shard(model)


def model_of(folder: Path) -> nn.Module:
    """Build the sharded model. No rank ever holds the whole model, or a whole weight."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model = get_peft_model(lowbit.quantize(base), ADAPTERS)
    shard(model)
    checkpoint.load_pretrained(model, folder, rename=named, only=lambda name: "lora_" not in name)
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.reset_lora_parameters("default", True)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    name = [sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()]
    dist.broadcast_object_list(name)
    folder = Path(name[0]) if len(sys.argv) > 1 else tiny(Path(name[0]))
    model = model_of(folder)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

    text = torch.tensor(list(Path(__file__).read_bytes()))
    for step in range(20):
        generator = torch.Generator().manual_seed(dist.get_world_size() * step + dist.get_rank())
        begins = torch.randint(len(text) - 64, (4,), generator=generator)
        tokens = torch.stack([text[begin : begin + 64] for begin in begins])
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=full)
    if dist.get_rank() == 0:
        saved = folder / "adapters"
        base = AutoModelForCausalLM.from_pretrained(folder)
        get_peft_model(base, ADAPTERS).save_pretrained(saved, state_dict=state)
        # Merge the adapters into the values that they were trained on.
        base = AutoModelForCausalLM.from_pretrained(folder)
        values = lowbit.dequantize(lowbit.quantize(base))
        merged = PeftModel.from_pretrained(values, saved).merge_and_unload()
        print(f"adapters in {saved}; merged: loss {merged(tokens, labels=tokens).loss.item():.3f}")
    dist.destroy_process_group()


def llama_70b() -> dict:
    """Return what ``python -m fsdpc plan qlora:llama_70b`` needs: see docs/low_bit.md."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=128256, **sizes, **heads, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = get_peft_model(lowbit.quantize(model, skip=(), embeddings=True), ADAPTERS)
    tokens = torch.zeros(1, 256, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    return {"model": model, "inputs": inputs, "shard": shard}


if __name__ == "__main__":
    main()
