"""Attention to chosen slots on a GPU beside FlashMLA: decode over caches of fp8_ds_mla, prefill over bf16.

    python -P benchmarks/sparse.py [--cache bf16 e4m3fn ..] [--cells 0 2 ..] [--runs N] [--quick] [--dry-run]

Appends its rows to benchmarks/results/sparse.jsonl. Each call of decode reads other slots, scattered over a cache of
two million tokens, so that none is found in the L2. A row of ours has its rate over what is aimed at ("of_aim"), and
the peer's time over its own ("of_peer"). What fails is named and leaves the rest alone; the exit status is then 1.
peers/__init__.py says where FlashMLA comes from.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

# Python -P, which takes the installed jax_mla and not the sources, does not look beside the script either.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import record
from failures import Failures, summary
from jitted import Jitted

import jax_mla
from jax_mla.bench import ceilings, inputs, timing
from jax_mla.bench.report import progress

PAGE, LATENT, WIDTH = 64, 512, 576
SAMPLE = 16  # query tokens compared with float64
TOLERANCE = 1e-2
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch", "vllm")
DS_MLA = "fp8_ds_mla"
BYTES = {DS_MLA: 656, "bf16": 1152, "e4m3fn": 576}  # of a token in the cache
K_SCALE = 0.7  # of an e4m3fn cache: no power of two, so that leaving it out shows


@dataclasses.dataclass(frozen=True)
class Cell:
    """`queries` tokens of each of `batch` sequences attend to `chosen` slots of a cache of `cached` tokens.

    One sequence is a prefill. What is aimed at: a rate, over the layout that the cell is about; or the time a query
    token of the cell of `pace`, (heads, queries).
    """

    batch: int
    chosen: int
    heads: int
    queries: int
    cached: int
    aim: tuple[str, float] | None = None
    pace: tuple[int, int] | None = None
    beside_xla: bool = False

    @property
    def key(self) -> list[int]:
        return [self.batch, self.chosen, self.heads, self.queries]

    @property
    def tokens(self) -> int:
        return self.batch * self.queries

    @property
    def is_prefill(self) -> bool:
        return self.batch == 1

    @property
    def kind(self) -> str:
        """The layout that the cell is about."""
        return "bf16" if self.is_prefill else DS_MLA

    @property
    def flops(self) -> int:
        return 2 * (WIDTH + LATENT) * self.chosen * self.heads * self.tokens

    @property
    def calls(self) -> int:
        """A run goes twice through the cache; prefill, whose calls are long, has eight of them, beside which what the
        host needs to start a run is little."""
        return max(8 if self.is_prefill else 2, 2 * self.cached // (self.tokens * self.chosen))

    def rates(self, kind: str, us: float) -> dict[str, float]:
        """Bytes are those of the chosen tokens, once for each query token. In prefill they come from the L2."""
        rates = {"TFLOPs": self.flops / us * 1e-6}
        return rates if self.is_prefill else rates | {"TBps": self.tokens * self.chosen * BYTES[kind] / us * 1e-6}


CELLS = (
    Cell(128, 2048, 128, 1, 1 << 21, aim=("TFLOPs", 400.0)),
    Cell(128, 2048, 128, 2, 1 << 21, pace=(128, 1)),
    Cell(128, 2048, 64, 1, 1 << 21, aim=("TFLOPs", 360.0)),
    Cell(128, 2048, 64, 2, 1 << 21, pace=(64, 1)),
    Cell(128, 2048, 24, 1, 1 << 21, aim=("TBps", 2.2), beside_xla=True),
    Cell(128, 2048, 24, 2, 1 << 21, pace=(24, 1)),
    Cell(128, 2048, 16, 1, 1 << 21, aim=("TBps", 2.2)),
    Cell(128, 2048, 16, 2, 1 << 21, pace=(16, 1)),
    Cell(1, 2048, 128, 4096, 1 << 16, aim=("TFLOPs", 580.0)),
    Cell(1, 2048, 64, 4096, 1 << 16, aim=("TFLOPs", 570.0)),
    Cell(1, 2048, 24, 4096, 1 << 16, pace=(64, 4096)),
)
QUICK = (
    Cell(2, 16, 3, 1, 256, aim=("TBps", 1.0), beside_xla=True),
    Cell(2, 16, 3, 2, 256, pace=(3, 1)),
    Cell(1, 16, 3, 20, 256),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q [T, H, 576] in bf16; cache [pages, 64, width]; indices: [T, K] for each call of a run."""

    cell: Cell
    kind: str
    q: jax.Array
    cache: jax.Array
    indices: tuple[jax.Array, ...]

    @property
    def scale(self) -> float:
        return inputs.SCALE


@functools.cache
def make_cache(kind: str, cached: int) -> jax.Array:
    """Random; written down byte by byte where the layout is fp8_ds_mla."""

    def fill(key):
        keys = jax.random.split(key, 3)
        tokens = (cached // PAGE, PAGE)
        latent = jax.random.normal(keys[0], (*tokens, LATENT), jnp.bfloat16)
        rope = jax.random.normal(keys[1], (*tokens, WIDTH - LATENT), jnp.bfloat16)
        if kind != DS_MLA:
            return jnp.concatenate([latent, rope], axis=-1).astype(
                jnp.bfloat16 if kind == "bf16" else jnp.float8_e4m3fn
            )
        scales = jax.random.uniform(keys[2], (*tokens, LATENT // 128), minval=0.5, maxval=1.5)
        parts = latent.astype(jnp.float8_e4m3fn), scales, rope
        return jnp.concatenate(
            [jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*tokens, -1) for x in parts], axis=-1
        )

    return jax.jit(fill)(jax.random.key(0, impl="rbg"))


def choose(cell: Cell) -> tuple[jax.Array, ...]:
    """Slots of each call: all different until the cache is used up; where one call takes more than that, at random."""
    rng = np.random.default_rng(0)
    each = cell.tokens * cell.chosen
    in_turn = cell.cached // each  # calls until the cache is used up
    if in_turn == 0:
        slots = rng.integers(cell.cached, size=(cell.calls, each))
    else:
        passes = range(-(-cell.calls // in_turn))
        slots = np.concatenate([rng.permutation(cell.cached)[: in_turn * each] for _ in passes]).reshape(-1, each)
    return tuple(jnp.asarray(row.reshape(cell.tokens, -1), jnp.int32) for row in slots[: cell.calls])


def make_inputs(cell: Cell, kind: str) -> Inputs:
    shape = (cell.tokens, cell.heads, WIDTH)
    q = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(1, impl="rbg"))
    return Inputs(cell, kind, q, make_cache(kind, cell.cached), choose(cell))


def dequantised(rows: np.ndarray, kind: str) -> np.ndarray:
    """Rows of the cache as float64 [.., 576]."""
    if kind == "bf16":
        return rows.astype(np.float64)
    if kind == "e4m3fn":
        return rows.astype(np.float64) * K_SCALE
    latent, scales, rope = (np.ascontiguousarray(x) for x in np.split(rows, [LATENT, LATENT + 16], axis=-1))
    latent = latent.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    latent *= np.repeat(scales.view(np.float32), 128, axis=-1)
    return np.concatenate([latent, rope.view(ml_dtypes.bfloat16).astype(np.float64)], axis=-1)


def truth(given: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Some query tokens, and the first call's result for them in float64, [tokens, H, 512]."""
    tokens = np.unique(np.linspace(0, given.cell.tokens - 1, min(SAMPLE, given.cell.tokens)).astype(int))
    slots = given.indices[0][tokens]
    keys = dequantised(np.asarray(given.cache[slots // PAGE, slots % PAGE]), given.kind)
    scores = np.asarray(given.q[tokens], np.float64) @ keys.swapaxes(1, 2) * given.scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return tokens, weights / weights.sum(axis=-1, keepdims=True) @ keys[..., :LATENT]


def native(name: str, given: Inputs, calls: int | None = None) -> Jitted:
    """mla_sparse_decode of that implementation; calls: fewer than the inputs have."""
    k_scale = K_SCALE if given.kind == "e4m3fn" else None

    def call(indices, q, cache):
        return jax_mla.mla_sparse_decode(q, cache, indices, scale=given.scale, k_scale=k_scale, implementation=name)

    is_attention = name != "xla"
    return Jitted(name, call, given.indices[:calls], (given.q, given.cache), is_attention=is_attention)


class Comparison:
    """A cell over one layout of the cache: who takes it, compiled, to be timed once or several times."""

    def __init__(
        self, cell: Cell, kind: str, implementations: Sequence[str], peers: Sequence[Any], failures: Failures
    ) -> None:
        self.cell, self.kind = cell, kind
        given = make_inputs(cell, kind)
        self.tokens, self.exact = truth(given)
        self.ours: list[Jitted] = []
        self.xla: list[Jitted] = []
        self.peers: list[timing.Contestant] = []
        for name in implementations:
            with failures.caught(f"{self}, {name}"):
                self.ours.append(_run_once(native(name, given)))
        if cell.beside_xla:
            with failures.caught(f"{self}, xla"):
                self.xla.append(_run_once(native("xla", given, 2)))
        for make in peers:
            try:
                self.peers.append(_run_once(make(given)))
            except Exception as error:
                print(f"left out: {self}: {summary(error)}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        cell = self.cell
        return f"{cell.batch} x {cell.chosen} of {cell.cached}, {cell.heads} heads x {cell.queries}, {self.kind}"

    def measure(self, kept: record.Run, paces: dict[tuple, float], failures: Failures) -> None:
        """paces: of ours on the run's cells so far, microseconds a query token of each sequence."""
        contestants = [*self.ours, *self.xla, *self.peers]
        times = [time.us for time in timing.take_turns(contestants, 4, 0.02)]
        peers = times[len(self.ours) + len(self.xla) :]
        for contestant, us in zip(contestants, times, strict=True):
            rates = self.cell.rates(self.kind, us)
            error = inputs.relative_error(contestant.rows(self.tokens), self.exact)
            compared = {}
            if contestant in self.ours:
                compared = {"of_peer": min(peers) / us} if peers else {}
                compared |= self._of_aim(contestant.name, us, rates, paces)
            kept.add(
                "mla_sparse_decode", self.cell.key, contestant.name, us, dtype=self.kind, cached=self.cell.cached,
                **rates, error=error if np.isfinite(error) else None, **compared,
            )  # fmt: skip
            if not error <= TOLERANCE and contestant not in self.peers:
                failures.add(f"{self}, {contestant.name}: error {error:.1e}")

    def _of_aim(self, name: str, us: float, rates: dict[str, float], paces: dict[tuple, float]) -> dict[str, float]:
        """What is reached of what is aimed at, where something is."""
        cell = self.cell
        pace = us / cell.queries
        paces[name, self.kind, cell.heads, cell.queries] = pace
        if cell.aim is not None and self.kind == cell.kind:
            unit, rate = cell.aim
            return {"of_aim": rates[unit] / rate}
        other = cell.pace and paces.get((name, self.kind, *cell.pace))
        return {"of_aim": other / pace} if other else {}


def _run_once(contestant: Any) -> Any:
    """What cannot run raises here, and not among those that it is timed beside."""
    contestant.seconds(1)
    return contestant


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", nargs="+", choices=tuple(BYTES), default=[DS_MLA], help="of decode's cells")
    parser.add_argument("--cells", type=int, nargs="+", metavar="N", help="of the table")
    parser.add_argument("--quick", action="store_true", help="instead: tiny cells, as for a try on a CPU")
    parser.add_argument("--implementations", nargs="+", default=["cuda:sm90"], metavar="NAME")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of everything, each kept (default 1)")
    parser.add_argument("--dry-run", action="store_true", help="print, and append nothing")
    arguments = parser.parse_args()
    peers: Sequence[Any] = ()
    if not arguments.no_peers:
        from peers import SPARSE as peers
    table = QUICK if arguments.quick else CELLS
    cells = table if arguments.cells is None else [table[i] for i in arguments.cells]
    wanted = [(cell, kind) for cell in cells for kind in ([cell.kind] if cell.is_prefill else arguments.cache)]
    failures = Failures()
    comparisons = []
    for number, (cell, kind) in enumerate(wanted, 1):
        progress(f"[{number}/{len(wanted)}] prepares {cell.key}, {kind}")
        with failures.caught(f"{cell.key}, {kind}"):
            comparisons.append(Comparison(cell, kind, arguments.implementations, peers, failures))
    gpu = jax.default_backend() != "cpu"
    for number in range(1, arguments.runs + 1):
        progress(f"run {number} of {arguments.runs}")
        kept = record.Run("sparse", jax.devices()[0].device_kind if gpu else record.cpu_name(), PACKAGES)
        for c in ceilings.measure(gpu, 0.02):
            kept.add(c.name, [c.size], "ceiling", c.us, TBps=c.TBps, TFLOPs=c.TFLOPs)
        paces: dict[tuple, float] = {}
        for comparison in comparisons:
            with failures.caught(str(comparison)):
                comparison.measure(kept, paces, failures)
        if not arguments.dry_run:
            kept.save()
    return failures.exit_status


if __name__ == "__main__":
    sys.exit(main())
