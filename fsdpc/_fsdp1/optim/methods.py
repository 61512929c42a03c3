"""The optimizer state-dict methods of ``FullyShardedDataParallel``.

The dicts have the unsharded model's parameter names for keys and full tensors (distributed ones in
the SHARDED form) for values, so that a checkpoint loads with another number of ranks, another
wrapping and another ``use_orig_params``. Names, argument order and messages are those of
``torch.distributed.fsdp.FullyShardedDataParallel``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdpc import state_dict as _state_dict
from fsdpc._fsdp1.args import check_model, check_optimizer
from fsdpc._fsdp1.optim.book import Book, Key, is_named, keys_of_input, keys_of_optimizer, read_book
from fsdpc._fsdp1.optim.groups import keyed_groups, named_groups
from fsdpc._fsdp1.optim.load import FirstRanksDict, OwnDict, sharded_states
from fsdpc._fsdp1.optim.rekey import rekey
from fsdpc._fsdp1.optim.save import Form, copy_unknown, gather_states
from fsdpc.api import OptimStateKeyType, StateDictType

StateDict = dict[str, Any]
OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


def _form_in_force(call: str, model: nn.Module, optim: Any) -> Form:
    check_model(call, model)
    check_optimizer(call, optim)
    settings = _state_dict.get_state_dict_type(model)
    if settings is None:
        read_book(model)  # raises, because there is no unit
    config = settings.optim_state_dict_config  # type: ignore[union-attr]
    return Form(
        settings.state_dict_type is StateDictType.FULL_STATE_DICT,  # type: ignore[union-attr]
        getattr(config, "rank0_only", False),
        getattr(config, "offload_to_cpu", True),
        getattr(config, "_use_dtensor", False),
    )


def _check_order(call: str, model: Any, optim: Any) -> None:
    """Raise ``TypeError`` unless ``model`` is a module and ``optim``, if given, is an optimizer."""
    check_model(call, model)
    if optim is not None:
        check_optimizer(call, optim)


@torch.no_grad()
def _save(
    model: nn.Module,
    optim: Any,
    state_dict: StateDict,
    form: Form,
    group: dist.ProcessGroup | None,
    optim_input: OptimInput = None,
) -> StateDict:
    book = read_book(model)
    state = state_dict["state"]
    held = (
        keys_of_optimizer(optim, model, is_named(state))
        if optim_input is None
        else keys_of_input(model, optim_input)
    )
    for _, param in held:
        book.names_of(param)
    _keeps_whole(optim, book)
    keeps = not (form.full and form.rank0_only) or dist.get_rank(group) == 0
    kept: dict[Any, Any] = gather_states(book, held, state, form if keeps else None)
    if not keeps:
        return {}
    copy_unknown(state, {key for key, _ in held}, kept)
    result: StateDict = {"state": kept}
    if "param_groups" in state_dict:
        result["param_groups"] = named_groups(state_dict["param_groups"], held, book)
    return result


@torch.no_grad()
def _load(
    model: nn.Module,
    optim: Any,
    state_dict: StateDict | None,
    form: Form,
    group: dist.ProcessGroup | None,
    optim_input: OptimInput = None,
    named: bool = False,
) -> StateDict:
    book = read_book(model)
    own = None
    if optim_input is None and optim is not None:
        held = keys_of_optimizer(optim, model, named)
        own = optim.param_groups
    else:
        held = keys_of_input(model, optim_input)
    if form.rank0_only:
        source: Any = FirstRanksDict(state_dict, group or dist.group.WORLD, book.device)
    else:
        source = OwnDict(state_dict, book.device)
    states = sharded_states(book, held, source, _keeps_whole(optim, book))
    if named:
        _keep_unsaved(optim, held, states)
    result: StateDict = {"state": states}
    if "param_groups" in source.tree:
        result["param_groups"] = keyed_groups(source.tree["param_groups"], held, book, own)
    return result


def _keeps_whole(optim: Any, book: Book) -> bool:
    """Return whether the optimizer keeps states of whole parameters, such as one value per row or
    column. ``NotImplementedError``: the optimizer keeps such states, and a flat parameter of the
    model covers several original parameters.
    """
    inside = getattr(optim, "optimizer", optim)  # accelerate wraps optimizers
    if not getattr(inside, "keeps_whole_states", False):
        return False
    for sharded in (sharded for entry in book.units for sharded in entry.params):
        if len(sharded.covers) > 1:
            raise NotImplementedError(
                f"the optimizer state of {sharded.text} has tensors of rows and columns of each, "
                "which a state dict of a flat parameter cannot tell apart: wrap with "
                "use_orig_params=True, or use fsdpc.checkpoint"
            )
    return True


def _keep_unsaved(optim: Any, held: list[tuple[Key, nn.Parameter]], states: dict[Any, Any]) -> None:
    """Keep the current state of each parameter for which no state is saved, because optimizers
    whose keys are names need a state for every parameter.
    """
    for key, param in held:
        if key not in states and param in optim.state:
            states[key] = dict(optim.state[param])


def _warn_of_input(optim_input: OptimInput) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated and will be removed after PyTorch 1.13. "
            "You may remove it from your code without changing its functionality.",
            FutureWarning,
            stacklevel=4,
        )


def _warn_of_name(old: str, new: str) -> None:
    warnings.warn(
        f"``FullyShardedDataParallel.{old}``is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{new}``. ``FullyShardedDataParallel.{old}`` may be removed "
        "after PyTorch 2.2.",
        FutureWarning,
        stacklevel=3,
    )


class OptimStateDicts:
    """The optimizer state-dict methods, which the wrapper class inherits."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Return the optimizer's state in the form of the current ``state_dict_type``, with
        parameter names for keys. Collective over the units' groups.

        FULL: tensors in the original shapes and the state's dtypes, on every rank or, with
        ``rank0_only``, on rank 0 of ``group`` (``{}`` on other ranks). SHARDED and LOCAL: a
        ``ShardedTensor`` of rows for each state, or a ``DTensor`` if the model was built with a
        ``device_mesh``. 0-dim tensors, and values without the shard's shape, are copied and must be
        equal on all ranks. The dict shares no memory with the optimizer.

        ``optim_state_dict``: the dict to convert; by default ``optim.state_dict()``.
        ``RuntimeError``: a rank lacks state that others have, or a trainable parameter of a unit is
        not in the optimizer (``use_orig_params=True``). ``AssertionError``: numbers differ between
        ranks.
        """
        form = _form_in_force("optim_state_dict(model, optim)", model, optim)
        if optim_state_dict is None:
            optim_state_dict = optim.state_dict()
        return _save(model, optim, optim_state_dict, form, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Return this rank's shard of a dict made by ``optim_state_dict``, with ``optim``'s keys,
        for ``optim.load_state_dict``. With ``load_directly``, also call ``optim.load_state_dict``.

        With ``rank0_only`` set, only rank 0 of ``group`` passes the dict, the argument of other
        ranks is ignored, and the call is collective over ``group``. Without ``rank0_only`` the call
        is local, except that distributed values are gathered over their ranks. A parameter without
        saved state gets no state or, as a member of a flat parameter, zeros. ``param_groups`` keep
        the optimizer's grouping.

        ``ValueError``: the dict has no "state" or has ids for keys, the states of one flat
        parameter differ in names, dtypes or numbers, or a state has another shape than the
        parameter. ``KeyError``: a saved parameter is not in the model or the optimizer.
        """
        call = "optim_state_dict_to_load(model, optim, optim_state_dict)"
        form = _form_in_force(call, model, optim)
        result = _load(model, optim, optim_state_dict, form, group, named=is_named_optimizer)
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Return ``optim_state_dict`` in the FULL form, by default on rank 0 only. Collective.
        Deprecated as in torch (``FutureWarning``).
        """
        _warn_of_name("full_optim_state_dict", "optim_state_dict")
        _warn_of_input(optim_input)
        check_model("full_optim_state_dict(model, optim)", model)
        check_optimizer("full_optim_state_dict(model, optim)", optim)
        form = Form(rank0_only=rank0_only)
        return _save(model, optim, optim.state_dict(), form, group, optim_input)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Return ``optim_state_dict`` in the SHARDED form. Collective. Deprecated as in torch
        (``FutureWarning``).
        """
        _warn_of_name("sharded_optim_state_dict", "optim_state_dict")
        call = "sharded_optim_state_dict(model, optim)"
        form = Form(full=False, use_dtensor=_form_in_force(call, model, optim).use_dtensor)
        return _save(model, optim, optim.state_dict(), form, group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """Return ``optim_state_dict_to_load`` of a FULL dict that every rank has. Local. Without
        ``optim`` the keys are those of an optimizer over ``optim_input``, which is
        ``model.parameters()`` by default. Deprecated as in torch (``FutureWarning``).
        """
        _warn_of_name("shard_full_optim_state_dict", "optim_state_dict_to_load")
        _warn_of_input(optim_input)
        _check_order("shard_full_optim_state_dict(full_optim_state_dict, model)", model, optim)
        return _load(model, optim, full_optim_state_dict, Form(), None, optim_input)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict,
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> StateDict:
        """Return ``optim_state_dict_to_load`` of a SHARDED dict. Collective over the ranks of the
        values. Deprecated as in torch (``FutureWarning``).
        """
        _warn_of_name("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        call = "flatten_sharded_optim_state_dict(sharded_optim_state_dict, model, optim)"
        _check_order(call, model, optim)
        return _load(model, optim, sharded_optim_state_dict, Form(), None)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any | None = None,
    ) -> StateDict:
        """Return ``optim_state_dict_to_load`` of a FULL dict that only rank 0 has. Collective over
        ``group``. Deprecated as in torch (``FutureWarning``).
        """
        _warn_of_name("scatter_full_optim_state_dict", "optim_state_dict_to_load")
        _warn_of_input(optim_input)
        _check_order("scatter_full_optim_state_dict(full_optim_state_dict, model)", model, optim)
        form = Form(rank0_only=True)
        return _load(model, optim, full_optim_state_dict, form, group, optim_input)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """Return an unsharded model's optimizer state dict with ids converted to names, or names to
        ids. Local.

        The ids are those of ``optim``, or those of an optimizer over ``optim_input``. If neither
        is given, the ids are those of an optimizer over the unsharded model's ``parameters()``. A
        dict whose keys have the requested type already is returned unchanged. ``ValueError``: the
        dict has keys of both types. ``AssertionError``: the type is not an ``OptimStateKeyType``.
        ``RuntimeError``: ``optim`` or ``optim_input`` is given for a model with flat parameters,
        each of which has several names.
        """
        _warn_of_input(optim_input)
        _check_order("rekey_optim_state_dict(optim_state_dict, type, model)", model, optim)
        if optim_input is not None:
            held = keys_of_input(model, optim_input)
        else:
            held = None if optim is None else keys_of_optimizer(optim, model, False)
        return rekey(optim_state_dict, optim_state_key_type, model, held)
