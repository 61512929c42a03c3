"""Layers with frozen weights of 4 bits per value. The weight parameter of such a layer consists of
codes, which are sharded and gathered as bytes.

Each row of a weight is coded separately: first the codes of the row, then its scales, which begin
at a multiple of 16 bytes (``csrc/codec``). A shard may therefore consist of whole rows or of any
bytes of rows, and a gather transfers codes. The decoded values are the same on any number of ranks.
A layer decodes its weight in forward and again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding, linear

from fsdpc import _C
from fsdpc._engine.device import kernel_ordinal
from fsdpc._fsdp1.names import clean_fqn, cleaner, join

__all__ = ["Embedding", "Linear", "dequantize", "quantize", "values"]

M = TypeVar("M", bound=nn.Module)
CODECS = ("nf4",)
_AT_ONCE = 1 << 26  # the most values that a layer decodes at a time


# --- rows -----------------------------------------------------------------------------------------


@torch.library.custom_op("fsdpc::encode_rows", mutates_args=())
def encode_rows(rows: Tensor, codec: str) -> Tensor:
    """Return the codes of each row of a matrix. Local."""
    size = (*rows.shape[:-1], _C.row_codes_bytes(codec, rows.shape[-1]))
    # The padding must be zero, so that equal weights have equal bytes.
    coded = torch.zeros(size, dtype=torch.uint8, device=rows.device)
    _C.encode_rows(codec, rows.detach().contiguous(), coded, kernel_ordinal(rows))
    return coded


@encode_rows.register_fake
def _(rows: Tensor, codec: str) -> Tensor:
    size = (*rows.shape[:-1], _C.row_codes_bytes(codec, rows.shape[-1]))
    return rows.new_empty(size, dtype=torch.uint8)


@torch.library.custom_op("fsdpc::decode_rows", mutates_args=())
def decode_rows(coded: Tensor, row: int, dtype: torch.dtype, codec: str) -> Tensor:
    """Return the values of coded rows. Each row has ``row`` values. Local."""
    found = torch.empty((*coded.shape[:-1], row), dtype=dtype, device=coded.device)
    coded = coded.contiguous()
    # A tensor in a unit's buffer is not aligned if the bytes before it are no multiple of 16.
    if coded.data_ptr() % 16:
        coded = coded.clone()
    _C.decode_rows(codec, found, coded, kernel_ordinal(coded))
    return found


@decode_rows.register_fake
def _(coded: Tensor, row: int, dtype: torch.dtype, codec: str) -> Tensor:
    return coded.new_empty((*coded.shape[:-1], row), dtype=dtype)


class _Product(torch.autograd.Function):
    """The product of ``linear`` with a coded weight. At most ``_AT_ONCE`` values of the weight are
    decoded at a time.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, row: int, codec: str) -> Tensor:
        if len(weight) * row <= _AT_ONCE:
            return linear(x, decode_rows(weight, row, x.dtype, codec), bias)
        out = x.new_empty((*x.shape[:-1], len(weight)))
        for part in _parts(weight, row):
            own = None if bias is None else bias[part]
            out[..., part] = linear(x, decode_rows(weight[part], row, x.dtype, codec), own)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, weight, _, ctx.row, ctx.codec = inputs
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (grad,), dx, db = ctx.saved_tensors, grads, None, None
        if ctx.needs_input_grad[0]:
            for part in _parts(weight, ctx.row):
                more = grad[..., part] @ decode_rows(weight[part], ctx.row, grad.dtype, ctx.codec)
                dx = more if dx is None else dx + more.float()  # parts are added in float32
            dx = None if dx is None else dx.to(grad.dtype)
        if ctx.needs_input_grad[2]:
            db = grad.reshape(-1, grad.shape[-1]).sum(0)
        return dx, None, db, None, None


def _parts(weight: Tensor, row: int) -> list[slice]:
    step = max(1, _AT_ONCE // row)
    return [slice(at, at + step) for at in range(0, len(weight), step)]


# --- layers ---------------------------------------------------------------------------------------


class _Coded(nn.Module):
    """A layer whose ``weight`` consists of codes. ``value_dtype``: the dtype that the weight had
    before it was quantised.
    """

    codec: str
    value_dtype: torch.dtype
    weight: nn.Parameter
    plain: type[nn.Module]  # the layer's class before it was quantised
    width: str  # the name of the attribute that has the number of values in a row

    @property
    def row(self) -> int:
        """The number of values in a row of the weight."""
        found: int = getattr(self, self.width)
        return found

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, codec={self.codec}"

    def reset_parameters(self) -> None:
        raise TypeError(
            f"a {type(self).__name__} in {self.codec} has no initialisation: load its values "
            "(fsdpc.checkpoint.load_pretrained), or initialise the model before it is quantised"
        )


def _take_values(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Quantise floating-point values that a coded layer loads. Report values that cannot be
    quantised (sharded values, 8-bit floats, values of another shape) as a loading error. Without
    this check, values of the same shape as the codes would be cast to bytes by ``copy_``.
    """
    key, own = f"{prefix}weight", module._parameters.get("weight")
    given = state.get(key)
    if not isinstance(module, _Coded) or own is None or not isinstance(given, Tensor):
        return
    if not given.is_floating_point():
        return
    whole = not isinstance(own, DTensor) and not isinstance(given, DTensor)
    if whole and can_encode(given, (*own.shape[:1], module.row)) and own.dim() == 2:
        state[key] = encode_rows(given, module.codec)
        return
    rest[-1].append(
        f"{key} is in {module.codec}, and the state dict has {tuple(given.shape)} values of "
        f"{given.dtype} in a {type(given).__name__}: load a state dict of codes, or values by "
        "fsdpc.checkpoint.load_pretrained or, as plain tensors of 16 bits or more, before the "
        "model is sharded"
    )
    state[key] = own


def can_encode(values: Any, shape: Sequence[int]) -> bool:
    """Return whether ``values`` has shape ``shape`` and a dtype that can be encoded. 8-bit floats
    cannot be encoded, because their scales are not known.
    """
    wide: bool = values.is_floating_point() and values.dtype.itemsize > 1
    return wide and tuple(values.shape) == tuple(shape)


class Linear(_Coded, nn.Linear):
    """A ``torch.nn.Linear`` that ``quantize`` has changed. The frozen weight consists of codes,
    which are decoded to the dtype of the input or of autocast. The bias does not change.

    ``weight``: uint8, (out_features, bytes of a row's codes and scales). As in ``torch.nn.Linear``,
    an input of shape (..., in_features) gives an output of shape (..., out_features), in the dtype
    of the input or of autocast. Loading raises ``RuntimeError`` if the values are sharded, have
    8 bits, or have another shape than the layer's weight. ``forward`` raises ``TypeError`` if the
    input is not floating-point, for example because a module casts the input to the weight's dtype.
    ``reset_parameters`` raises ``TypeError``, because codes have no initialisation.
    """

    plain, width = nn.Linear, "in_features"

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_floating_point():  # autocast would convert such an input to floats
            raise TypeError(
                f"the input of {self} is {input.dtype}, but must be floating-point. A module that "
                "casts its input to this weight's dtype (wo of T5) gets that of codes: name the "
                'layer in skip, such as lowbit.quantize(model, skip=("lm_head", "wo"))'
            )
        x, bias, kind = input, self.bias, input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        found: Tensor = _Product.apply(x, self.weight, bias, self.in_features, self.codec)
        return found


class Embedding(_Coded, nn.Embedding):
    """A ``torch.nn.Embedding`` that ``quantize`` has changed. The frozen weight consists of codes.
    Only the rows that are looked up are decoded, to the dtype that the weight had.

    ``weight``: uint8, (num_embeddings, bytes of a row's codes and scales). As in
    ``torch.nn.Embedding``, integers of any shape (...) give an output of shape (...,
    embedding_dim). ``IndexError``: an index is not in the table. The other errors are those of
    ``Linear``.
    """

    plain, width = nn.Embedding, "embedding_dim"

    def forward(self, input: Tensor) -> Tensor:
        rows = embedding(input, self.weight)
        found: Tensor = decode_rows(rows, self.embedding_dim, self.value_dtype, self.codec)
        return found


def coded_layers(model: nn.Module) -> Iterator[tuple[str, _Coded]]:
    """Yield the layers that ``quantize`` has changed, under all their names. Local."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _Coded):
            yield name, module


# --- models ---------------------------------------------------------------------------------------


def quantize(
    model: M, codec: str = "nf4", *, skip: Collection[str] = ("lm_head",), embeddings: bool = False
) -> M:
    """Quantise the weights of ``model``'s linear layers to 4 bits and freeze them, in place. The
    result is the base model of QLoRA. Shard the model afterwards, together with its adapters, by
    ``FullyShardedDataParallel`` or ``fully_shard``.

    ``"nf4"``: 4 bits for each value, and a float32 scale for each 64 values of a row, which makes
    4.5 bits a value. The levels are those of QLoRA (arXiv 2305.14314). The decoded values equal
    those of bitsandbytes' NF4 to the bit if 64 divides the rows' length.

    The function changes modules whose class is exactly ``torch.nn.Linear``, and with ``embeddings``
    also ``torch.nn.Embedding``. It skips a module if a component of one of the module's dotted
    names is in ``skip``. If some parameters are frozen already, only frozen weights are changed, so
    that adapters stay trainable. A model on the meta device stays there:
    ``fsdpc.checkpoint.load_pretrained`` fills the model and quantises while it reads. If one of the
    values that share a scale is not finite, all of these values become NaN.

    Local. Returns ``model``. ``ValueError``: the codec is unknown, no layer can be quantised, a
    layer has ``max_norm``, or a weight is shared with a module that is not quantised.
    ``TypeError``: the model is sharded already.
    """
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}: choose one of {', '.join(CODECS)}")
    _refuse_sharded(model, "quantize")
    kinds: dict[type, type[_Coded]] = {nn.Linear: Linear}
    if embeddings:
        kinds[nn.Embedding] = Embedding
    skipped = {
        module
        for name, module in model.named_modules(remove_duplicate=False)
        if set(skip) & set(name.split("."))
    }
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) in kinds and module not in skipped
    }
    some = any(not param.requires_grad for param in model.parameters())
    chosen = {n: m for n, m in found.items() if not (some and m.weight.requires_grad)}
    if not chosen:
        why = (
            ""
            if not found
            else ": some parameters are frozen, and then only frozen weights are quantised"
        )
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"quantize found no {names} to quantise{why}")
    _check_chosen(model, chosen)

    def change(module: Any) -> tuple[type, Tensor]:
        module.codec, module.value_dtype = codec, module.weight.dtype
        module.register_load_state_dict_pre_hook(_take_values)
        return kinds[type(module)], encode_rows(module.weight, codec)

    _change(chosen.values(), change)
    _leave_fast_path(model)
    return model


def _leave_fast_path(model: nn.Module) -> None:
    """Make torch's Transformer encoders call their linear layers in evaluation. By default they
    pass the layers' weights to a fused kernel, which cannot read codes.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if any(isinstance(child, Linear) for child in module.children()):
                module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            if any(isinstance(child, Linear) for child in module.layers.modules()):
                module.use_nested_tensor = False


def dequantize(model: M, dtype: torch.dtype | None = None) -> M:
    """Replace the layers that ``quantize`` has changed by ordinary layers, in place, for example to
    merge adapters or to save values. ``dtype`` is the dtype of the weights, which stay frozen; None
    stands for the dtype that the weights had before ``quantize``.

    Local. Returns ``model``. ``TypeError``: the model is sharded.
    """
    _refuse_sharded(model, "dequantize")

    def change(module: Any) -> tuple[type, Tensor]:
        return module.plain, decode_rows(
            module.weight, module.row, dtype or module.value_dtype, module.codec
        )

    _change([module for module in model.modules() if isinstance(module, _Coded)], change)
    return model


def values(
    model: nn.Module, state: Mapping[str, Any], dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Return a copy of ``state`` in which codes are replaced by values. The model as it was before
    ``quantize`` can load the copy. ``state`` is a full state dict of ``model``; the model may be
    sharded. ``dtype`` is the dtype of the values; None stands for the dtype that the weights had
    before ``quantize``.

    Local. ``TypeError``: a weight is a DTensor or only a part of the codes; gather the state dict
    first (``full_state_dict=True``). ``ValueError``: ``state`` has tensors of a layer, but not the
    layer's weight.
    """
    found, clean = dict(state), cleaner(model)
    bare = {clean(clean_fqn(key)): key for key in state}
    for name, module in coded_layers(model):
        raw = clean_fqn(name)
        keys = (join(raw, "weight"), join(clean(raw), "weight"))
        key = next((key for key in keys if key in state), bare.get(keys[1]))
        if key is None:
            _refuse_parts(clean(raw), bare)
            continue
        coded = found[key]
        size = _C.row_codes_bytes(module.codec, module.row)
        if type(coded) not in (Tensor, nn.Parameter) or coded.shape[-1:] != (size,):
            raise TypeError(
                f"{key} is a {type(coded).__name__} of shape {tuple(coded.shape)}, not all codes: "
                "give a full state dict (full_state_dict=True)"
            )
        found[key] = decode_rows(
            coded.detach(), module.row, dtype or module.value_dtype, module.codec
        )
    return found


def _refuse_parts(layer: str, names: Iterable[str]) -> None:
    some = next((name for name in names if name.startswith(join(layer, ""))), None)
    if some is not None:
        raise ValueError(
            f"the state dict has {some}, but not {join(layer, 'weight')}, which would stay in "
            "codes under another name: give a full state dict of this model"
        )


def _refuse_sharded(model: nn.Module, what: str) -> None:
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) or getattr(param, "_fsdp_flattened", False):
            raise TypeError(
                f"{what} needs a model that is not sharded, and {name!r} is: "
                f"call fsdpc.lowbit.{what} before the model is sharded, or on an unsharded copy"
            )


def _check_chosen(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    """Raise ``ValueError`` if a weight is shared with a module that is not quantised, or if a layer
    changes its weight in forward (``max_norm``).
    """
    for name, module in chosen.items():
        if getattr(module, "max_norm", None) is not None:
            raise ValueError(f"{name} has max_norm, which changes the weight: name it in skip")
    weights = {id(module.weight): name for name, module in chosen.items()}
    for name, module in model.named_modules():
        for key, param in module._parameters.items():
            if id(param) in weights and (name not in chosen or key != "weight"):
                raise ValueError(
                    f"{name}.{key} is the same parameter as {weights[id(param)]}.weight, which is "
                    "quantised: quantise both (skip=(), embeddings=True), or name both in skip"
                )


@torch.no_grad()
def _change(layers: Iterable[Any], change: Callable[[Any], tuple[type, Tensor]]) -> None:
    """Set the new class and the new weight of each layer. Layers that share a weight also share the
    new weight.
    """
    done: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for module in layers:
        old = module.weight
        kind, new = change(module)
        if id(old) not in done:
            done[id(old)] = (old, nn.Parameter(new, requires_grad=False))
        module.weight = done[id(old)][1]
        module.__class__ = kind
