"""Sphinx's configuration: pip install '.[docs]', then sphinx-build -W docs build/site

Pages are Markdown (MyST), operations come from the docstrings of the installed package. With -W a link that leads
nowhere is an error, and so is a page that no table of contents in index.md names. Its pattern [ah]* finds the pages of
kernels, hopper*.md and amd*.md; a pattern has to find something, so that it is one for both.
"""

import base64
import inspect
import json
import re
from pathlib import Path

import jax_mla

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "kimi_k3_decode.ipynb"

project = "jax_mla"
version = release = jax_mla.__version__
author = copyright = "the authors of jax_mla"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["**/*.py"]
default_role = "code"  # what docstrings set in single backticks
myst_heading_anchors = 3
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(jax|numpy|os|collections)\..*")
]  # types of others: nothing is fetched to link them

autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = "jax_mla"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


def write_notebook_page(app, config) -> None:
    """The notebook of examples/, its committed outputs included, as a page in docs/notebook (which git ignores)."""
    folder = Path(app.srcdir) / "notebook"
    folder.mkdir(exist_ok=True)
    parts, plots = [], 0
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif png := output["data"].get("image/png"):
                (folder / f"plot_{plots}.png").write_bytes(base64.b64decode(png))
                parts.append(f"![Plot of the cell above](plot_{plots}.png)")
                plots += 1
    (folder / f"{NOTEBOOK.stem}.md").write_text("\n\n".join(parts) + "\n")


def mark_arguments(app, kind, name, thing, options, lines) -> None:
    """In the prose of docstrings, "scale: static" and "kv_lens [B] int32" begin with the argument as code."""
    if not callable(thing):
        return
    names = "|".join(sorted(inspect.signature(thing).parameters, key=len, reverse=True))
    described = re.compile(rf"(?<![\w`*.])((?:(?:{names}), )*(?:{names}))(?=: | \[)")
    for number, line in enumerate(lines[1:] if names else (), 1):  # behind the summary
        if not line.startswith(":"):
            lines[number] = described.sub(r"``\1``", line)


def setup(app) -> None:
    app.connect("config-inited", write_notebook_page)
    app.connect("autodoc-process-docstring", mark_arguments)
