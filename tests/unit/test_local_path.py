"""A class of fsdpc's that derives from pathlib's."""

from __future__ import annotations

import pathlib
from pathlib import PosixPath

from fsdpc.checkpoint.storage import LocalPath


def test_no_name_of_pathlib_has_another_meaning():
    """Once ``root``, which pathlib itself reads from Python 3.12 on, was a method here."""
    own = {name for name in vars(LocalPath) if not name.startswith("__")}
    assert own and not own & set(dir(PosixPath)), own & set(dir(PosixPath))
    assert str(LocalPath("/a") / "b") == str(pathlib.Path("/a/b"))
