"""Writes docs/api.md: every public name with its signature and docstring (`make docs`).

python tests/api_page.py            print the page
python tests/api_page.py --write    write docs/api.md
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from textwrap import dedent, fill
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/api.md"
HEAD = """# Every public name

Made from the docstrings by `make docs`; a test compares. A call that says *collective* must be made
by every rank of the group, in the same order; *local* calls communicate with nobody. Shapes and
dtypes are stated where they are not torch's. A name that is not here is private and may change.
Which of torch's names is the same, better or refused: [compatibility.md](compatibility.md).
"""

# Classes that the page shows in addition to the names in `__all__`: types that calls return, and
# base classes with methods for users.
MORE = {
    "fsdpc": ("fsdpc.plan.report.MemoryReport", "fsdpc.plan.profiled.Profile"),
    "fsdpc.optim": ("fsdpc.optim._base.FusedOptimizer",),
    "fsdpc.activations": ("fsdpc.activations.offloading.Offloaded",),
}
MODULES = (
    "fsdpc",
    "fsdpc.checkpoint",
    "fsdpc.optim",
    "fsdpc.activations",
    "fsdpc.lowbit",
    "fsdpc.sharded_grad_scaler",
    "fsdpc.api",
    "fsdpc.wrap",
    "fsdpc.fully_sharded_data_parallel",
)
# Methods whose names have no underscore, but that are only for other modules of the package.
INTERNAL = {
    "FullyShardedDataParallel": {"forget_unit_hooks", "training_state", "params"},
    "AdamMini": {"block_length"},
    "FusedOptimizer": {"state_memory", "settle_states", "finish_states"},
    "ScaledSteps": {"leave_check"},
    "Profile": {"named", "end"},
}
SPANNED = {"span_forms", "span_owned", "span_states", "take_span_states", "states_device"}
COLUMNS = 100


class Entry:
    """An entry of the page: a public name of a module, or a method of a class."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    @property
    def doc(self) -> str:
        return inspect.cleandoc(self.value.__doc__ or "")

    @property
    def members(self) -> list[Entry]:
        """Return the public methods and properties that fsdpc defines.

        Members of a base class that has an entry of its own are left out. So are methods without a
        docstring that override torch's, because torch's documentation describes them.
        """
        own: dict[str, Any] = {}
        if not isinstance(self.value, type):
            return []
        for base in self.value.__mro__:
            if not base.__module__.startswith("fsdpc") or (base is not self.value and listed(base)):
                continue
            for name, value in vars(base).items():
                hidden = name in SPANNED | INTERNAL.get(base.__name__, set())
                if is_member(value) and not name.startswith("_") and value.__doc__ and not hidden:
                    own.setdefault(name, value)
        return [Entry(f"{self.name}.{name}", value) for name, value in own.items()]

    def signature(self) -> str:
        value, name = self.value, self.name.rpartition(".")[2]
        kind = type(value).__name__ if isinstance(value, (classmethod, staticmethod)) else ""
        if kind:
            return f"@{kind}\n" + Entry(name, value.__func__).signature()
        if isinstance(value, property):
            returns = value.fget.__annotations__.get("return", "Any")
            return f"{name}: {returns}  # property"
        if isinstance(value, type) and issubclass(value, Exception):
            return f"class {name}({', '.join(b.__name__ for b in value.__bases__)})"
        if isinstance(value, type) and not own_init(value):
            return f"class {name}"
        return written(name, inspect.signature(value), is_context(value))


def own_init(value: type) -> bool:
    return any("__init__" in vars(b) for b in value.__mro__ if b.__module__.startswith("fsdpc"))


def is_member(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod, property))


def is_context(value: Any) -> bool:
    return inspect.isgeneratorfunction(getattr(value, "__wrapped__", None))


def listed(base: type) -> bool:
    more = {path.rpartition(".")[2] for paths in MORE.values() for path in paths}
    public = {name for module in MODULES for name in import_module(module).__all__}
    return base.__name__ in more | public


def written(name: str, signature: inspect.Signature, context: bool) -> str:
    """Write a signature like a ``def`` without the colon. A long one has a line per parameter."""
    parts, kind = [], None
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and kind not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            parts.append("*")
        kind = parameter.kind
        parts.append(one_parameter(parameter))
    returns = signature.return_annotation
    end = "" if returns in (inspect.Signature.empty, None, "None") else f" -> {returns}"
    if context:
        end = end.replace("Iterator[", "AbstractContextManager[", 1)
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= COLUMNS:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def one_parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {str(parameter.annotation).strip(chr(34))}"
    if parameter.default is parameter.empty:
        return text
    return f"{text} = {default(parameter.default)}"


def default(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    text = repr(value)
    if type(value).__module__.startswith("torch") and type(value).__name__.endswith("Policy"):
        return f"{type(value).__name__}()"
    return "..." if text.startswith("<") else text


def markdown(doc: str) -> str:
    """Convert a docstring to Markdown, with code in single backticks and ``Args:`` as a list."""
    doc = re.sub(r"``(.+?)``", r"`\1`", doc, flags=re.DOTALL)
    blocks = re.split(r"^(Args|Raises):\n((?:[ ]{4}.*\n?|\n(?=[ ]{4}))+)", doc, flags=re.MULTILINE)
    out = [blocks[0]]
    for title, body, rest in zip(blocks[1::3], blocks[2::3], blocks[3::3], strict=True):
        items = re.sub(r"^([\w, ]+): ", as_item, dedent(body), flags=re.MULTILINE)
        out += [f"{title}:\n\n", re.sub(r"^[ ]{4}", "  ", items, flags=re.MULTILINE), rest]
    return "".join(out).strip()


def as_item(match: re.Match[str]) -> str:
    return "- " + ", ".join(f"`{name}`" for name in match[1].split(", ")) + ": "


def anchor(heading: str) -> str:
    """Return the anchor that a site makes for a heading when it renders Markdown."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def is_torchs(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("torch")


def entries(module: str) -> list[Entry]:
    """Return the names that a module itself defines, and its classes in ``MORE``.

    A name that ``fsdpc`` itself also has is left out of the entries of every other module.
    """
    here = import_module(module)
    names = [n for n in here.__all__ if not n.startswith("_") and n != "FSDP"]
    found = [Entry(f"{module}.{n}", getattr(here, n)) for n in names]
    own = [e for e in found if not is_torchs(e.value) and not (module != "fsdpc" and at_top(e))]
    for path in MORE.get(module, ()):
        home, _, name = path.rpartition(".")
        own.append(Entry(f"{module}.{name}", getattr(import_module(home), name)))
    return own


def at_top(entry: Entry) -> bool:
    return getattr(import_module("fsdpc"), entry.name.rpartition(".")[2], None) is entry.value


def borrowed(module: str) -> list[str]:
    """Return the names in a module's ``__all__`` that are torch's, or that ``fsdpc`` itself has."""
    own = {e.name.rpartition(".")[2] for e in entries(module)}
    all_names = import_module(module).__all__
    return [n for n in all_names if n not in own and not n.startswith("_")]


def alias(module: str) -> str:
    names = ", ".join(f"`{n}`" for n in borrowed(module) if n != "FSDP")
    torchs = f"torch's own, of `torch.distributed.fsdp` and its modules: {names}." if names else ""
    if module == "fsdpc":
        return f"`FSDP` is `FullyShardedDataParallel`. {torchs}"
    ours = [n for n in borrowed(module) if not is_torchs(getattr(import_module(module), n))]
    return f"The names of the top level: {names}." if ours else torchs


def section(entry: Entry, level: int) -> Iterator[str]:
    shown = entry.name if level == 3 else ".".join(entry.name.split(".")[-2:])
    yield f"{'#' * level} {shown}\n"
    yield f"```python\n{entry.signature()}\n```\n"
    yield markdown(entry.doc) + "\n"
    for member in entry.members:
        yield from section(member, level + 1)


def contents() -> Iterator[str]:
    yield "| module | names |\n| --- | --- |"
    for module in MODULES:
        links = (
            f"[{e.name.rpartition('.')[2]}](#{anchor(e.name)})"
            for e in sorted(entries(module), key=lambda e: e.name.lower())
        )
        shown = ", ".join(links) or "torch's names"
        yield f"| [{module}](#{anchor(module)}) | {shown} |"


def page() -> str:
    parts = [HEAD, "\n".join(contents()) + "\n"]
    for module in MODULES:
        parts.append(f"## {module}\n")
        parts.append(markdown(inspect.cleandoc(import_module(module).__doc__ or "")) + "\n")
        if borrowed(module):
            parts.append(fill(alias(module), 120) + "\n")
        for entry in entries(module):
            parts += section(entry, 3)
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page(), end="")
