"""Results as rows, as a table, and as a roofline plot."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_mla.bench.ceilings import Ceiling, floor_us
from jax_mla.bench.cells import Cell
from jax_mla.bench.host import HostCost


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation on one cell. us: microseconds a call; spread: of the repeats, their range over the median.

    error: relative, to float64. plan_us: of plan_decode alone; with_plan_us: of a call that makes its own plan.
    """

    cell: Cell
    implementation: str
    us: float
    spread: float
    repeats: int
    error: float
    plan_us: float | None = None
    with_plan_us: float | None = None

    @property
    def TBps(self) -> float:
        return self.cell.bytes / self.us * 1e-6

    @property
    def TFLOPs(self) -> float:
        return self.cell.flops / self.us * 1e-6


@dataclasses.dataclass
class Results:
    """Of one run. unit: "T" or "G", how bytes and FLOPs a second are shown. notes: what was left out, and why."""

    device: str
    unit: str = "T"
    rows: list[Row] = dataclasses.field(default_factory=list)
    ceilings: list[Ceiling] = dataclasses.field(default_factory=list)
    host: list[HostCost] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def progress(text: str) -> None:
    """To stderr: one line that is rewritten in a terminal, a line each elsewhere."""
    if sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def end_progress() -> None:
    """Leaves a terminal's line to what comes next."""
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need; all but the first two to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def text(line: Sequence[str]) -> str:
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join(text(line) for line in lines)


def table(results: Results) -> str:
    """The cells, then the ceilings of the run."""
    unit, factor = results.unit, _FACTORS[results.unit]
    header = (
        "cell",
        "implementation",
        "us",
        "+-",
        "plan",
        "with plan",
        f"{unit}B/s",
        f"{unit}FLOP/s",
        "of floor",
        "error",
    )
    lines, last = [header], None
    for row in results.rows:
        floor = floor_us(row.cell.bytes, row.cell.flops, row.cell.dtype, results.ceilings)
        lines.append(
            (
                "" if row.cell == last else str(row.cell),
                row.implementation,
                f"{row.us:.1f}",
                f"{50 * row.spread:.1f}%",
                *("" if us is None else f"{us:.1f}" for us in (row.plan_us, row.with_plan_us)),
                f"{row.TBps * factor:.3g}",
                f"{row.TFLOPs * factor:.3g}",
                "" if floor is None else f"{100 * floor / row.us:.0f}%",
                f"{row.error:.1e}",
            )
        )
        last = row.cell
    parts = [_aligned(lines)] if results.rows else []
    if results.ceilings:
        parts.append("ceilings: " + ", ".join(_ceiling(c, unit) for c in results.ceilings))
    if results.host:
        costs = [(cost.what, "", f"{cost.dispatch:.0f}", f"{cost.done:.0f}") for cost in results.host]
        parts.append(_aligned([("host, us", "", "dispatch", "until done"), *costs]))
    return "\n\n".join(parts + ["\n".join(results.notes)] * bool(results.notes))


_FACTORS = {"T": 1, "G": 1000}


def _ceiling(ceiling: Ceiling, unit: str) -> str:
    factor = _FACTORS[unit]
    if ceiling.TBps:
        return f"{ceiling.name} {ceiling.TBps * factor:.3g} {unit}B/s"
    return f"{ceiling.name} {ceiling.TFLOPs * factor:.4g} {unit}FLOP/s"


def plot(results: Results, file: Path) -> None:
    """A roofline: FLOP/s over FLOPs a byte, log-log, under the ceilings of the run. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print(f"no plot: matplotlib is not installed (pip install 'jax_mla[bench]'), {file} is not written")
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    unit, factor = results.unit, _FACTORS[results.unit]
    intensity = [row.cell.flops / row.cell.bytes for row in results.rows]
    span = (min(intensity) / 4, max(intensity) * 4)
    bandwidth = max((c.TBps for c in results.ceilings), default=0.0)
    for ceiling in results.ceilings:
        if ceiling.TFLOPs and bandwidth:
            ridge = min(max(ceiling.TFLOPs / bandwidth, span[0]), span[1])
            xs = sorted({*span, ridge})
            ys = [min(x * bandwidth, ceiling.TFLOPs) * factor for x in xs]
            label = f"{_ceiling(ceiling, unit)}, {bandwidth * factor:.3g} {unit}B/s"
            axes.plot(xs, ys, color="grey", linewidth=1, linestyle="-" if "bf16" in ceiling.name else "--", label=label)
    kinds = dict.fromkeys((row.implementation, row.cell.dtype) for row in results.rows)
    markers = dict(zip(dict.fromkeys(dtype for _, dtype in kinds), "osD^v", strict=False))
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in kinds))}
    for name, dtype in kinds:
        rows = [row for row in results.rows if (row.implementation, row.cell.dtype) == (name, dtype)]
        axes.scatter(
            [row.cell.flops / row.cell.bytes for row in rows],
            [row.TFLOPs * factor for row in rows],
            s=24,
            marker=markers[dtype],
            color=colours[name],
            label=f"{name}, {dtype}",
            zorder=3,
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel=f"{unit}FLOP/s", title=results.device)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=150)
    print(f"wrote {file}")
