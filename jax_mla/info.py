"""``python -m jax_mla info``: versions, devices, built modules, and what runs natively on this machine."""

import argparse
import importlib
import platform
from collections.abc import Iterable
from importlib.metadata import version
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_mla import _ffi
from jax_mla.dispatch import Capability, capabilities, explain

SHORT_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "e4m3fn",
    "float8_e4m3fnuz": "e4m3fnuz",
}


class Support(NamedTuple):
    """What one implementation of an operation takes: capability rows that differ in dtypes alone, joined, as text."""

    operation: str
    implementation: str
    architecture: str
    dtypes: str  # "bf16 → bf16, e4m3fn": of the queries and the cache, or of the input and the result
    heads: str
    queries: str
    page_sizes: str


HEADER = Support("operation", "implementation", "architecture", "dtypes", "heads", "queries", "page sizes")


def support(rows: Iterable[Capability]) -> list[Support]:
    """The capability table in the form that is shown, in the table's order."""
    joined: dict[Support, dict[str, list[str]]] = {}
    for row in rows:
        heads = str(row.planner_heads)
        if row.planner_heads != row.reducer_heads:
            heads = f"planner {heads}; reducer {row.reducer_heads}"
        line = Support(
            operation=row.operation,
            implementation=row.implementation,
            architecture=row.architecture,
            dtypes="",
            heads=heads if row.planner_heads.ranges else "any",
            queries="any" if row.max_q_len is None else f"to {row.max_q_len}",
            page_sizes="any" if row.page_sizes is None else str(row.page_sizes),
        )
        targets = joined.setdefault(line, {}).setdefault(_short(row.q_dtype), [])
        targets.append(_short(row.cache_dtype))
    return [
        line._replace(dtypes="; ".join(f"{source} → {', '.join(targets)}" for source, targets in pairs.items()))
        for line, pairs in joined.items()
    ]


def compact(lines: Iterable[Support]) -> list[Support]:
    """Lines that differ in the variant alone as one: "cpu:avx2" and "cpu:portable" become "cpu: avx2, portable"."""
    joined: dict[tuple[str, Support], list[str]] = {}
    for line in lines:
        name, variant = line.implementation.split(":")
        joined.setdefault((name, line._replace(implementation="")), []).append(variant)
    return [line._replace(implementation=f"{name}: {', '.join(all_)}") for (name, line), all_ in joined.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def main(arguments: argparse.Namespace) -> int:
    for name in ("jax_mla", "jax", "jaxlib", "numpy"):
        print(f"{name} {version(name)}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")

    print("\nDevices")
    for device in jax.devices():
        print(f"  {device.platform}:{device.id}  {device.device_kind}")

    print("\nModules")
    for name, text in _modules().items():
        print(f"  {name:5} {text}")

    print("\nA call with 24 heads in bfloat16 is served by")
    for operation in ("mla_decode", "update_cache", "merge_states", "pack_kv", "mla_prefill"):
        print(f"  {operation:13} {explain(operation, q_dtype=jnp.bfloat16)}")

    print("\nNative kernels, the preferred first (all else runs through XLA)")
    lines = [HEADER, *compact(support(capabilities()))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    for line in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _short(dtype: str) -> str:
    return SHORT_NAMES.get(dtype, dtype)


def _modules() -> dict[str, str]:
    """One line a platform: what the build said, and which variants this machine can run."""
    try:
        report = importlib.import_module("jax_mla._build_report").BUILD_REPORT
    except ModuleNotFoundError:
        report = {}
    lines = {}
    for name in _ffi.PLATFORMS:
        _, lines[name] = report.get(name, (False, "not built"))
        if name in _ffi.MODULES:
            here = list(dict.fromkeys(row.variant for row in capabilities(name)))
            others = [variant for variant in _ffi.MODULES[name].variants() if variant not in here]
            lines[name] += f"; variants {', '.join(here)}"
            if others:
                lines[name] += f" (not on this machine: {', '.join(others)})"
    return lines
