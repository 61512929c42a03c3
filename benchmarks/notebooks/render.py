"""Run the notebooks from top to bottom and keep their outputs: ``python render.py [FILE...]``."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
SECONDS = 600  # of a cell, on a machine that is busy


def execute(path: Path, seconds: float = SECONDS) -> nbformat.NotebookNode:
    """The notebook with its outputs. ``CellExecutionError`` for a cell that raises or is late."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=seconds, kernel_name="python3", resources={"metadata": {"path": HERE}}
    )
    return client.execute()


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what differs between machines: times of execution, the kernel's version."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    return notebook


if __name__ == "__main__":
    for file in sys.argv[1:] or sorted(HERE.glob("*.ipynb")):
        nbformat.write(clean(execute(Path(file))), file)
        print(file)
