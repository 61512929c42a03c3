"""The model that transformers builds from a configuration, and the inputs of a step."""

from __future__ import annotations

import inspect
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdpc.plan.model import Setup

# The first task with a model for the configuration is taken, so the most usual tasks come first.
_TASKS = ("Seq2SeqLM", "SpeechSeq2Seq", "MaskedLM", "CausalLM", "ImageTextToText", "PreTraining",
          "CTC", "ImageClassification")  # fmt: skip
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def sentence(error: BaseException) -> str:
    from fsdpc.plan.sources import fake  # imports torch

    return fake.sentence(error)


class Refused(ValueError):
    """Raised if a transformers configuration cannot be planned; the text says why."""


def read(path: str) -> dict[str, Any]:
    """Return the JSON object in a file. ``ValueError``: there is no such file or object."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no transformers configuration: {type(found).__name__}")
    return found


def installed() -> bool:
    return find_spec("transformers") is not None


def config_of(values: dict[str, Any]) -> Any:
    """Return the configuration object of transformers. ``Refused`` names a model type that this
    version of transformers does not have.
    """
    import transformers

    values = {k: v for k, v in values.items() if k not in ("quantization_config", "auto_map")}
    kind = values.pop("model_type", None)
    if kind is None:
        raise Refused("the configuration has no model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise Refused(
            f"transformers {transformers.__version__} has no model type {kind!r}: give "
            "module:function, which may build the model with code of its own"
        )
    try:
        return transformers.CONFIG_MAPPING[kind](**values)
    except Exception as error:
        raise Refused(
            f"transformers refuses this {kind!r} configuration: {sentence(error)}"
        ) from error


def class_of(config: Any) -> Any:
    """Return the class of the model: the first in ``architectures``, or, if there are none, the
    class that transformers maps to the configuration.
    """
    import transformers

    named = list(getattr(config, "architectures", None) or ())
    if named:
        found = getattr(transformers, named[0], None)
        if found is None or not hasattr(found, "forward"):
            raise Refused(
                f"transformers {transformers.__version__} has no model class {named[0]!r}"
            )
        return found
    for auto in (*(f"AutoModelFor{task}" for task in _TASKS), "AutoModel"):
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            found = found[0] if isinstance(found, (list, tuple)) else found
            if isinstance(config, found.config_class):  # else ``found`` is a part of the model
                return found
    raise Refused(f"transformers has no model for the configuration {config.model_type!r}")


def step_of(config: Any, setup: Setup, device: str = "meta") -> dict[str, Any]:
    """Return the model and its inputs, on fake tensors only. ``Refused``: transformers fails."""
    import torch

    cls = class_of(config)
    try:
        if setup.attention == "eager":
            config._attn_implementation = "eager"
        with torch.device(device):  # "meta": transformers draws no initial values
            model = cls(config).to(getattr(torch, setup.storage)).train()
    except Exception as error:
        raise Refused(f"transformers cannot build {cls.__name__}: {sentence(error)}") from error
    return {"model": model, "inputs": inputs_of(model, setup)}


def inputs_of(model: Any, setup: Setup) -> dict[str, Any] | None:
    """Return the inputs of a micro-batch, chosen by the model's main input. Return None if the
    planner does not know this kind of input.
    """
    import torch

    config, batch, main = model.config, setup.micro_batch, model.main_input_name
    names = inspect.signature(model.forward).parameters
    if main == "pixel_values" and "input_ids" not in names:
        size = getattr(config, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        return {
            "pixel_values": torch.rand(
                batch, getattr(config, "num_channels", 3), height, width, device="cpu"
            )
        }
    if main == "input_values":
        return {"input_values": torch.rand(batch, 16000, device="cpu")}
    text, found = config.get_text_config(), {}
    most = getattr(text, "max_position_embeddings", None)
    length = min(setup.sequence, most) if isinstance(most, int) and most > 0 else setup.sequence
    ids = torch.randint(getattr(text, "vocab_size", 2), (batch, length), dtype=torch.long)
    if main == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * getattr(config, "max_source_positions", 1500)
        found = {main: torch.rand(batch, config.num_mel_bins, frames, device="cpu")}
    elif "input_ids" in names:
        found = {"input_ids": ids}
    else:
        return None
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        found["decoder_input_ids"] = ids
    if "labels" in names and type(model).__name__.endswith(_WITH_LABELS):
        found["labels"] = ids
    return found


_WITH_LABELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")


def experts_of(config: Any) -> tuple[int, int]:
    """Return how many experts a layer has, and how many a token uses; zeros for a dense model."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = next((n for n in (getattr(text, k, None) for k in _EXPERTS) if n), 0)
    used = getattr(text, "num_experts_per_tok", 0) or 0
    return (count, min(used, count)) if isinstance(count, int) and used else (0, 0)
