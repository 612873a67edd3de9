"""Rows of results: one JSON object a line in benchmarks/results/NAME.jsonl, appended by the benchmark that measured.

Rows of one run share its id, and only such rows are compared.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import uuid
from typing import Any

# RESULTS in the environment names another folder, as where the tree is a copy that is thrown away.
RESULTS = pathlib.Path(os.environ.get("RESULTS") or pathlib.Path(__file__).parent / "results")


def _commit() -> str:
    """The commit that is measured, with "+" where the working tree differs from it.

    COMMIT in the environment names it for a copy of the tree without its history.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")


def cpu_name() -> str:
    """The processor's model and what jax_mla makes of it."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        return next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


class Run:
    """One run of a benchmark: a heading shared by its rows."""

    def __init__(self, name: str, device: str, packages: tuple[str, ...] = ("jax", "jaxlib", "numpy")) -> None:
        self.path = RESULTS / f"{name}.jsonl"
        self.rows: list[dict[str, Any]] = []
        versions = {package: _version(package) for package in ("jax_mla", *packages)}
        self.heading = {
            "run": uuid.uuid4().hex[:12],
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "device": device,
            "versions": {name: found for name, found in versions.items() if found}
            | {"python": platform.python_version()},
        }

    def add(self, op: str, cell: list[int], implementation: str, us: float, **measures: Any) -> None:
        """measures: TBps, TFLOPs, error (relative, to the oracle), ratio (to the baseline of this run), and others."""
        rounded = {key: _rounded(value) for key, value in measures.items()}
        row = {**self.heading, "op": op, "cell": cell, "implementation": implementation, "us": round(us, 2), **rounded}
        self.rows.append(row)
        print(f"{op} {cell} {implementation}: {us:.1f} us {rounded}", file=sys.stderr, flush=True)

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in self.rows)
        print(f"{len(self.rows)} rows appended to {self.path}", file=sys.stderr)
