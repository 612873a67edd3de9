"""``python -m jax_mla bench``: decode timed on this machine, beside XLA and whatever peer can be imported.

Device time: each implementation runs as one program of many calls in a row, in a captured graph on a GPU, each call
over another cache, so that neither the host nor the processor's caches make a call look slower or faster than it is in
a decode loop. Data is random, pages are scattered, pages that no sequence owns hold NaN; each result is compared with
the reference in float64, and the machine's ceilings are measured in the same run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_mla import dispatch
from jax_mla.bench import ceilings, host, inputs, programs, report, timing
from jax_mla.bench.cells import DTYPES, LENGTHS, TABLES, TOLERANCES, Cell, copies
from jax_mla.bench.report import Results, Row, progress

EINSUM = "einsum"  # pages gathered, two einsums: XLA without this library, beside the reference that "xla" names
PEERS = Path("benchmarks/peers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("cells: every combination of these, or tables")
    for name, text in (
        ("batch", "sequences"),
        ("tokens", "cached tokens a sequence"),
        ("heads", "query heads"),
        ("queries", "query tokens a sequence"),
        ("page-size", "tokens a page"),
    ):
        shape.add_argument(f"--{name}", type=int, nargs="+", metavar="N", help=text)
    shape.add_argument("--lengths", nargs="+", choices=LENGTHS, help="how the tokens are spread (default even)")
    shape.add_argument(
        "--table", nargs="+", choices=tuple(TABLES), help="instead: tables of cells; uneven has the first dtype alone"
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=tuple(DTYPES),
        default=["bf16"],
        help="fp8-cache: bf16 queries over an fp8 cache; fp8: both (default bf16)",
    )
    parser.add_argument(
        "--implementations",
        nargs="+",
        metavar="NAME",
        help=f"of mla_decode: cuda, cuda:generic, cpu, xla, ..., or {EINSUM} for XLA's gather and einsums "
        "(default: the best, xla and that); both of XLA's, and what a plan costs, for the first dtype alone",
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help=f"what imports the peers (default {PEERS})")
    parser.add_argument("--repeats", type=int, default=4, metavar="N", help="of each time; the median counts")
    parser.add_argument("--seconds", type=float, default=0.1, metavar="S", help="of each repeat (default 0.1)")
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="start no cell after this many seconds of measuring"
    )
    parser.add_argument("--no-ceilings", action="store_true", help="do not measure the machine's ceilings")
    parser.add_argument("--host", action="store_true", help="also what calls and steps cost the host")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a roofline plot (needs matplotlib)")


def main(arguments: argparse.Namespace) -> int:
    """Measures and prints; 0 where all results of this library agree with float64, else 1."""
    results = run(arguments)
    print(report.table(results))
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(record) + "\n" for record in records(results)))
    if arguments.plot is not None and results.rows:
        report.plot(results, arguments.plot)
    return verdict(results)


def verdict(results: Results) -> int:
    """1, with a line on stderr for each wrong result of this library, or 0."""
    prefixes = (*dispatch.DEFAULT_UNITS, "cpu", dispatch.XLA)
    wrong = [r for r in results.rows if r.implementation.startswith(prefixes) and not _is_right(r)]
    for row in wrong:
        print(f"WRONG: {row.cell}, {row.implementation}: error {row.error:.1e}", file=sys.stderr)
    return 1 if wrong else 0


def _is_right(row: Row) -> bool:
    return row.error <= TOLERANCES[row.cell.dtype]  # False for NaN


def records(results: Results) -> list[dict[str, Any]]:
    """One dict a row, the ceilings first, as benchmarks/results keeps them."""
    rows: list[dict[str, Any]] = [
        {"op": c.name, "cell": [c.size], "implementation": "ceiling", "us": c.us, "TBps": c.TBps, "TFLOPs": c.TFLOPs}
        for c in results.ceilings
    ]
    for r in results.rows:
        row = {"op": "mla_decode", "cell": r.cell.key, "dtype": r.cell.dtype, "implementation": r.implementation}
        error = r.error if math.isfinite(r.error) else None
        row |= {"us": r.us, "TBps": r.TBps, "TFLOPs": r.TFLOPs, "error": error}
        row |= {"plan_us": r.plan_us, "with_plan_us": r.with_plan_us} if r.plan_us is not None else {}
        row |= {"page_size": r.cell.page_size} if r.cell.page_size != 64 else {}
        rows.append(row | {"spread": r.spread, "repeats": r.repeats})
    for cost in results.host:
        rows.append({"op": "host", "cell": [cost.what], "implementation": "dispatch", "us": cost.dispatch})
        rows.append({"op": "host", "cell": [cost.what], "implementation": "until done", "us": cost.done})
    return rows


def cells(arguments: argparse.Namespace) -> list[Cell]:
    """What the arguments ask for."""
    names = ("batch", "tokens", "heads", "queries", "lengths", "page_size")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.table and given:
        raise ValueError(f"--table and --{next(iter(given)).replace('_', '-')} are given; expected one or the other")
    if given:
        default = {
            "batch": [8],
            "tokens": [4096],
            "heads": [24],
            "queries": [1],
            "lengths": ["even"],
            "page_size": [64],
        }
        wanted = default | given
        shapes = [Cell(**dict(zip(wanted, values, strict=True))) for values in itertools.product(*wanted.values())]
    else:
        shapes = []
        for name in arguments.table or ["small" if dispatch.default_platform() == "cpu" else "dense"]:
            shapes += TABLES[name]
    return [
        dataclasses.replace(cell, dtype=dtype)
        for number, dtype in enumerate(arguments.dtype)
        for cell in shapes
        if given or number == 0 or cell not in TABLES["uneven"]
    ]


class Bench:
    """What the arguments ask for, compiled, to be measured once or several times."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        if arguments.repeats < 1:
            raise ValueError(f"--repeats is {arguments.repeats}; it has to be at least 1")
        # PyTorch, where peers are timed, takes its memory beside JAX's.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self.arguments = arguments
        self.gpu = dispatch.default_platform() != "cpu"
        self.device = _device()
        self.notes: list[str] = []
        wanted = cells(arguments)
        progress(f"{self.device}: {len(wanted)} cells")
        self.peers = _peers(arguments.peers, self.notes) if self.gpu else {}
        if not self.gpu:
            self.notes.append("peers: none runs on a CPU")
        names = arguments.implementations or [None, dispatch.XLA, EINSUM]
        self.jobs = []
        for cell in wanted:
            first = cell.dtype == arguments.dtype[0]
            own = [name for name in names if first or name not in (dispatch.XLA, EINSUM)]
            self.jobs.append(_Job(cell, own, self.gpu, first, self.notes))
        _compile([step for job in self.jobs for step in job.to_compile()])

    def measure(self) -> Results:
        """All cells, one after the other."""
        arguments = self.arguments
        results = Results(self.device, "T" if self.gpu else "G", notes=[*self.notes])
        started = time.perf_counter()

        def elapsed() -> float:
            return time.perf_counter() - started

        if not arguments.no_ceilings:
            progress(f"ceilings, {elapsed():.0f} s")
            results.ceilings += ceilings.measure(self.gpu, arguments.seconds)
        for number, job in enumerate(self.jobs, 1):
            progress(f"[{number}/{len(self.jobs)}] {job.cell}, {elapsed():.0f} s")
            if arguments.time_limit is not None and elapsed() > arguments.time_limit:
                results.notes.append(f"time limit: not measured from cell {number} on: {job.cell}")
                break
            results.rows += job.measure(arguments, self.peers, results.notes)
        if arguments.host:
            progress(f"host, {elapsed():.0f} s")
            results.host += host.measure()
        report.end_progress()
        return results


def run(arguments: argparse.Namespace) -> Results:
    """Programs are compiled before anything is timed."""
    return Bench(arguments).measure()


def _device() -> str:
    """The GPU's name, or the CPU's and the threads that this process may use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} threads"


class _Job:
    """One cell: what is compiled for it, and its measurement."""

    def __init__(
        self, cell: Cell, implementations: Sequence[str | None], gpu: bool, with_plan: bool, notes: list[str]
    ) -> None:
        self.cell = cell
        self.with_plan = with_plan  # also what planning costs
        # Several times an H200's L2; on a CPU, where a call is long, as much as compiles quickly.
        count = copies(cell, 240e6, least=3) if gpu else min(copies(cell, 64e6, least=1), 16)
        # Many calls a run, so that the launch of a graph is little beside it.
        self.shapes = inputs.abstract(cell, count, max(count, 48) if gpu else count)
        # Calls of XLA's are longer, and each takes its time to compile.
        self.few = min(max(3, round(1.5e9 / cell.bytes)), 16) if gpu else 1
        self.programs: list[programs.Program] = []
        self.parts: dict[tuple[str, str], programs.Program] = {}  # by implementation and what of it
        for name in implementations:
            self._add(name, notes)
        self.fill: Any = None
        self.truth: Any = None

    def _add(self, name: str | None, notes: list[str]) -> None:
        if name == EINSUM:
            self.programs.append(programs.gather_einsum(EINSUM, self.few, self.shapes))
            return
        if name == dispatch.XLA:
            self.programs.append(programs.decode(name, name, self.few, self.shapes))
            return
        choice = self._choice(name)
        if choice.row is None:
            note = f"{self.cell.dtype}: {name or 'native'}: {choice.reason}"
            if note not in notes:
                notes.append(note)
            return
        label = name if name and ":" in name else choice.implementation
        calls = self.shapes.calls
        self.programs.append(programs.decode(label, name, calls, self.shapes))
        if not self.with_plan:
            return
        few = min(calls, 64)
        self.parts[label, "plan"] = programs.plan(label, name, few, self.shapes)
        self.parts[label, "with plan"] = programs.plan_and_decode(label, name, few, self.shapes)

    def _choice(self, name: str | None) -> dispatch.Choice:
        q_dtype, cache_dtype = DTYPES[self.cell.dtype]
        return dispatch.explain(
            num_heads=self.cell.heads,
            q_dtype=q_dtype,
            cache_dtype=cache_dtype,
            q_len=self.cell.queries,
            page_size=self.cell.page_size,
            implementation=name,
        )

    def to_compile(self) -> list[tuple[Any, str, Callable[[], jax.stages.Lowered]]]:
        """(object, attribute that takes the compiled form, what lowers it)"""
        steps: list[tuple[Any, str, Any]] = [(p, "compiled", p.lower) for p in self._all()]
        poisoned = jax.ShapeDtypeStruct((inputs.POISONED_PAGES,), np.int32)
        steps.append((self, "fill", lambda: inputs.random_arrays(self.shapes).lower(poisoned)))
        steps.append((self, "truth", lambda: inputs.lower_truth(self.shapes)))
        return steps

    def _all(self) -> list[programs.Program]:
        return [*self.programs, *self.parts.values()]

    def measure(self, arguments: argparse.Namespace, peers: dict[str, Any], notes: list[str]) -> list[Row]:
        data = inputs.make(self.shapes, self.fill)
        exact = np.asarray(self.truth(*data.operands, **data.scales))
        for program in self._all():
            program.start(data)
        contestants: list[timing.Contestant] = [*self.programs]
        for name, make in peers.items():
            try:
                contestants.append(make(data))
            except NotImplementedError as error:
                if (note := f"{name}: {error}") not in notes:
                    notes.append(note)
        times = timing.take_turns([*contestants, *self.parts.values()], arguments.repeats, arguments.seconds)
        parts = {key: time.us for key, time in zip(self.parts, times[len(contestants) :], strict=True)}
        rows = [
            Row(
                self.cell,
                contestant.name,
                time.us,
                time.spread,
                arguments.repeats,
                inputs.relative_error(contestant.out(), exact),
                parts.get((contestant.name, "plan")),
                parts.get((contestant.name, "with plan")),
            )
            for contestant, time in zip(contestants, times, strict=False)
        ]
        for program in self._all():
            program.stop()
        return rows


def _compile(steps: Sequence[tuple[Any, str, Callable[[], jax.stages.Lowered]]]) -> None:
    """Lowers here, one after the other, and compiles in threads: XLA lets go of the interpreter meanwhile."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = [(target, name, pool.submit(lower().compile)) for target, name, lower in steps]
        for number, (target, name, future) in enumerate(pending, 1):
            setattr(target, name, future.result())
            if number % 10 == 0 or number == len(pending):
                progress(f"compiled {number}/{len(pending)} programs")


def _peers(folder: Path | None, notes: list[str]) -> dict[str, Callable[[inputs.Inputs], timing.Contestant]]:
    """What makes a peer's contestant from a cell's inputs, by the package in `folder`; notes say who is missing."""
    folder = folder or PEERS
    file = folder / "__init__.py"
    if not file.exists():
        notes.append(f"peers: none, {folder} is not here (a checkout of jax_mla has it; --peers)")
        return {}
    spec = importlib.util.spec_from_file_location("jax_mla_peers", file, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["jax_mla_peers"] = module
    spec.loader.exec_module(module)
    found, missing = module.find()
    if missing:
        notes.append("peers left out: " + "; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    return found
