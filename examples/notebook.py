"""The notebook that is paired with kimi_k3_decode.py: made of it, executed, and compared with it.

    python -P examples/notebook.py            # executes the source; the committed notebook has to have its cells
    python -P examples/notebook.py --write    # writes the notebook, with its outputs

Cells are jupytext's percent format. Executing fails where a cell raises, warns or takes longer than 30 seconds.
"""

import argparse
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

SOURCE = Path(__file__).with_name("kimi_k3_decode.py")
NOTEBOOK = SOURCE.with_suffix(".ipynb")
LONGEST_CELL = 30  # seconds


def made() -> nbformat.NotebookNode:
    """The notebook of the source, without outputs. Cells are numbered, so that only its content changes the file."""
    notebook = jupytext.reads(SOURCE.read_text(), fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    return notebook


def differences(notebook: nbformat.NotebookNode, other: nbformat.NotebookNode) -> list[str]:
    """What is not the same in the cells of two notebooks, outputs aside."""
    if len(notebook.cells) != len(other.cells):
        return [f"{len(notebook.cells)} cells, and {len(other.cells)}"]
    return [
        f"cell {number}: {a.source[:60]!r}, and {b.source[:60]!r}"
        for number, (a, b) in enumerate(zip(notebook.cells, other.cells, strict=True))
        if (a.cell_type, a.source) != (b.cell_type, b.source)
    ]


def execute(notebook: nbformat.NotebookNode) -> list[str]:
    """Fills in the outputs, in a kernel that starts in an empty folder. Returns what is wrong with the cells."""
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, kernel_name="python3", resources=resources, coalesce_streams=True).execute()
    wrong = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        times = cell.metadata.pop("execution")
        began, ended = (datetime.fromisoformat(times[name]) for name in ("iopub.execute_input", "shell.execute_reply"))
        seconds = (ended - began).total_seconds()
        print(f"cell {number:2}: {seconds:5.1f} s")
        if seconds > LONGEST_CELL:
            wrong.append(f"cell {number} took {seconds:.0f} s; expected at most {LONGEST_CELL}")
        warned = [output.text for output in cell.outputs if output.get("name") == "stderr"]
        wrong += [f"cell {number} wrote to stderr: {text}" for text in warned]
    notebook.metadata.pop("language_info")  # names a version of Python
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true", help=f"write {NOTEBOOK.name}")
    arguments = parser.parse_args()
    notebook = made()
    wrong = [] if arguments.write else differences(nbformat.read(NOTEBOOK, as_version=4), notebook)
    wrong = [f"{NOTEBOOK.name} is not made of {SOURCE.name}: {text}" for text in wrong] + execute(notebook)
    if arguments.write and not wrong:
        nbformat.write(notebook, NOTEBOOK)
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
