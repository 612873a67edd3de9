"""Draws docs/context_plan.svg: how plan_context cuts the contexts of docs/context.md.

python docs/context_plan.py
"""

from pathlib import Path

import matplotlib
import numpy as np

from jax_mla import plan_context

CONTEXTS = [200, 48, 32, 0]
WORKSPACE, PAGE = 128, 16
# White text is readable on each of them.
COLOURS = ["#4477aa", "#997700", "#aa3377", "#228833"]


def draw(path: Path) -> None:
    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, not outlines
    matplotlib.rcParams["svg.hashsalt"] = "context_plan"  # the same ids, so that the file changes only with the plan
    import matplotlib.pyplot as plt

    plan = plan_context(CONTEXTS, workspace_tokens=WORKSPACE, page_size=PAGE)
    offsets, starts = np.asarray(plan.cu_kv_lens), np.asarray(plan.starts)
    figure, axes = plt.subplots(figsize=(8, 2.6))
    for chunk in range(int(plan.num_chunks)):
        axes.barh(chunk, WORKSPACE, height=0.7, color="white", edgecolor="#888888")
        for request, (begin, end) in enumerate(zip(offsets[chunk], offsets[chunk, 1:], strict=False)):
            if begin == end:
                continue
            first = starts[chunk, request]
            axes.barh(chunk, end - begin, left=begin, height=0.7, color=COLOURS[request], edgecolor="white")
            text = f"request {request}\n{first} to {first + end - begin - 1}"
            axes.text((begin + end) / 2, chunk, text, ha="center", va="center", color="white", fontsize=9)
    axes.set_xticks(range(0, WORKSPACE + 1, PAGE))
    axes.set_yticks(range(int(plan.num_chunks)), [f"chunk {i}" for i in range(int(plan.num_chunks))])
    axes.set_xlabel(f"row of the workspace ({WORKSPACE} rows, pages of {PAGE} tokens)")
    axes.set_xlim(0, WORKSPACE)
    axes.invert_yaxis()
    axes.tick_params(left=False)
    axes.spines[["left", "right", "top"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".svg"))
