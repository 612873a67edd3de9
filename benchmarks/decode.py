"""Decode on a GPU beside its peers, kept: what ``python -m jax_mla bench`` measures, as rows of results/decode.jsonl.

    python -P benchmarks/decode.py --table dense uneven [--dry-run] [any argument of bench]

The whole of it, peers included, is `bash .ci/gpu bench`. benchmarks/peers/__init__.py says where the peers come from.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
# Python -P, which takes the installed jax_mla and not the sources, does not look beside the script either.
sys.path.insert(0, str(HERE))

import record  # noqa: E402

from jax_mla import bench  # noqa: E402

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "torch", "vllm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bench.add_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print, and append nothing")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of everything, each kept (default 1)")
    parser.set_defaults(peers=HERE / "peers")
    arguments = parser.parse_args()
    prepared = bench.Bench(arguments)
    verdict = 0
    for _ in range(arguments.runs):
        results = prepared.measure()
        kept = record.Run("decode", results.device, PACKAGES)
        for row in bench.records(results):
            kept.add(**row)
        print(bench.report.table(results))
        if not arguments.dry_run:
            kept.save()
        verdict = max(verdict, bench.verdict(results))
    if arguments.plot is not None and results.rows:
        bench.report.plot(results, arguments.plot)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
