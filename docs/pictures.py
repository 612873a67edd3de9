"""Draws docs/pictures/*.svg, which the pages show: python docs/pictures.py

Text on filled boxes is white on dark colours; all other text and lines take the reader's light or dark scheme. A test
compares the files with what this draws.
"""

import itertools
import json
import statistics
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from jax_mla import plan_context

FOLDER = Path(__file__).parent / "pictures"
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
BLUE, OCHRE, PURPLE, GREEN, GREY = "#4477aa", "#8a6d00", "#aa3377", "#1f7a33", "#5f6b7a"
COLOURS = [BLUE, OCHRE, PURPLE, GREEN]

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 11.5px; }
.head { font-size: 14px; font-weight: 600; }
.code { font-family: ui-monospace, monospace; font-size: 12px; }
.on { fill: #ffffff; }
.line { stroke: #6e7781; stroke-width: 1.2; fill: none; }
.arrow { fill: #6e7781; }
.frame { stroke: #6e7781; stroke-width: 1; fill: none; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .on { fill: #ffffff; }
.line, .frame { stroke: #9da7b3; } .arrow { fill: #9da7b3; } }
"""


class Picture:
    """An SVG picture, coordinates in pixels from the upper left."""

    def __init__(self, width: int, height: int, title: str):
        self.size = width, height
        self.parts = [f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>"]

    def box(self, x, y, width, height, colour=None, *lines, kind="small"):
        """A filled box, or a frame without a colour, its lines of text in the middle."""
        look = f'fill="{colour}"' if colour else 'class="frame"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" {look}/>')
        for i, line in enumerate(lines):
            below = y + height / 2 + 4.5 + 15 * (i - (len(lines) - 1) / 2)
            self.text(x + width / 2, below, line, kind + (" on" if colour else ""), "middle")

    def text(self, x, y, text, kind="", anchor="start"):
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, *points):
        """A line through the points, its head on the last segment (horizontal or vertical)."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="line"/>')
        (x0, y0), (x, y) = points[-2:]
        dx, dy = np.sign(x - x0), np.sign(y - y0)
        wings = [(x - 7 * dx + 4 * dy, y - 7 * dy + 4 * dx), (x - 7 * dx - 4 * dy, y - 7 * dy - 4 * dx)]
        head = " ".join(f"{a:g},{b:g}" for a, b in [(x, y), *wings])
        self.parts.append(f'<polygon points="{head}" class="arrow"/>')

    def __str__(self) -> str:
        width, height = self.size
        inside = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' role="img">\n{inside}\n</svg>\n'
        )


def latent_cache() -> Picture:
    p = Picture(760, 330, "A token's latent row, and the pages that hold it")
    p.text(20, 26, "One row a token, for all heads", "head")
    p.box(20, 40, 150, 40, GREY, "hidden state [7168]")
    p.arrow((170, 60), (250, 60))
    p.text(210, 52, "project", "small", "middle")
    p.box(250, 40, 320, 40, BLUE, "latent, normalised: 512 values")
    p.box(574, 40, 60, 40, PURPLE, "rope: 64")
    p.text(642, 58, "1152 bytes", "small")
    p.text(642, 73, "in bf16", "small")

    p.text(20, 122, "Where it lies: pages in any order", "head")
    p.text(20, 150, "page_table", "code")
    for column, page in enumerate((5, 2, 7)):
        p.box(110 + 46 * column, 134, 42, 24, None, str(page), kind="code")
    p.text(264, 150, "kv_lens = 150: two whole pages of 64 tokens, and 22 tokens of a third", "small")
    filled = {5: 64, 2: 64, 7: 22}
    for page in range(8):
        x = 20 + 92 * page
        if tokens := filled.get(page):
            p.box(x, 190, 84 * tokens / 64, 40, BLUE)
        p.box(x, 190, 84, 40)
        p.text(x + 42, 247, f"page {page}", "small", "middle")
    for page, text in ((5, "tokens 0 to 63"), (2, "64 to 127"), (7, "128 to 149")):
        p.text(20 + 92 * page + 42, 182, text, "small", "middle")
    p.text(20, 282, "A token's slot is page * 64 + offset: token 130 is at 7 * 64 + 2 = 450.", "small")
    p.text(20, 302, "Rows that no token owns, and pages of other sequences, are never read into a result.", "small")
    return p


def absorption() -> Picture:
    p = Picture(760, 372, "Keys of every head, or queries in the latent space")

    def lane(y, name, why):
        p.text(20, y, name, "head")
        p.text(20, y + 19, why, "small")

    lane(
        26,
        "Prefill: keys and values of every head",
        "many queries share them; what is made is attended to, and forgotten",
    )
    p.box(20, 66, 110, 44, BLUE, "latent c", "[512]")
    p.arrow((130, 88), (190, 88))
    p.box(190, 66, 150, 44, GREY, "up-project", "W_UK, W_UV")
    p.arrow((340, 88), (400, 88))
    p.box(400, 66, 150, 44, OCHRE, "keys, values", "[H, 128] each")
    p.arrow((550, 88), (610, 88))
    p.box(610, 66, 130, 44, GREEN, "q · (W_UK c)", "softmax, sum")

    lane(
        160,
        "Decode: the up-projection is absorbed by the query",
        "each cached row is read once, as it is, for all heads",
    )
    p.box(20, 200, 110, 44, OCHRE, "query, nope part", "[H, 128]")
    p.arrow((130, 222), (190, 222))
    p.box(190, 200, 150, 44, GREY, "W_UK transposed")
    p.arrow((340, 222), (400, 222))
    p.box(400, 200, 150, 44, OCHRE, "query, latent", "[H, 512]")
    p.arrow((550, 222), (610, 222))
    p.box(610, 200, 130, 44, GREEN, "(W_UKᵀ q) · c", "softmax, sum")
    p.box(400, 290, 150, 44, BLUE, "cached rows", "[tokens, 512 + 64]")
    p.arrow((550, 312), (645, 312), (645, 244))
    p.arrow((705, 244), (705, 346), (340, 346), (340, 330))
    p.box(250, 286, 120, 44, GREY, "W_UV")
    p.arrow((250, 308), (190, 308))
    p.box(60, 286, 130, 44, OCHRE, "output", "[H, 128]")
    return p


def splits() -> Picture:
    p = Picture(760, 380, "Requests of different lengths cut into even parts, partial results merged")
    lengths, parts = (9, 3, 1, 7), 4
    unit = 720 / sum(lengths)
    share = sum(lengths) / parts
    p.text(20, 26, "Requests, as long as their cached tokens", "head")
    cuts = {i * share for i in range(1, parts)}
    begin, pieces = 0.0, []
    for request, length in enumerate(lengths):
        inner = sorted(c for c in cuts if begin < c < begin + length)
        edges = [begin, *inner, begin + length]
        p.box(
            20 + unit * begin, 40, unit * length - 3, 34, COLOURS[request], f"request {request}" if length > 1 else "2"
        )
        pieces += [(request, a, b) for a, b in itertools.pairwise(edges)]
        begin += length
    p.text(20, 112, "plan_decode: the line is cut into equal parts, a few for each multiprocessor", "head")
    for request, a, b in pieces:
        p.box(20 + unit * a, 126, unit * (b - a) - 3, 34, COLOURS[request])
    for part in range(parts):
        left, right = 20 + unit * share * part, 20 + unit * share * (part + 1) - 3
        p.parts.append(f'<path d="M{left:g},166 v6 H{right:g} v-6" class="line"/>')
        p.text((left + right) / 2, 190, f"part {part}", "small", "middle")
    p.text(20, 232, "mla_decode: each piece gives (out, lse); pieces of one request are merged in order", "head")
    for x, request in ((20, 0), (265, 1), (510, 3)):
        for piece in range(2):
            p.box(x + 116 * piece, 248, 109, 34, COLOURS[request], f"piece {piece}: out, lse")
            p.arrow((x + 116 * piece + 54, 282), (x + 116 * piece + 54, 308))
        p.box(x, 308, 225, 34, COLOURS[request], f"request {request}: out, lse")
    p.text(
        20,
        366,
        "The weight of a piece is exp(lse), over their sum. One without keys: out 0, lse -inf, weight 0.",
        "small",
    )
    return p


def context_plan() -> Picture:
    """What plan_context makes of the contexts of docs/context.md."""
    contexts, workspace, page = [200, 48, 32, 0], 128, 16
    plan = plan_context(contexts, workspace_tokens=workspace, page_size=page)
    offsets, starts, chunks = np.asarray(plan.cu_kv_lens), np.asarray(plan.starts), int(plan.num_chunks)
    p = Picture(760, 80 + 56 * chunks, "How contexts of 200, 48, 32 and 0 tokens are cut into chunks")
    left, unit = 90, 640 / workspace
    for chunk in range(chunks):
        y = 14 + 56 * chunk
        p.text(20, y + 26, f"chunk {chunk}")
        for request, (begin, end) in enumerate(itertools.pairwise(offsets[chunk])):
            if begin < end:
                first = starts[chunk, request]
                rows = f"{first} to {first + end - begin - 1}"
                p.box(left + unit * begin, y, unit * (end - begin), 44, COLOURS[request], f"request {request}", rows)
        p.box(left, y, unit * workspace, 44)
    below = 14 + 56 * chunks
    for row in range(0, workspace + 1, page):
        p.parts.append(f'<path d="M{left + unit * row:g},{below - 8} v6" class="line"/>')
        p.text(left + unit * row, below + 14, str(row), "small", "middle")
    p.text(
        left + 320, below + 40, f"row of the workspace ({workspace} rows, pages of {page} tokens)", "small", "middle"
    )
    return p


def _peer_ratios() -> tuple[str, dict[tuple, dict[tuple, list[float]]]]:
    """Of decode on the last commit: the device; by cell and (dtype, peer) the peer's time over ours, of each run."""
    rows = [json.loads(line) for line in (RESULTS / "decode.jsonl").read_text().splitlines()]
    last = rows[-1]
    rows = [row for row in rows if (row["device"], row["commit"]) == (last["device"], last["commit"])]
    times = {}
    for row in rows:
        if row["op"] == "mla_decode":
            run = times.setdefault((tuple(row["cell"]), row["dtype"], row["run"]), {})
            run[row["implementation"].partition(":")[0]] = row["us"]
    ratios: dict[tuple, dict[tuple, list[float]]] = {}
    for (cell, dtype, _), run in times.items():
        for peer in ("flashmla", "fa3"):
            if peer in run:
                ratios.setdefault(cell, {}).setdefault((dtype, peer), []).append(run[peer] / run["cuda"])
    return f"{last['device']}, {last['date'][:10]}", ratios


def decode_peers() -> Picture:
    """benchmarks/decode.py's last runs: how long the peers take, with jax_mla's time as the unit."""
    device, ratios = _peer_ratios()
    series = {
        ("bf16", "flashmla"): (BLUE, "FlashMLA, bf16"),
        ("bf16", "fa3"): (OCHRE, "FlashAttention-3, bf16"),
        ("fp8", "flashmla"): (PURPLE, "FlashMLA, fp8"),
    }
    left, right, top, step, lowest, highest = 250, 730, 78, 24, 0.7, 2.5
    p = Picture(760, top + step * len(ratios) + 42, "Time of FlashMLA and FlashAttention-3, in times of jax_mla's")
    p.text(20, 24, "mla_decode beside its peers: their time over ours", "head")
    p.text(20, 44, f"{device}; right of the line jax_mla is faster; bars: the runs' lowest to highest", "small")

    def place(ratio: float) -> float:
        return left + (right - left) * (ratio - lowest) / (highest - lowest)

    for i, (colour, label) in enumerate(series.values()):
        x = 250 + 165 * i
        p.parts.append(f'<circle cx="{x}" cy="60" r="5" fill="{colour}"/>')
        p.text(x + 10, 64, label, "small")
    bottom = top + step * len(ratios)
    for tick in (0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5):
        x, width = place(tick), 2 if tick == 1 else 0.4
        p.parts.append(f'<path d="M{x:g},{top} V{bottom}" class="line" style="stroke-width:{width}"/>')
        p.text(x, bottom + 18, f"{tick:g}", "small", "middle")
    for i, (cell, found) in enumerate(ratios.items()):
        y = top + step * (i + 0.5)
        batch, tokens, heads, queries, *lengths = cell
        label = f"{batch} x {tokens}{''.join(f' {name}' for name in lengths)}, {heads} heads x {queries}"
        p.text(left - 14, y + 4, label, "small", "end")
        for which, (colour, _) in series.items():
            if which not in found:
                continue
            low, middle, high = (place(f(found[which])) for f in (min, statistics.median, max))
            p.parts.append(f'<path d="M{low:.1f},{y:g} H{high:.1f}" stroke="{colour}" stroke-width="3"/>')
            p.parts.append(f'<circle cx="{middle:.1f}" cy="{y:g}" r="5" fill="{colour}"/>')
    return p


PICTURES = {draw.__name__: draw for draw in (latent_cache, absorption, splits, context_plan, decode_peers)}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(str(draw()))
