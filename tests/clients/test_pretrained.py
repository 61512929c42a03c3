"""Tests that `load_pretrained` gives the values of transformers' `from_pretrained` to the bit."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
import transformers
from pretrained_table import (
    compare,
    configuration,
    differences,
    inputs,
    layers,
    on_meta,
    output,
    saved,
    shard,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

import fsdpc
from fsdpc import checkpoint, lowbit
from fsdpc.checkpoint import CheckpointError, load_pretrained, save

# Each model has something that no other model here has, for example fused experts, tied weights,
# prefixes of names, or buffers.
ROWS = [
    ("mixtral", "fully_shard"),
    ("mixtral", "flat"),
    ("deepseek_v3", "fully_shard"),
    ("gpt_oss", "orig"),
    ("gpt2", "hybrid"),
    ("t5", "fully_shard"),
    ("bert", "flat"),
    ("llava", "fully_shard"),
    ("gemma3_text", "orig"),
    ("mamba", "fully_shard"),
    ("llama-tied", "plain"),
]


def pretrained(name: str, path: str, rank: int, **options) -> str:
    """Return the folder in which rank 0 has saved a model. Collective."""
    folder = os.path.join(path, "pretrained")
    if rank == 0:
        saved(name, folder, **options)
    dist.barrier()
    return folder


@ranks(2, 3)
@pytest.mark.parametrize(("name", "door"), ROWS)
def test_equals_from_pretrained(rank, world, name, door, tmp_path):
    folder = pretrained(name, str(tmp_path), rank, max_shard_size="20KB")
    assert compare(name, door, folder) == []


@ranks(2)
@pytest.mark.parametrize("door", ["orig", "fully_shard"])
def test_bf16_and_offload(rank, world, door, tmp_path):
    """Float32 files are loaded into a bfloat16 model whose parameters are offloaded to the host."""
    folder = pretrained("llama", str(tmp_path), rank)
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration("llama"), dtype=torch.bfloat16)
    if door == "orig":
        options = {
            "cpu_offload": fsdpc.CPUOffload(offload_params=True),
            "param_init_fn": lambda module: module.to_empty(device="cpu", recurse=False),
        }
        model = fsdpc.FSDP(model, **options)
    else:
        model = fsdpc.fully_shard(model, offload_policy=fsdpc.CPUOffloadPolicy(pin_memory=False))
    load_pretrained(model, folder)
    assert differences(model, reference, "llama") == []


@ranks(2)
@pytest.mark.parametrize("door", ["flat", "fully_shard"])
def test_into_torchs_classes(rank, world, door, tmp_path):
    import torch.distributed.fsdp as theirs

    name = "llama" if door == "flat" else "llama-tied"  # torch's FSDP1 breaks ties of meta models
    folder = pretrained(name, str(tmp_path), rank)
    reference = LlamaForCausalLM.from_pretrained(folder)
    model = on_meta(name)
    if door == "flat":
        model = theirs.FullyShardedDataParallel(
            model,
            param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
            device_id=torch.device("cpu"),
        )
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        for unit in layers(model):
            theirs.fully_shard(unit, mesh=mesh)
        model = theirs.fully_shard(model, mesh=mesh)
    load_pretrained(model, folder)
    with torch.no_grad():
        ids = inputs("llama")["input_ids"]
        assert torch.equal(model.eval()(ids).logits, reference.eval()(ids).logits)


@ranks(2)
@pytest.mark.parametrize("door", ["plain", "flat", "fully_shard"])
def test_new_head(rank, world, door, tmp_path):
    """A head that the files do not have gets the values that from_pretrained draws.

    The files' own head is not loaded, and the result lists it as unexpected.
    """
    folder = pretrained("llama", str(tmp_path), rank)
    torch.manual_seed(11 + rank)  # only rank 0's generator is used
    with torch.device("meta"):
        model = LlamaForSequenceClassification(configuration("llama"))
    model = shard(model, door)
    result = load_pretrained(model, folder)
    assert (result.initialized, result.unexpected) == (["score.weight"], ["lm_head.weight"])
    torch.manual_seed(11)
    reference = LlamaForSequenceClassification.from_pretrained(folder)
    assert differences(model, reference, "llama") == []


@ranks(2)
def test_prefixes(rank, world, tmp_path):
    """A base model loads the files of a full model, and a full model those of a base model."""
    folder = pretrained("llama", str(tmp_path), rank)
    with torch.device("meta"):
        base = LlamaModel(configuration("llama"))
    base = shard(base, "fully_shard")
    assert load_pretrained(base, folder).unexpected == ["lm_head.weight"]
    again = str(tmp_path / "base")
    if rank == 0:
        LlamaModel.from_pretrained(folder).save_pretrained(again)
    dist.barrier()
    model = shard(on_meta("llama"), "fully_shard")
    assert load_pretrained(model, again).initialized == ["lm_head.weight"]
    values = LlamaForCausalLM.from_pretrained(folder).state_dict()
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(value.full_tensor(), values[name]), name


@ranks(2)
def test_refusals(rank, world, tmp_path):
    folder = pretrained("llama", str(tmp_path), rank)
    with pytest.raises(CheckpointError, match="missing from the checkpoint: score.weight; only in"):
        with torch.device("meta"):
            model = LlamaForSequenceClassification(configuration("llama"))
        load_pretrained(shard(model, "fully_shard"), folder, strict=True)
    model = transformers.LlamaForCausalLM(configuration("llama"))
    model.resize_token_embeddings(100)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has shape \(96, 32\)"):
        load_pretrained(shard(model, "fully_shard"), folder)
    with pytest.raises(CheckpointError, match="no tensor of the files is one of the model"):
        load_pretrained(nn.Linear(2, 2), folder)
    with pytest.raises(CheckpointError, match="is missing, and '/none/there' is no name"):
        load_pretrained(nn.Linear(2, 2), "/none/there")
    with pytest.raises(CheckpointError, match="LocalEntryNotFoundError|offline"):
        load_pretrained(nn.Linear(2, 2), "some/model", cache_dir=str(tmp_path / "cache"))


@ranks(2)
def test_ties(rank, world, tmp_path):
    """accelerate's ``init_empty_weights`` unties tied weights.

    `load_pretrained` ties them again if nothing is sharded yet, and refuses a sharded model. It
    also refuses files with different values or shapes for tied parameters.
    """
    accelerate = pytest.importorskip("accelerate")
    folder = pretrained("llama-tied", str(tmp_path), rank)
    reference = LlamaForCausalLM.from_pretrained(folder)

    def empty() -> nn.Module:
        with accelerate.init_empty_weights():
            model = LlamaForCausalLM(configuration("llama-tied"))
        if model.lm_head.weight is model.model.embed_tokens.weight:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    model = empty()
    load_pretrained(model, folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert differences(model, reference, "llama") == []
    with pytest.raises(CheckpointError, match="lm_head.weight and model.embed_tokens.weight are"):
        load_pretrained(shard(empty(), "flat"), folder)
    apart = pretrained("llama", str(tmp_path / "apart"), rank)
    with pytest.raises(CheckpointError, match="different values for them: do not tie them"):
        load_pretrained(shard(on_meta("llama-tied"), "fully_shard"), apart)
    file = Path(apart) / "model.safetensors"
    if rank == 0:
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][1:].clone()
        save_file(tensors, f"{file}.new", {"format": "pt"})
        os.replace(f"{file}.new", file)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"one parameter of the model.* and \(\d+, \d+\): "):
        load_pretrained(shard(on_meta("llama-tied"), "fully_shard"), apart)


@ranks(2)
def test_peft(rank, world, tmp_path):
    """Adapters can be added after the load or before it.

    If they are added before, ``rename`` turns names in the files into peft's names.
    """
    peft = pytest.importorskip("peft")
    folder = pretrained("llama", str(tmp_path), rank)
    reference = LlamaForCausalLM.from_pretrained(folder)
    options = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    model = shard(on_meta("llama"), "plain")
    load_pretrained(model, folder)
    assert torch.equal(output(peft.get_peft_model(model, options), "llama"),
                       output(reference, "llama"))  # fmt: skip
    torch.manual_seed(2)
    model = peft.get_peft_model(LlamaForCausalLM(configuration("llama")), options)
    for unit in layers(model):
        fsdpc.fully_shard(unit)
    fsdpc.fully_shard(model)

    def inside(name: str) -> str:
        return re.sub(r"([qv]_proj)\.", r"\1.base_layer.", name)

    load_pretrained(
        model, folder, rename=inside, only=lambda name: "lora_" not in name, strict=True
    )
    assert torch.equal(output(model, "llama"), output(reference, "llama"))


@ranks(2)
@pytest.mark.parametrize("door", ["fully_shard", "flat"])
def test_peft_on_meta(rank, world, door, tmp_path):
    """If adapters are added before the load, the files' weights go into the base layers.

    No file has adapters. They start with peft's initial values, with which they have no effect,
    and not with transformers' initial values. A head in ``modules_to_save`` has no adapter, and is
    loaded as well.
    """
    peft = pytest.importorskip("peft")
    folder = pretrained("llama", str(tmp_path), rank)
    expected = output(LlamaForCausalLM.from_pretrained(folder), "llama")

    def adapted(**options) -> nn.Module:
        options = {"target_modules": ["q_proj", "embed_tokens"], **options}
        return shard(peft.get_peft_model(on_meta("llama"), peft.LoraConfig(**options)), door)

    model = adapted(modules_to_save=["lm_head"])
    found = load_pretrained(model, folder)
    assert found.unexpected == [] and all("lora_" in name for name in found.initialized)
    assert torch.equal(output(model, "llama"), expected)
    state = {name: tensor for name, tensor in checkpoint.stream(model) if "lora_" in name}
    assert all(bool(t.count_nonzero()) == ("_A." in n) for n, t in state.items() if "q_proj" in n)
    save(tmp_path / "all", model)
    again = adapted(modules_to_save=["lm_head"])
    assert load_pretrained(again, tmp_path / "all", strict=True).initialized == []
    for name, tensor in checkpoint.stream(again):
        assert "lora_" not in name or torch.equal(tensor, state[name])
    with pytest.raises(CheckpointError, match="lm_head.* is inside of an adapter of peft"):
        save(tmp_path / "hf", model, hf=True)
    for options in ({"use_dora": True}, {"init_lora_weights": "orthogonal"}):
        with pytest.raises(CheckpointError, match="q_proj.*give init=|q_proj.*Give init="):
            load_pretrained(adapted(**options), folder)
    model = adapted(init_lora_weights=False)
    load_pretrained(model, folder, only="*q_proj*")
    assert not torch.equal(output(model, "llama"), expected)


@ranks(2)
def test_bin_files_and_cache(rank, world, tmp_path):
    """A source may be one file or several files of torch.save, or a model in the Hub's cache.

    The files in the cache are symbolic links.
    """
    folder = pretrained("llama", str(tmp_path), rank)
    reference = LlamaForCausalLM.from_pretrained(folder)
    one, several = tmp_path / "one", tmp_path / "several"
    cache = tmp_path / "cache" / "models--some--model"
    if rank == 0:
        state = reference.state_dict()
        for target in (one, several):
            target.mkdir()
        torch.save(state, one / "pytorch_model.bin")
        names = {name: f"part{i % 2}.bin" for i, name in enumerate(state)}
        for part in set(names.values()):
            torch.save({n: state[n] for n in state if names[n] == part}, several / part)
        index = {"metadata": {}, "weight_map": names}
        (several / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        snapshot = cache / "snapshots" / ("0" * 40)
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text("0" * 40)
        snapshot.mkdir(parents=True)
        for file in Path(folder).iterdir():
            (snapshot / file.name).symlink_to(file)
    dist.barrier()
    for source in (one, several, "some/model"):
        model = shard(on_meta("llama"), "fully_shard")
        load_pretrained(model, source, cache_dir=str(tmp_path / "cache"))
        assert differences(model, reference, "llama") == [], source


@ranks(2)
def test_own_checkpoints(rank, world, tmp_path):
    """A folder that `save` wrote has checksums, which load_pretrained verifies first."""
    folder = pretrained("mixtral", str(tmp_path), rank)
    model = shard(on_meta("mixtral"), "fully_shard")
    load_pretrained(model, folder)
    saved_to = tmp_path / "saved"
    save(saved_to, model)
    other = shard(on_meta("mixtral"), "orig")
    assert load_pretrained(other, saved_to, strict=True).verified
    assert torch.equal(output(model, "mixtral"), output(other, "mixtral"))
    if rank == 0:
        (file,) = saved_to.glob("*.safetensors")
        raw = bytearray(file.read_bytes())
        raw[-5] ^= 1
        file.write_bytes(raw)
    dist.barrier()
    with pytest.raises(CheckpointError, match="is damaged"):
        load_pretrained(other, saved_to)


@ranks(2, 3)
@pytest.mark.parametrize(("name", "door"), [("mixtral", "fully_shard"), ("mixtral", "flat"),
                                            ("llama-tied", "orig"), ("llava", "fully_shard"),
                                            ("deepseek_v3", "hybrid"), ("t5", "flat")])  # fmt: skip
def test_hf_folders(rank, world, name, door, tmp_path):
    """`save(hf=True)` writes the tensors and the small files that `save_pretrained` writes; both
    `from_pretrained` and `load_pretrained` read the folder.
    """
    folder = pretrained(name, str(tmp_path), rank)
    model = shard(on_meta(name), door)
    load_pretrained(model, folder)
    again = tmp_path / "again"
    save(again, model, hf=True, tokenizer=Words())
    from safetensors.torch import load_file

    found = {n: v for file in again.glob("*.safetensors") for n, v in load_file(file).items()}
    theirs = load_file(os.path.join(folder, "model.safetensors"))
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[n], value) for n, value in theirs.items())
    small = json.loads((again / "config.json").read_text())
    assert small == json.loads(Path(folder, "config.json").read_text())
    assert (again / "words.txt").read_text() == "a b c"
    reference = type(on_meta(name)).from_pretrained(again)
    assert differences(model, reference, name) == []
    other = shard(on_meta(name), "fully_shard")
    assert load_pretrained(other, again, strict=True).verified
    assert differences(other, reference, name) == []
    save(again, model, hf=True, dtype=torch.bfloat16, overwrite=True)
    assert json.loads((again / "config.json").read_text())["dtype"] == "bfloat16"


@ranks(2)
@pytest.mark.parametrize("door", ["fully_shard", "flat", "orig"])
def test_hf_folders_of_values_of_codes(rank, world, door, tmp_path):
    """A quantized base is saved as decoded values, which `from_pretrained` reads."""
    folder = pretrained("llama-tied", str(tmp_path), rank)
    coded = {"skip": (), "embeddings": True}
    model = shard(lowbit.quantize(on_meta("llama-tied"), **coded), door)
    load_pretrained(model, folder)
    with pytest.raises(CheckpointError, match="is in codes, .* save with values=True, too"):
        save(tmp_path / "again", model, hf=True)
    save(tmp_path / "again", model, hf=True, values=True)
    kind = type(on_meta("llama-tied"))
    expected = lowbit.dequantize(lowbit.quantize(kind.from_pretrained(folder), **coded))
    found = kind.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())


class Words:
    """A tokenizer whose only method is save_pretrained."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "words.txt").write_text("a b c")


@ranks(2)
def test_hf_refusals(rank, world, tmp_path):
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="hf=True is for a model of transformers"):
        save(tmp_path / "a", model, hf=True)
    with pytest.raises(CheckpointError, match="tokenizer= is for hf=True"):
        save(tmp_path / "a", model, tokenizer=Words())
    with pytest.raises(CheckpointError, match="without optimizer= and only="):
        save(tmp_path / "a", model, torch.optim.SGD(model.parameters()), hf=True)
