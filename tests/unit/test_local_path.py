"""Tests of LocalPath, a class of fsdpc that derives from a class of pathlib."""

from __future__ import annotations

import pathlib
from pathlib import PosixPath

from fsdpc.checkpoint.storage import LocalPath


def test_no_name_of_pathlib_has_another_meaning():
    """In an earlier version, LocalPath had a method ``root``, a name that pathlib itself reads from
    Python 3.12 on.
    """
    own = {name for name in vars(LocalPath) if not name.startswith("__")}
    assert own and not own & set(dir(PosixPath)), own & set(dir(PosixPath))
    assert str(LocalPath("/a") / "b") == str(pathlib.Path("/a/b"))
