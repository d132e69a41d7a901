"""Makes docs/notebooks/*.ipynb from the plain Python files beside them, executed, with their outputs.

    python scripts/notebooks.py [NAME …]

Cells begin with `# %%`; `# %% [markdown]` begins text, each line after "# ".
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def cells(source: str) -> list[tuple[str, str]]:
    """(kind, text) of every cell of a plain Python file."""
    found = []
    for part in re.split(r"^# %%", source, flags=re.M)[1:]:
        head, _, body = part.partition("\n")
        if "markdown" in head:
            found.append(("markdown", re.sub(r"^# ?", "", body.strip(), flags=re.M)))
        else:
            found.append(("code", re.sub(r"\s*# fmt: skip", "", body.strip())))
    return found


def build(source: Path) -> nbformat.NotebookNode:
    """The notebook without outputs."""
    notebook = nbformat.v4.new_notebook(metadata={"language_info": {"name": "python"}})
    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    for number, (kind, text) in enumerate(cells(source.read_text("utf-8"))):
        notebook.cells.append(make[kind](text, id=f"cell-{number}"))
    return notebook


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Runs every cell in an empty folder; the first error ends it."""
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}  # times of execution
    return notebook


def main(names: list[str]) -> None:
    for source in sorted(FOLDER.glob("*.py")):
        if not names or source.stem in names:
            nbformat.write(execute(build(source)), source.with_suffix(".ipynb"))
            print(source.with_suffix(".ipynb"))


if __name__ == "__main__":
    main(sys.argv[1:])
