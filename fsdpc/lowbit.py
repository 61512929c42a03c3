"""A frozen base in 4 bits: layers whose weights are codes, sharded and gathered as bytes.

Each row of a weight is coded by itself: its codes, then, from a multiple of 16 bytes on, its scales
(``csrc/codec``). So a rank may own any rows, or any bytes of them, gathers bring codes, and what a
layer decodes is the same on any number of ranks. A layer decodes in forward and again in backward.
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
_AT_ONCE = 1 << 26  # values that a layer decodes at a time


# --- rows -----------------------------------------------------------------------------------------


@torch.library.custom_op("fsdpc::encode_rows", mutates_args=())
def encode_rows(rows: Tensor, codec: str) -> Tensor:
    """The codes of each row of a matrix. Local."""
    size = (*rows.shape[:-1], _C.row_codes_bytes(codec, rows.shape[-1]))
    # The padding is zero, so that equal weights have equal bytes.
    coded = torch.zeros(size, dtype=torch.uint8, device=rows.device)
    _C.encode_rows(codec, rows.detach().contiguous(), coded, kernel_ordinal(rows))
    return coded


@encode_rows.register_fake
def _(rows: Tensor, codec: str) -> Tensor:
    size = (*rows.shape[:-1], _C.row_codes_bytes(codec, rows.shape[-1]))
    return rows.new_empty(size, dtype=torch.uint8)


@torch.library.custom_op("fsdpc::decode_rows", mutates_args=())
def decode_rows(coded: Tensor, row: int, dtype: torch.dtype, codec: str) -> Tensor:
    """The values of coded rows, of ``row`` values each. Local."""
    found = torch.empty((*coded.shape[:-1], row), dtype=dtype, device=coded.device)
    coded = coded.contiguous()
    if coded.data_ptr() % 16:  # it lies behind bytes of another size in its unit
        coded = coded.clone()
    _C.decode_rows(codec, found, coded, kernel_ordinal(coded))
    return found


@decode_rows.register_fake
def _(coded: Tensor, row: int, dtype: torch.dtype, codec: str) -> Tensor:
    return coded.new_empty((*coded.shape[:-1], row), dtype=dtype)


class _Product(torch.autograd.Function):
    """``linear`` by a coded weight, of which at most ``_AT_ONCE`` values are decoded at a time."""

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
                dx = more if dx is None else dx + more.float()  # a sum of parts is in float32
            dx = None if dx is None else dx.to(grad.dtype)
        if ctx.needs_input_grad[2]:
            db = grad.reshape(-1, grad.shape[-1]).sum(0)
        return dx, None, db, None, None


def _parts(weight: Tensor, row: int) -> list[slice]:
    step = max(1, _AT_ONCE // row)
    return [slice(at, at + step) for at in range(0, len(weight), step)]


# --- layers ---------------------------------------------------------------------------------------


class _Coded(nn.Module):
    """A layer whose ``weight`` is codes. ``value_dtype``: the dtype that the weight had before."""

    codec: str
    value_dtype: torch.dtype
    weight: nn.Parameter
    plain: type[nn.Module]  # the layer's class before it was quantised
    width: str  # the attribute with the number of values in a row

    @property
    def row(self) -> int:
        """Values in a row of the weight."""
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
    """Quantise values that a layer loads. Refuse values that must be cut or converted first, also
    where they have the shape of the codes, so that ``copy_`` would make bytes of them.
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
    """Whether ``values`` has this shape and a dtype to encode; floats of 8 bits lack scales."""
    wide: bool = values.is_floating_point() and values.dtype.itemsize > 1
    return wide and tuple(values.shape) == tuple(shape)


class Linear(_Coded, nn.Linear):
    """A ``torch.nn.Linear`` that ``quantize`` has changed: a frozen weight in codes, decoded to the
    dtype of the input, or that of autocast. The bias is as before.

    ``weight``: uint8, (out_features, bytes of a row's codes and scales). As before, an input of
    (..., in_features) gives (..., out_features), in the dtype of the input or of autocast.
    ``RuntimeError``, on loading: values that are sharded, in 8 bits or of another shape than the
    layer's. ``TypeError``: the input is not floating-point, such as that of a module that casts to
    the weight's dtype; a call of ``reset_parameters``, because codes have no initialisation.
    """

    plain, width = nn.Linear, "in_features"

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_floating_point():  # else autocast makes floats of the bytes of a cast
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
    """A ``torch.nn.Embedding`` that ``quantize`` has changed: frozen codes, of which the rows that
    are looked up are decoded, to the dtype that the weight had.

    ``weight``: uint8, (num_embeddings, bytes of a row's codes and scales). As before, integers of
    any shape (...) give (..., embedding_dim). ``IndexError``: an index that is not in the table;
    the other errors are those of ``Linear``.
    """

    plain, width = nn.Embedding, "embedding_dim"

    def forward(self, input: Tensor) -> Tensor:
        rows = embedding(input, self.weight)
        found: Tensor = decode_rows(rows, self.embedding_dim, self.value_dtype, self.codec)
        return found


def coded_layers(model: nn.Module) -> Iterator[tuple[str, _Coded]]:
    """The layers that ``quantize`` has changed, under all their names. Local."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _Coded):
            yield name, module


# --- models ---------------------------------------------------------------------------------------


def quantize(
    model: M, codec: str = "nf4", *, skip: Collection[str] = ("lm_head",), embeddings: bool = False
) -> M:
    """Put the weights of ``model``'s linear layers into 4 bits and freeze them, in place: the base
    of QLoRA. Shard the model, with its adapters, afterwards, by either interface.

    ``"nf4"``: 4 bits and a float32 scale per 64 values of a row, the levels of QLoRA (arXiv
    2305.14314): 4.5 bits a value, the values of bitsandbytes' NF4 to the bit where 64 divides the
    rows' length. Changed are modules of the very class ``torch.nn.Linear``, with ``embeddings``
    also ``torch.nn.Embedding``, but for those with a name in ``skip`` (any part of one of their
    dotted names). If some parameters are frozen already, only frozen weights are changed, so that
    adapters stay. A model on the meta device stays there: ``fsdpc.checkpoint.load_pretrained``
    fills it, and quantises while it reads. A block with a value that is not finite becomes NaN.

    Local. Returns ``model``. ``ValueError``: an unknown codec, nothing to quantise, ``max_norm``, a
    weight shared with a module that is not quantised. ``TypeError``: the model is sharded already.
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
    """Keep torch's encoders from handing their layers' weights to a fused kernel in evaluation."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if any(isinstance(child, Linear) for child in module.children()):
                module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            if any(isinstance(child, Linear) for child in module.layers.modules()):
                module.use_nested_tensor = False


def dequantize(model: M, dtype: torch.dtype | None = None) -> M:
    """Make ordinary layers of those that ``quantize`` has changed, in place: to merge adapters, or
    to save values. ``dtype``: of the weights, which stay frozen; None: as before ``quantize``.

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
    """``state``, a full state dict of ``model`` (sharded or not), with values where it has codes:
    what the model before ``quantize`` loads. ``dtype``: of these values; None: the dtype they had.

    Local. ``TypeError``: a weight is a DTensor or in pieces; gather the state dict first
    (``full_state_dict=True``). ``ValueError``: ``state`` has tensors of a layer, not its weight.
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
    """``ValueError``: a weight has another site that stays as it is, or changes in forward."""
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
    """Give each layer its new class and weight; a weight that several layers share stays one."""
    done: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for module in layers:
        old = module.weight
        kind, new = change(module)
        if id(old) not in done:
            done[id(old)] = (old, nn.Parameter(new, requires_grad=False))
        module.weight = done[id(old)][1]
        module.__class__ = kind
