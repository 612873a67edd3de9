"""Writes the generated tables: README.md's of what is supported where and of the CPU, docs/benchmarks.md's of decode
and of the memory-bound helpers, docs/sparse.md's of chosen slots, docs/context.md's of chunked context,
docs/hopper_prefill.md's of prompts.

    python docs/tables.py

The first comes from the capability tables of the modules that are built here. Lines that this machine cannot know (of
a module that is not built, of a CPU variant that does not run here, of another architecture) stay as they are.
The others come from each machine's last run in benchmarks/results.
"""

import json
import platform
from pathlib import Path

from jax_mla import _ffi
from jax_mla.bench.ceilings import Ceiling, floor_us
from jax_mla.dispatch import capabilities
from jax_mla.info import HEADER, Support, compact, support

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
CONTEXT = ROOT / "docs" / "context.md"
SPARSE = ROOT / "docs" / "sparse.md"
PREFILL = ROOT / "docs" / "hopper_prefill.md"
RESULTS = ROOT / "benchmarks" / "results"
CPU_RESULTS = RESULTS / "cpu.jsonl"


def refresh(readme: str) -> str:
    """README.md's text with its tables made anew."""
    readme = _replace(readme, "support", lambda old: _markdown(HEADER, compact(_merge(_parse(old)))))
    if CPU_RESULTS.exists():
        readme = _replace(readme, "cpu", lambda _: _cpu_table(CPU_RESULTS.read_text()))
        readme = _replace(readme, "cpu prefill", lambda _: _cpu_queries_table(CPU_RESULTS.read_text(), "mla_prefill"))
    return readme


def refresh_benchmarks(page: str) -> str:
    """docs/benchmarks.md's text with its tables made anew."""
    return _refresh_gpu(_refresh_gpu(page, "decode", _decode_table), "helpers", _helpers_table)


def refresh_sparse(page: str) -> str:
    """docs/sparse.md's text with its table made anew."""
    return _refresh_gpu(page, "sparse", _sparse_table)


def refresh_prefill(page: str) -> str:
    """docs/hopper_prefill.md's text with its table made anew."""
    return _refresh_gpu(page, "prefill", _prefill_table)


def refresh_context(page: str) -> str:
    """docs/context.md's text with its table made anew."""
    page = _refresh_gpu(page, "context", _context_table)
    if not CPU_RESULTS.exists():
        return page
    return _replace(page, "cpu context", lambda _: _cpu_queries_table(CPU_RESULTS.read_text(), "mla_context"))


def _refresh_gpu(page: str, name: str, table) -> str:
    """The page with the tables of NAME.jsonl; as it was where there are no results."""
    results = RESULTS / f"{name}.jsonl"
    return _replace(page, name, lambda _: _gpu_tables(results.read_text(), table)) if results.exists() else page


def _replace(text: str, name: str, make) -> str:
    start, end = f"<!-- {name}: by docs/tables.py -->\n", f"<!-- end of {name} -->"
    before, rest = text.split(start)
    old, after = rest.split(end)
    return before + start + make(old) + end + after


def _markdown(header: tuple[str, ...], lines: list) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join("| " + " | ".join(map(str, row)) + " |\n" for row in rows)


def _parse(table: str) -> list[Support]:
    """The table's lines, one a variant again."""
    lines = [Support(*(cell.strip() for cell in line.strip("|").split("|"))) for line in table.splitlines()[2:]]
    expanded = []
    for line in lines:
        name, variants = line.implementation.split(": ")
        expanded += [line._replace(implementation=f"{name}:{variant}") for variant in variants.split(", ")]
    return expanded


def _merge(old: list[Support]) -> list[Support]:
    """The lines of the modules built here, and the old ones that this machine cannot speak for."""
    here = support(capabilities())
    runs_here = {line.implementation for line in here}

    def is_kept(line: Support) -> bool:
        name, variant = line.implementation.split(":")
        if name not in _ffi.MODULES:
            return True
        if name != "cpu":
            return False
        known = variant in _ffi.MODULES[name].variants()
        return known and (line.implementation not in runs_here or line.architecture != platform.machine())

    operations = list(dict.fromkeys(line.operation for line in [*here, *old]))
    order = [f"{name}:{variant}" for name, module in _ffi.MODULES.items() for variant in module.variants()]
    order = list(dict.fromkeys([*order, *(line.implementation for line in old)]))
    platforms = list(_ffi.PLATFORMS)

    def rank(line: Support) -> tuple[int, int, int, bool]:
        name = platforms.index(line.implementation.split(":")[0])
        elsewhere = line.architecture == "aarch64"
        return operations.index(line.operation), name, order.index(line.implementation), elsewhere

    return sorted([*here, *(line for line in old if is_kept(line))], key=rank)


def _last_runs(results: str, operation: str) -> list[list[dict]]:
    """Of each machine the rows of the operation's last run; runs limited to older instructions left out."""
    rows = [json.loads(line) for line in results.splitlines()]
    rows = [row for row in rows if row["op"] == operation and "limited" not in row["device"]]
    last_run = {row["device"]: row["run"] for row in rows}
    return [[row for row in rows if row["run"] == run] for run in last_run.values()]


def _run_table(rows: list[dict], header: tuple[str, ...], line) -> str:
    """XLA and the best variant: a benchmark lists the best first."""
    first = rows[0]
    versions = ", ".join(f"{name} {first['versions'][name]}" for name in ("jax", "jaxlib"))
    natives = list(dict.fromkeys(row["implementation"] for row in rows if row["implementation"].startswith("cpu")))
    lines = [line(row) for row in rows if row["implementation"] not in natives[1:]]
    return f"{first['device']}; {versions}; {first['date'][:10]}.\n\n" + _markdown(header, lines)


def _cpu_table(results: str) -> str:
    header = ("sequences x tokens, heads", "implementation", "ms", "GB/s of cache", "GFLOP/s", "error", "times XLA")

    def line(row: dict) -> tuple[str, ...]:
        batch, tokens, heads, _ = row["cell"]
        name, ms, *others = _measured(row)
        return (f"{batch} x {tokens}, {heads}", name, ms, f"{row['TBps'] * 1000:.2f}", *others)

    return "\n".join(_run_table(rows, header, line) for rows in _last_runs(results, "mla_decode"))


def _cpu_queries_table(results: str, operation: str) -> str:
    header = ("queries x tokens, heads", "implementation", "ms", "GFLOP/s", "error", "times XLA")

    def line(row: dict) -> tuple[str, ...]:
        queries, tokens, heads = row["cell"]
        return (f"{queries} x {tokens}, {heads}", *_measured(row))

    return "\n".join(_run_table(rows, header, line) for rows in _last_runs(results, operation))


def _measured(row: dict) -> tuple[str, ...]:
    return (
        row["implementation"],
        f"{row['us'] / 1000:.2f}",
        f"{row['TFLOPs'] * 1000:.0f}",
        f"{row['error']:.1e}",
        f"{row['ratio']:.1f}",
    )


PEERS = ("flashmla", "fa3")
EINSUM = "einsum"


def _gpu_tables(results: str, table) -> str:
    """One a device, from its last run."""
    rows = [json.loads(line) for line in results.splitlines()]
    last_run = {row["device"]: row["run"] for row in rows}
    return "\n".join(table([row for row in rows if row["run"] == run]) for run in last_run.values())


def _ceilings(rows: list[dict]) -> list[Ceiling]:
    return [
        Ceiling(r["op"], 0, r["us"], r.get("TBps", 0.0), r.get("TFLOPs", 0.0))
        for r in rows
        if r["implementation"] == "ceiling"
    ]


def _heading(rows: list[dict], *, commit: bool = False) -> str:
    """The device, what the run was made with (and at which commit), and its ceilings."""
    first = rows[0]
    versions = ", ".join(f"{name} {first['versions'][name]}" for name in ("jax", "torch") if name in first["versions"])
    if commit:
        versions = f"{first['commit']}; {versions}"
    measured = [
        f"{c.name} {c.TBps:.2f} TB/s" if c.TBps else f"{c.name} {c.TFLOPs:.0f} TFLOP/s" for c in _ceilings(rows)
    ]
    return f"{first['device']}; {versions}; {first['date'][:10]}; {', '.join(measured)}.\n\n"


def _decode_table(rows: list[dict]) -> str:
    """A line a cell and dtype: the best of ours, with its plan, beside the peers; ratios are to the faster peer."""
    ceilings = _ceilings(rows)
    cells: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["op"] != "mla_decode":
            continue
        found = cells.setdefault((row["dtype"], *row["cell"]), {})
        name = "ours" if row["implementation"].startswith("cuda:") else row["implementation"]
        if name not in found or row["us"] < found[name]["us"]:
            found[name] = row
    header = ("sequences x tokens, heads x queries", "dtype", "floor", "jax_mla", "plan", "FlashMLA", "FA3")
    header = (*header, "XLA's gather + einsum", "peer / jax_mla", "error")
    lines = []
    for (dtype, batch, tokens, heads, queries, *lengths), found in cells.items():
        any_row = next(iter(found.values()))
        nbytes, flops = (any_row[unit] * any_row["us"] * 1e6 for unit in ("TBps", "TFLOPs"))
        floor = floor_us(nbytes, flops, dtype, ceilings)
        ours = found.get("ours")
        peers = [found[name]["us"] for name in PEERS if name in found]
        lines.append(
            (
                f"{batch} x {tokens}{''.join(f' {name}' for name in lengths)}, {heads} x {queries}",
                dtype,
                _us(floor),
                f"{ours['us']:.1f} ({ours['implementation'].partition(':')[2]})" if ours else "-",
                _us(ours and ours.get("plan_us")),
                *(_us(found.get(name) and found[name]["us"]) for name in (*PEERS, EINSUM)),
                f"{min(peers) / ours['us']:.2f}" if ours and peers else "-",
                f"{ours['error']:.1e}" if ours else "-",
            )
        )
    return _heading(rows) + _markdown(header, lines)


def _by_cell(rows: list[dict], operations: str) -> dict[tuple, list[dict]]:
    """Rows of operations whose names begin so, by operation, layout of the cache and cell."""
    cells: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["op"].startswith(operations) and row["implementation"] != "ceiling":
            cells.setdefault((row["op"], row.get("dtype"), *row["cell"]), []).append(row)
    return cells


def _sparse_table(rows: list[dict]) -> str:
    """A line a cell and layout: the best of ours beside the peer and the reference."""
    header = ("sequences x chosen tokens, heads x queries", "cache", "jax_mla", "TFLOP/s", "TB/s of cache", "FlashMLA")
    header = (*header, "XLA", "FlashMLA / jax_mla", "error")
    lines = []
    for (_, kind, batch, chosen, heads, queries), found in _by_cell(rows, "mla_sparse_decode").items():
        times = {row["implementation"]: row["us"] for row in found}
        natives = [row for row in found if row["implementation"].startswith("cuda")]
        if not natives:
            continue
        ours = min(natives, key=lambda row: row["us"])
        peer = times.get("flashmla")
        lines.append(
            (
                f"{batch} x {chosen}, {heads} x {queries}",
                kind,
                f"{ours['us']:.1f} ({ours['implementation'].partition(':')[2]})",
                f"{ours['TFLOPs']:.0f}",
                f"{ours['TBps']:.2f}" if "TBps" in ours else "-",
                _us(peer),
                _us(times.get("xla")),
                f"{peer / ours['us']:.2f}" if peer else "-",
                "-" if ours["error"] is None else f"{ours['error']:.1e}",
            )
        )
    return _heading(rows) + _markdown(header, lines)


def _context_table(rows: list[dict]) -> str:
    """A line a length of context and contestant; ratios are to the attention and the up-projection alone."""
    header = (
        "new x cached tokens, heads",
        "",
        "ms, burst",
        "sustained",
        "ratio, burst",
        "sustained",
        "temporary MB",
        "error",
    )
    lines = [
        (
            "{} x {}, {}".format(*row["cell"]),
            row["implementation"],
            f"{row['us'] / 1000:.2f}",
            f"{row['sustained_us'] / 1000:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['sustained_ratio']:.2f}",
            f"{row['temporary_bytes'] / 1e6:.0f}",
            "-" if row["error"] is None or row["implementation"] != "mla_context" else f"{row['error']:.1e}",
        )
        for row in rows
        if row["op"] == "mla_context"
    ]
    return _heading(rows) + _markdown(header, lines)


PROMPTS = {  # contestants by implementation and dtype
    "bf16": ("cuda", "bf16"),
    "FA3 bf16": ("fa3", "bf16"),
    "cuDNN bf16": ("cudnn", "bf16"),
    "jax's cuDNN, values padded": ("jax cudnn, padded", "bf16"),
    "scores in e4m3": ("cuda", "mixed"),
    "all in e4m3": ("cuda", "fp8"),
    "FA3 fp8": ("fa3", "fp8"),
}


def _prefill_table(rows: list[dict]) -> str:
    """A line a cell: TFLOP/s of each contestant, burst and sustained."""
    cells: dict[tuple, dict[tuple, dict]] = {}
    for row in rows:
        if row["op"] == "mla_prefill":
            key = (*row["cell"], row["causal"])
            cells.setdefault(key, {})[row["implementation"], row["dtype"]] = row
    lines = []
    for (*cell, causal), found in cells.items():
        rates = (
            f"{found[key]['TFLOPs']:.0f} / {found[key]['sustained_TFLOPs']:.0f}" if key in found else "-"
            for key in PROMPTS.values()
        )
        lines.append((", ".join(map(str, cell)) + ("" if causal else ", full"), *rates))
    header = ("requests, queries, keys, heads", *PROMPTS)
    return _heading(rows, commit=True) + _markdown(header, lines)


def _helpers_table(rows: list[dict]) -> str:
    """A line an operation and size: ours beside a copy and the reference."""
    header = ("operation", "tokens, heads", "jax_mla", "TB/s", "of a copy", "XLA", "XLA / jax_mla")
    lines = []
    for (operation, _, *cell), found in _by_cell(rows, "").items():
        xla = next((row["us"] for row in found if row["implementation"] == "xla"), None)
        for ours in (row for row in found if row["implementation"].startswith("cuda")):
            share = f"{100 * ours['of_copy']:.0f}%" if "of_copy" in ours else "-"
            ratio = "-" if xla is None else f"{xla / ours['us']:.1f}"
            size = ", ".join(map(str, cell))
            lines.append((operation, size, _us(ours["us"]), f"{ours['TBps']:.2f}", share, _us(xla), ratio))
    return _heading(rows) + _markdown(header, lines)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    BENCHMARKS.write_text(refresh_benchmarks(BENCHMARKS.read_text()))
    SPARSE.write_text(refresh_sparse(SPARSE.read_text()))
    CONTEXT.write_text(refresh_context(CONTEXT.read_text()))
    PREFILL.write_text(refresh_prefill(PREFILL.read_text()))
    README.write_text(refresh(README.read_text()))
