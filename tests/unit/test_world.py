"""The core reaches the outside world only through the functions that tests/simcluster/world.list
names.

The simulated cluster answers calls of these functions, so a call of another function would leave
the simulation. Functions are found in the text of the sources, by calls and by assignments to
function pointers.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/simcluster"))

import cluster_faults  # noqa: E402

NOT_CALLS = re.compile(
    r"(if|for|while|switch|return|sizeof|alignof|alignas|defined|offsetof|do|else|case|int|void|bool|"
    r"const|format|atomic_\w+|fsdpc_\w+|__\w+)$"
)
CALL = re.compile(r"(?<![\w.>])([a-z_]\w*)\s*\(")
DEFINED = re.compile(r"^([a-z_]\w*)\s*\(", re.M)
# Matches a function that is assigned and not called, as in "= mmap;" and "{.wait = poll,".
VALUE = re.compile(r"=\s*&?([a-z_]\w*)\s*[;,}]")


@functools.cache
def table() -> dict[str, list[list[str]]]:
    rows: dict[str, list[list[str]]] = {}
    for line in (ROOT / "tests/simcluster/world.list").read_text().splitlines():
        kind, *words = line.split() or ["#"]
        rows.setdefault(kind, []).append(words)
    return rows


def bare(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    return re.sub(r'"(\\.|[^"\\\n])*"|\'(\\.|[^\'\\\n])*\'', "0", text)


def pointers(text: str) -> set[str]:
    """Return the parameters and fields that are function pointers. The caller of the file chooses
    these functions.
    """
    return set(re.findall(r"\(\s*\*\s*(\w+)\s*\)\s*\(", text)) | set(
        re.findall(r"fsdpc_pool_task \*(\w+)", text)
    )


def called(text: str, world: set[str]) -> set[str]:
    text = bare(text)
    own = set(DEFINED.findall(text)) | pointers(text)
    names = {name for name in CALL.findall(text) if not NOT_CALLS.match(name)}
    return (names | (set(VALUE.findall(text)) & world)) - own


def outside(file: str, text: str) -> Iterator[str]:
    rows = table()
    apart = {name: place for name, place in rows["apart"]}
    listed = {words[0] for kind in ("wrap", "plain") for words in rows[kind]}
    world = {words[0] for words in rows["wrap"]} | set(apart)
    for name in sorted(called(text, world) - listed):
        if apart.get(name) != file:
            yield f"{file} calls {name}"


def covered() -> dict[str, str]:
    left_out = {words[0] for words in table()["except"]}
    files = [p for (folder,) in table()["cover"] for p in (ROOT / "csrc" / folder).glob("*.[ch]")]
    named = {str(p.relative_to(ROOT / "csrc")): p.read_text() for p in files}
    assert left_out <= named.keys()
    return {name: text for name, text in named.items() if name not in left_out}


def test_the_core_meets_the_world_through_the_seam() -> None:
    found = [line for file, text in covered().items() for line in outside(file, text)]
    assert not found, f"not in tests/simcluster/world.list: {found}"


def test_the_seam_lists_nothing_else() -> None:
    files = covered()
    world = {w[0] for kind in ("wrap", "apart") for w in table()[kind]}
    calls = {file: called(text, world) for file, text in files.items()}
    listed = {words[0] for kind in ("wrap", "plain") for words in table()[kind]}
    own = {name for name in listed if name.startswith("fsdpc_")}
    every = set().union(*calls.values()) | own
    assert all(any(f"{name}(" in text for text in files.values()) for name in own)
    assert listed <= every
    assert all(name in calls[file] for name, file in table()["apart"])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("static void\nf(void)\n{\n    usleep(3);\n}\n", "usleep"),
        ("static long\nf(void)\n{\n    return read(0, 0, 0);\n}\n", "read"),
        ("int (*hook)(int) = mremap;\n", "mremap"),
        ("static void\nf(void)\n{\n    /* getpid() */ kill(getpid(), 9);\n}\n", "kill"),
    ],
)
def test_planted_calls_are_found(text: str, name: str) -> None:
    assert list(outside("shm/planted.c", text)) == [f"shm/planted.c calls {name}"]


def test_faults_can_still_be_planted() -> None:
    assert not cluster_faults.stale()


def test_each_mended_fault_has_a_seed() -> None:
    unknown = {  # none of 10,000 seeds finds these
        "rank 0 does not read why a rank closed the connection",
        "earlier weights of a rank that waits elsewhere not looked for",
        "samples renewed before the change is known",
        "a change that has just begun behind a rank that is late",
    }
    names = [f.name for f in cluster_faults.FAULTS if f.mended and f.name not in unknown]
    assert list(cluster_faults.mended()) == names
