"""The memory-bound helpers on a GPU beside a copy and the reference: packing, gather, merge, the cache's update.

    python -P benchmarks/helpers.py [--tokens N] [--heads N] [--runs N] [--quick] [--dry-run]

Appends its rows to benchmarks/results/helpers.jsonl. Calls in a row go over arrays of their own, together more than the
L2 holds. "of_copy" is the bandwidth over that of a plain copy in the same run, "of_aim" the same over 0.9 of it; of an
update of a few tokens, whose time is the launch of a graph's node, it is 5 us over that time. "error" is the difference
to the reference. What fails is named and leaves the rest alone; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Python -P, which takes the installed jax_mla and not the sources, does not look beside the script either.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
import record
from failures import Failures
from jitted import InPlace, Jitted

import jax_mla
from jax_mla import context, dispatch
from jax_mla.bench import ceilings, timing
from jax_mla.bench.report import progress

PAGE = 64
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy")
BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn
LAYOUTS = {"bf16": BF16, "e4m3fn": FP8, "fp8_ds_mla": "fp8_ds_mla"}
K_SCALE = 0.7  # of e4m3fn: no power of two, so that leaving it out shows
FEW = 128  # tokens of an update in a step of decode
OF_COPY, NODE_US = 0.9, 5.0  # what is aimed at
TOLERANCE = 1e-2


class Part(NamedTuple):
    """One helper at one size. make: the name of an implementation -> its contestant."""

    op: str
    cell: list[int]
    nbytes: int
    make: Callable[[str], Any]
    is_few: bool = False


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, BF16).astype(dtype)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = BF16) -> jax.Array:
    return _normal(jax.random.key(seed, impl="rbg"), shape, dtype)


def packing(tokens: int, heads: int) -> Iterator[Part]:
    ups, rope = [normal(i, (tokens, heads, 256)) for i in range(3)], normal(9, (tokens, 64))
    rows = tokens * heads

    def keys(implementation):
        pack = functools.partial(jax_mla.pack_kv, implementation=implementation)
        return Jitted(implementation, pack, ups, (rope,))

    def coded(values):
        def make(implementation):
            pack = functools.partial(jax_mla.pack_kv_fp8, values=values, implementation=implementation)
            return Jitted(implementation, pack, ups, (rope,))

        return make

    yield Part("pack_kv", [tokens, heads], rows * (256 + 384) + tokens * 128, keys)
    for values in ("plain", "kernel"):
        nbytes = rows * (512 + 320) + tokens * 128
        yield Part(f"pack_kv_fp8 {values}", [tokens, heads], nbytes, coded(values))


def cache_of(seed: int, tokens: int, layout: str) -> jax.Array:
    """[pages, 64, width] of random tokens."""
    empty = jax_mla.allocate_cache(tokens // PAGE, PAGE, dtype=LAYOUTS[layout])
    kv_c, k_pe = normal(seed, (tokens, 512)), normal(seed + 100, (tokens, 64))
    update = jax.jit(jax_mla.update_cache, static_argnames="implementation", donate_argnums=0)
    return update(empty, kv_c, k_pe, jnp.arange(tokens, dtype=jnp.int32), implementation=dispatch.XLA)


def k_scale_of(layout: str) -> float | None:
    return K_SCALE if layout == "e4m3fn" else None


def width_of(layout: str) -> int:
    """Bytes of a cached token."""
    cache = jax.eval_shape(lambda: jax_mla.allocate_cache(1, 1, dtype=LAYOUTS[layout]))
    return cache.shape[-1] * cache.dtype.itemsize


def gathers(tokens: int) -> Iterator[Part]:
    table = jnp.asarray(np.random.default_rng(0).permutation(tokens // PAGE).astype(np.int32))[None]
    operands = table, jnp.zeros(1, jnp.int32), jnp.array([0, tokens], jnp.int32)

    def gather(layout, caches):
        def make(implementation):
            call = functools.partial(
                context.gather_context, workspace_tokens=tokens, dtype=BF16, k_scale=k_scale_of(layout),
                implementation=implementation,
            )  # fmt: skip
            return Jitted(implementation, call, caches, operands)

        return make

    for layout in LAYOUTS:
        caches = [cache_of(i, tokens, layout) for i in range(4)]
        nbytes = tokens * (width_of(layout) + 1152)
        yield Part(f"gather_context {layout}", [tokens], nbytes, gather(layout, caches))


def merging(tokens: int, heads: int) -> Iterator[Part]:
    sides = [(normal(i, (tokens, heads, 128)), normal(i + 9, (tokens, heads), jnp.float32)) for i in range(3)]
    other = normal(20, (tokens, heads, 128)), normal(21, (tokens, heads), jnp.float32)

    def make(implementation):
        def call(side, *other):
            return jax_mla.merge_states(*side, *other, implementation=implementation)

        return Jitted(implementation, call, sides, other)

    yield Part("merge_states", [tokens, heads], tokens * heads * 3 * (256 + 4), make)


def updates(tokens: int, pages: int, layers: int, *, is_few: bool) -> Iterator[Part]:
    """A layer of a stacked cache each: whole pages, scattered; few tokens go to slots anywhere."""
    rng = np.random.default_rng(0)
    if is_few:
        slots = [rng.permutation(pages * PAGE)[:tokens] for _ in range(layers)]
    else:
        slots = [(rng.permutation(pages)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:tokens] for _ in range(layers)]
    written = [
        (normal(i, (tokens, 512)), normal(i + 100, (tokens, 64)), jnp.asarray(to, jnp.int32), jnp.int32(i))
        for i, to in enumerate(slots)
    ]

    def update(layout):
        def make(implementation):
            def call(cache, each):
                *new, layer = each
                return jax_mla.update_cache(
                    cache, *new, layer=layer, k_scale=k_scale_of(layout), implementation=implementation
                )

            # The reference's calls are long and take their time to compile.
            calls = min(layers, 3) if implementation == dispatch.XLA else layers
            state = jax_mla.allocate_cache(pages, PAGE, dtype=LAYOUTS[layout], layers=layers)
            return InPlace(implementation, call, written[:calls], state)

        return make

    for layout in LAYOUTS:
        nbytes = tokens * (1152 + width_of(layout) + 4)
        yield Part(f"update_cache {layout}", [tokens], nbytes, update(layout), is_few)


def parts(tokens: int, heads: int, layers: int) -> Iterator[Part]:
    """layers: of the cache that a step of decode updates one after the other."""
    yield from packing(tokens, heads)
    yield from gathers(tokens)
    yield from merging(tokens, heads)
    yield from updates(tokens, tokens // PAGE, 3, is_few=False)
    yield from updates(min(FEW, tokens), min(FEW, tokens // PAGE), layers, is_few=True)


@jax.jit
def _norms(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    pairs = [[x.astype(jnp.float32) for x in pair] for pair in zip(*map(jax.tree.leaves, (a, b)), strict=True)]
    return sum(jnp.sum((x - y) ** 2) for x, y in pairs), sum(jnp.sum(y**2) for _, y in pairs)


def difference(a: Any, b: Any) -> float:
    """Norm of the difference over the norm, of all arrays of the first results."""
    wrong, norm = map(float, _norms(a, b))
    return (wrong / norm) ** 0.5


class Comparison:
    """A part and who takes it, compiled, to be timed once or several times; the reference comes last."""

    def __init__(self, part: Part, implementation: str, failures: Failures) -> None:
        self.part = part
        self.contestants: list[Any] = []
        for name in (implementation, dispatch.XLA):
            with failures.caught(f"{self}, {name}"):
                contestant = part.make(name)
                contestant.seconds(1)
                self.contestants.append(contestant)
        self.error: float | None = None
        if len(self.contestants) == 2:
            with failures.caught(f"{self}, the results"):
                self.error = difference(*(c.first() for c in self.contestants))
                if not self.error <= TOLERANCE:
                    failures.add(f"{self}: error {self.error:.1e}")

    def __str__(self) -> str:
        return f"{self.part.op} {self.part.cell}"

    def measure(self, kept: record.Run, copy_TBps: float) -> None:
        times = [time.us for time in timing.take_turns(self.contestants, 4, 0.02)]
        for contestant, us in zip(self.contestants, times, strict=True):
            rate = self.part.nbytes / us * 1e-6
            measures = {"TBps": rate} if self.part.is_few else {"TBps": rate, "of_copy": rate / copy_TBps}
            if contestant.name != dispatch.XLA:
                measures["of_aim"] = NODE_US / us if self.part.is_few else rate / copy_TBps / OF_COPY
                if self.error is not None:
                    measures["error"] = self.error
            kept.add(self.part.op, self.part.cell, contestant.name, us, **measures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="(default 65536)")
    parser.add_argument("--heads", type=int, default=24)
    platform = dispatch.default_platform()
    best = "cuda:generic" if platform == "cuda" else platform  # named: some are chosen by name alone
    parser.add_argument("--implementation", default=best, metavar="NAME", help=f"beside xla (default {best})")
    parser.add_argument("--quick", action="store_true", help="instead: tiny sizes, as for a try on a CPU")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of everything, each kept (default 1)")
    parser.add_argument("--dry-run", action="store_true", help="print, and append nothing")
    arguments = parser.parse_args()
    sizes = (256, 2, 4) if arguments.quick else (arguments.tokens, arguments.heads, 48)
    failures = Failures()
    comparisons = []
    for part in parts(*sizes):
        progress(f"prepares {part.op} {part.cell}")
        comparisons.append(Comparison(part, arguments.implementation, failures))
    gpu = jax.default_backend() != "cpu"
    for number in range(1, arguments.runs + 1):
        progress(f"run {number} of {arguments.runs}")
        kept = record.Run("helpers", jax.devices()[0].device_kind if gpu else record.cpu_name(), PACKAGES)
        copy = next(iter(ceilings.measure(gpu, 0.02)))
        kept.add(copy.name, [copy.size], "ceiling", copy.us, TBps=copy.TBps)
        for comparison in comparisons:
            with failures.caught(str(comparison)):
                comparison.measure(kept, copy.TBps)
        if not arguments.dry_run:
            kept.save()
    return failures.exit_status


if __name__ == "__main__":
    sys.exit(main())
