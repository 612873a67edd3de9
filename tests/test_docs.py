"""The documentation's sources: pictures, API pages, questions and notebook say what is there; the site is strict."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_mla

ROOT = Path(__file__).parent.parent
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_pictures_are_up_to_date():
    drawn = {f"{name}.svg": str(draw()) for name, draw in module(DOCS / "pictures.py").PICTURES.items()}
    kept = {path.name: path.read_text() for path in (DOCS / "pictures").iterdir()}
    assert drawn == kept, "run: python docs/pictures.py"


def test_every_public_name_has_a_place_in_the_api():
    pages = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    described = re.findall(r"^\.\. auto\w+:: jax_mla\.(\w+)$", pages, re.MULTILINE)
    assert sorted(name for name in described if name not in ("layer", "checkpoint")) == sorted(jax_mla.__all__)


def test_every_answer_names_its_tests():
    answers = re.split(r"^### ", (DOCS / "faq.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(answers) >= 17
    for answer in answers:
        named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", answer)
        assert named, answer
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).exists(), (file, test)
        for case in re.findall(r"case `(\w+)`", answer):
            assert f'DecodeCase("{case}"' in (ROOT / "tests" / "cases.py").read_text(), case


def test_notebook_is_in_sync_with_its_source():
    pytest.importorskip("jupytext")
    pytest.importorskip("nbclient")
    import nbformat

    notebook = module(EXAMPLES / "notebook.py")
    committed, made = nbformat.read(notebook.NOTEBOOK, as_version=4), notebook.made()
    assert notebook.differences(committed, made) == [], "run: python examples/notebook.py --write"
    made.cells[3].source += "\n"
    assert len(notebook.differences(committed, made)) == 1
    del made.cells[3]
    assert len(notebook.differences(committed, made)) == 1


def test_notebook_has_its_outputs():
    """Every cell of code prints or plots; nothing raised; no output is large."""
    cells = json.loads((EXAMPLES / "kimi_k3_decode.ipynb").read_text())["cells"]
    outputs = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
    assert all(outputs)
    kinds = [output["output_type"] for cell in outputs for output in cell]
    assert set(kinds) == {"stream", "display_data"} and kinds.count("display_data") == 3
    plots = [output["data"]["image/png"] for cell in outputs for output in cell if "data" in output]
    assert max(map(len, plots)) < 100_000


FRAME = "# Title\n\n```{toctree}\n:glob:\n\nnotebook/*\nother\n```\n\n"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[other](other.md), [its part](other.md#a-part)", ""),
        ("[gone](gone.md)", "cross-reference target not found: 'gone.md'"),
        ("[part](other.md#gone)", "local id not found in doc 'other': 'gone'"),
        ("![picture](gone.svg)", "image file not readable: gone.svg"),
        ("```{eval-rst}\n.. autofunction:: jax_mla.gone\n```", "failed to import"),
        ("{py:func}`jax_mla.gone`", "reference target not found: jax_mla.gone"),
        ("{doc}`gone`", "unknown document: 'gone'"),
    ],
    ids=["good", "link", "anchor", "picture", "API", "reference", "document"],
)
def test_what_leads_nowhere_fails(tmp_path, index, message):
    (tmp_path / "index.md").write_text(FRAME + index)
    (tmp_path / "other.md").write_text("# Other\n\n## A part\n")
    assert_build(tmp_path, message)


def test_a_page_that_nothing_names_fails(tmp_path):
    (tmp_path / "index.md").write_text(FRAME)
    (tmp_path / "other.md").write_text("# Other\n")
    (tmp_path / "third.md").write_text("# Third\n")
    assert_build(tmp_path, "document isn't included in any toctree")


def assert_build(folder, message):
    """Sphinx's verdict on a small site with the configuration of docs/: good, or the message."""
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name)
    command = [sys.executable, "-P", "-m", "sphinx", "-q", "-W", "-c", DOCS, folder, folder / "build"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == (not message), done.stderr
    assert message in done.stderr
