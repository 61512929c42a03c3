"""Run the notebooks from top to bottom and keep their outputs: ``python render.py [FILE...]``."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
SECONDS = 600  # time limit of a cell, long enough for a busy machine


def execute(path: Path, seconds: float = SECONDS) -> nbformat.NotebookNode:
    """Run a notebook and return it with its outputs. Raises ``CellExecutionError`` if a cell
    raises, and ``CellTimeoutError`` if a cell takes longer than ``seconds``.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=seconds, kernel_name="python3", resources={"metadata": {"path": HERE}}
    )
    return client.execute()


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove from a notebook what differs between machines: execution times, kernel version."""
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
