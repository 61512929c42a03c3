"""Compare load_pretrained with from_pretrained, and print a row per model.

Small models of transformers are saved with random weights. load_pretrained then loads them
into models that were made on the meta device and sharded, for each kind of sharding. Outputs and
unsharded values are compared to the bit.

torchrun --nproc-per-node=2 tests/dist/pretrained_table.py [--models llama,bert]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parent))

import torch
import torch.distributed as dist
from checkpoints import whole
from torch import nn

import fsdpc
from fsdpc import checkpoint

TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
# name -> (class of the configuration, class of the model, options of the configuration)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", EXPERTS),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM",
                  {**EXPERTS, "moe_intermediate_size": 24, "head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 8}),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 8}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {}),
    "t5": ("T5Config", "T5ForConditionalGeneration",
           {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
            "decoder_start_token_id": 0}),
    "bart": ("BartConfig", "BartForConditionalGeneration",
             {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
              "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4}),
    "vit": ("ViTConfig", "ViTForImageClassification", {"image_size": 16, "patch_size": 8}),
    "clip": ("CLIPConfig", "CLIPModel",
             {"text_config": {**TEXT, "projection_dim": 16},
              "vision_config": {"hidden_size": 32, "intermediate_size": 48, "image_size": 16,
                                "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8,
                                "projection_dim": 16},
              "projection_dim": 16}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {}),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"state_size": 8}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM",
                    {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
                     "moe_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 16,
                     "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
                     "first_k_dense_replace": 1, "n_shared_experts": 1,
                     "num_key_value_heads": 4}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**EXPERTS, "head_dim": 8}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 4}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration",
                {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
                 "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                 "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32,
                 "decoder_start_token_id": 1}),
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration",
              {"vision_config": {"model_type": "clip_vision_model", "hidden_size": 32,
                                 "intermediate_size": 48, "image_size": 16, "patch_size": 8,
                                 "num_hidden_layers": 2, "num_attention_heads": 4},
               "text_config": {"model_type": "llama", **TEXT}}),
}  # fmt: skip
DOORS = ("plain", "flat", "orig", "hybrid", "fully_shard")


def configuration(name: str) -> Any:
    import transformers

    kind, _, own = MODELS[name]
    nested = "text_config" in own
    return getattr(transformers, kind)(**({} if nested else TEXT) | own)


def saved(name: str, folder: str, **options: Any) -> nn.Module:
    """Save the model with random weights, which all differ from the initial values."""
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, MODELS[name][1])(configuration(name))
    with torch.no_grad():
        for param in model.parameters():
            param += torch.randn_like(param) * 0.05
    model.save_pretrained(folder, **options)
    return model


def on_meta(name: str) -> nn.Module:
    import transformers

    with torch.device("meta"):
        return getattr(transformers, MODELS[name][1])(configuration(name))


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the items of the outermost ModuleLists."""
    found: list[nn.Module] = []
    for module in model.children():
        found += list(module) if isinstance(module, nn.ModuleList) else layers(module)
    return found


def shard(model: nn.Module, door: str) -> nn.Module:
    units = layers(model)
    if door == "plain":
        return model
    if door == "fully_shard":
        for unit in units:
            fsdpc.fully_shard(unit)
        return fsdpc.fully_shard(model)
    from torch.distributed.fsdp import ShardingStrategy

    options: dict[str, Any] = {}
    if door == "hybrid":
        world = dist.get_world_size()
        pair = (2, world // 2) if world % 2 == 0 else (1, world)
        options["device_mesh"] = dist.device_mesh.init_device_mesh("cpu", pair)
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    return fsdpc.FullyShardedDataParallel(
        model,
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in units,
        use_orig_params=door != "flat",
        param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
        **options,
    )


def inputs(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 90, (2, 9))
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 16, 32), "decoder_input_ids": ids}
    if name == "clip":
        ids[:, -1] = 2
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)}
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if name in ("t5", "bart") else {})


@torch.no_grad()
def output(model: nn.Module, name: str) -> torch.Tensor:
    found = model.eval()(**inputs(name))
    return found.logits_per_image if name == "clip" else found.logits


def differences(model: nn.Module, reference: nn.Module, name: str) -> list[str]:
    """Return the names of values that differ between the model and the reference. Collective."""
    state = whole(model.state_dict())
    found = [
        key for key, value in reference.state_dict().items()
        if not (key in state and torch.equal(value, state[key]))
    ]  # fmt: skip
    same = torch.equal(output(model, name), output(reference, name))
    return found + ([] if same else ["output"])


def compare(name: str, door: str, folder: str) -> list[str]:
    """Return the problems of one model under one kind of sharding. Collective."""
    import transformers

    reference = getattr(transformers, MODELS[name][1]).from_pretrained(folder)
    model = shard(on_meta(name), door)
    result = checkpoint.load_pretrained(model, folder)
    found = differences(model, reference, name)
    return found + [f"initialised {n}" for n in result.initialized] + result.unexpected


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--doors", default=",".join(DOORS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failed = 0
    with tempfile.TemporaryDirectory() as base:
        shared = [base]
        dist.broadcast_object_list(shared)
        for name in args.models.split(","):
            folder = os.path.join(shared[0], name)
            if rank == 0:
                saved(name, folder, max_shard_size="20KB")
            dist.barrier()
            row = {}
            for door in args.doors.split(","):
                if door == "fully_shard" and name == "clip":
                    continue  # fully_shard refuses scalar parameters, as torch does
                try:
                    row[door] = compare(name, door, folder)
                except Exception as error:
                    row[door] = [f"{type(error).__name__}: {error}"[:1500]]
            if rank == 0:
                bad = {door: problems for door, problems in row.items() if problems}
                failed += bool(bad)
                print(f"{name:12} ranks {world}  {'equal' if not bad else bad}", flush=True)
        dist.barrier()
    if rank == 0:
        print(f"{len(args.models.split(','))} models, {failed} of them differ")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
