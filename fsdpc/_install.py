"""``fsdpc.install()``, which binds names of ``torch.distributed.fsdp`` to fsdpc's classes and
functions.

For FSDP1 three things change, and ``uninstall()`` puts each of them back:

- Names: module-level references to torch's class or gradient scaler become fsdpc's, in torch's
  public modules and in modules imported before. torch's private modules keep their references.
- The constructor: a call of torch's class, through a reference that still names this class, makes
  an fsdpc model.
- Static methods of both classes dispatch on the model: torch's models, made before or after the
  call, run torch's code. The last two changes let torch's private modules work with both classes.

For FSDP2, module-level references to ``fully_shard``, ``register_fsdp_forward_method`` and
``share_comm_ctx`` become fsdpc's. For a module of torch's ``fully_shard``, fsdpc's
``register_fsdp_forward_method`` calls torch's function. ``FSDPModule`` stays torch's class, because
fsdpc's class derives from it.

The enums, policies and configuration classes do not change.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.distributed.fsdp as public
import torch.distributed.fsdp.fully_sharded_data_parallel as home
import torch.distributed.fsdp.sharded_grad_scaler as scaler_home
from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    FullyShardedDataParallel as TorchFSDP,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler

from fsdpc._fsdp1.collect import is_unit_module
from fsdpc._fsdp1.face import accept_torch_instances
from fsdpc._fsdp2 import module as _fsdp2
from fsdpc._torch import COMPOSABLE
from fsdpc.fsdp import FSDP
from fsdpc.sharded_grad_scaler import ShardedGradScaler

NAME = "FullyShardedDataParallel"
_FSDP2 = [
    (getattr(public, name), getattr(_fsdp2, name))
    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
    if hasattr(public, name)
]
_lock = threading.RLock()
_undo: list[Callable[[], None]] = []


def install(interface: str = "both") -> None:
    """Bind names of ``torch.distributed.fsdp`` to fsdpc's classes and functions. Local; a second
    call is a no-op.

    ``interface``: "FullyShardedDataParallel", "fully_shard" or "both" (``ValueError`` for other
    values). Unless ``interface`` is "fully_shard", every module-level reference to torch's
    ``FullyShardedDataParallel`` is fsdpc's class after the call, also in modules imported before.
    Models of torch's class keep working and count as instances of both classes. A class that was
    derived from torch's class before the call raises ``RuntimeError`` when it is instantiated.
    """
    if interface not in ("both", NAME, "fully_shard"):
        raise ValueError(
            f'install: interface must be "both", "{NAME}" or "fully_shard", got {interface!r}'
        )
    with _lock:
        if _undo:
            return
        try:
            if interface != "fully_shard":
                _install_fsdp1()
            if interface != NAME:
                for theirs, ours in _FSDP2:
                    _rename(theirs, ours)
        except BaseException:
            uninstall()
            raise


def _install_fsdp1() -> None:
    _redirect_constructor()
    _dispatch_static_methods()
    _rename(TorchFSDP, FSDP)
    _stand_in_where_torch_needs_its_own()
    _rename(TorchScaler, ShardedGradScaler)
    accept_torch_instances(FSDP)
    _undo.append(lambda: accept_torch_instances(None))


def uninstall() -> None:
    """Undo ``install()``. Local; a no-op without ``install()``.

    Models made between the two calls stay fsdpc's. User modules that imported a name between the
    two calls keep fsdpc's class.
    """
    with _lock:
        while _undo:
            _undo.pop()()


def installed() -> bool:
    """Return whether ``install()`` is in effect. Local."""
    return bool(_undo)


# --- names ---------------------------------------------------------------------------------------


def _is_torchs(module_name: str) -> bool:
    return module_name == "torch" or module_name.startswith("torch.")


def _references(value: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield ``(module name, the module's namespace, name)`` for every module-level reference to
    ``value``.
    """
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType):
            continue
        namespace = module.__dict__
        for name, held in list(namespace.items()):
            if held is value:
                yield module_name, namespace, name


def _rename(theirs: Any, ours: Any) -> None:
    public_names = (public.__name__, scaler_home.__name__, *COMPOSABLE)
    for module_name, namespace, name in _references(theirs):
        own = module_name.partition(".")[0] == "fsdpc"
        if own or (_is_torchs(module_name) and module_name not in public_names):
            continue
        namespace[name] = ours
        _undo.append(functools.partial(_put_back, namespace, name, ours, theirs))
    _undo.append(lambda: _clean_torch(theirs, ours))


def _put_back(namespace: dict[str, Any], name: str, ours: Any, theirs: Any) -> None:
    if namespace.get(name) is ours:  # otherwise other code has rebound the name
        namespace[name] = theirs


def _clean_torch(theirs: Any, ours: Any) -> None:
    """Restore torch's class in torch's modules that were imported since ``install()``."""
    for module_name, namespace, name in _references(ours):
        if _is_torchs(module_name):
            namespace[name] = theirs


def _stand_in_where_torch_needs_its_own() -> None:
    """Let importers of torch's module ``fully_sharded_data_parallel`` get fsdpc's class. The
    module's own functions still read torch's class from their globals.
    """
    before = home.__class__

    class Facade(before):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            return FSDP if found is TorchFSDP else found

    home.__class__ = Facade

    def restore() -> None:
        if home.__class__ is Facade:
            home.__class__ = before

    _undo.append(restore)


# --- torch's class -------------------------------------------------------------------------------


def _redirect_constructor() -> None:
    original = TorchFSDP.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is not TorchFSDP:
            raise RuntimeError(
                f"{type(self).__name__} was derived from torch's {NAME} before fsdpc.install(): "
                "call fsdpc.install() before the class is defined, or fsdpc.uninstall() to use "
                "torch's FSDP"
            )
        self.__class__ = FSDP
        self.__init__(*args, **kwargs)

    _set(TorchFSDP, "__init__", init)


def _dispatch_static_methods() -> None:
    for name, theirs in list(vars(TorchFSDP).items()):
        ours = inspect.getattr_static(FSDP, name)
        if isinstance(theirs, staticmethod) and isinstance(ours, staticmethod):
            call = _dispatcher(theirs.__func__, ours.__func__)
            _set(TorchFSDP, name, staticmethod(call(theirs.__func__)))
            _set(FSDP, name, staticmethod(call(ours.__func__)))


def _dispatcher(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator. Decorated functions call ``theirs`` for torch's models, else ``ours``."""
    names = list(inspect.signature(theirs).parameters)
    name = "model" if "model" in names else "module"
    position = names.index(name)

    def decorate(shown: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(shown)
        def call(*args: Any, **kwargs: Any) -> Any:
            model = args[position] if len(args) > position else kwargs.get(name)
            return (theirs if _belongs_to_torch(model) else ours)(*args, **kwargs)

        return call

    return decorate


def _belongs_to_torch(model: Any) -> bool:
    """Return whether ``model`` has units of torch's class and none of fsdpc's."""
    if not isinstance(model, nn.Module):
        return False
    made = {is_unit_module(m) for m in model.modules() if isinstance(m, TorchFSDP)}
    return made == {False}


def _set(owner: type, name: str, value: Any) -> None:
    if name in vars(owner):
        _undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
    else:
        _undo.append(functools.partial(delattr, owner, name))
    setattr(owner, name, value)
