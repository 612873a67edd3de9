"""Prefill on a GPU beside its peers: FlashAttention-3, cuDNN through PyTorch, cuDNN through JAX with padded values.

    python -P benchmarks/prefill.py [--dtype bf16 fp8 ..] [--cells 0 2 ..] [--runs N] [--dry-run]

Appends its rows to benchmarks/results/prefill.jsonl. A large GPU is limited by power here, so each contestant has two
times, as power.py says. peers/__init__.py says where the peers come from.
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
import numpy as np
import power
import record
from jitted import Jitted

import jax_mla
from jax_mla.bench import ceilings

SCALE = 192**-0.5
SAMPLE = 32  # query tokens of each sequence compared with float64
E4M3FN = jnp.float8_e4m3fn
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch", "vllm")


@dataclasses.dataclass(frozen=True)
class Cell:
    """`batch` sequences of `queries` new tokens that attend to `keys` tokens."""

    batch: int
    queries: int
    keys: int
    heads: int
    causal: bool = True

    @property
    def key(self) -> list[int]:
        return [self.batch, self.queries, self.keys, self.heads]

    @property
    def flops(self) -> float:
        """Of what is seen: half of the square where causal."""
        seen = self.keys - self.queries / 2 if self.causal else self.keys
        return 2.0 * (192 + 128) * self.batch * self.heads * self.queries * seen

    @property
    def calls(self) -> int:
        """A run, so that the host's part is little beside it."""
        return max(1, min(8, round(3e12 / self.flops)))


CELLS = (
    Cell(1, 8192, 8192, 24),
    Cell(1, 8192, 8192, 128),
    Cell(4, 2048, 2048, 24),
    Cell(1, 32768, 32768, 24),
    Cell(1, 2048, 65536, 24, causal=False),
)
DTYPES = ("bf16", "mixed", "fp8")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q: one [T, H, 192] for each call of a run; k [S, H, 192]; kv_up [S, H, 256], whose second half are the values."""

    cell: Cell
    q: tuple[jax.Array, ...]
    k: jax.Array
    kv_up: jax.Array
    cu_q_lens: jax.Array
    cu_kv_lens: jax.Array


def make_inputs(cell: Cell, calls: int) -> Inputs:
    """Random, with scores of ordinary size."""
    tokens, stored = cell.batch * cell.queries, cell.batch * cell.keys

    @jax.jit
    def fill(key):
        keys = jax.random.split(key, calls + 2)
        normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        q = tuple(normal(k, (tokens, cell.heads, 192)) for k in keys[2:])
        return q, normal(keys[0], (stored, cell.heads, 192)), normal(keys[1], (stored, cell.heads, 256))

    lens = (jnp.arange(cell.batch + 1, dtype=jnp.int32) * n for n in (cell.queries, cell.keys))
    return Inputs(cell, *fill(jax.random.key(0, impl="rbg")), *lens)


def truth(inputs: Inputs, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the first call's result, and what they are in float64. values: the operands as they are multiplied."""
    cell, (q, k, v) = inputs.cell, values
    each = np.unique(np.linspace(0, cell.queries - 1, min(SAMPLE, cell.queries)).astype(int))
    outs = []
    with jax.enable_x64(True):
        for b in range(cell.batch):
            keys = slice(b * cell.keys, (b + 1) * cell.keys)
            rows = q[b * cell.queries + each].astype(jnp.float64)
            scores = jnp.einsum("thd,shd->hts", rows, k[keys].astype(jnp.float64)) * SCALE
            if cell.causal:
                hidden = jnp.arange(cell.keys) > each[:, None] + cell.keys - cell.queries
                scores = jnp.where(hidden, -jnp.inf, scores)
            outs.append(jnp.einsum("hts,shd->thd", jax.nn.softmax(scores, axis=-1), v[keys].astype(jnp.float64)))
    chosen = np.concatenate([b * cell.queries + each for b in range(cell.batch)])
    return chosen, np.concatenate([np.asarray(out) for out in outs])


def native(name: str, implementation: str, inputs: Inputs, values: Any, options: dict[str, Any]) -> Jitted:
    def call(q, k, v, cu_q_lens, cu_kv_lens):
        return jax_mla.mla_prefill(
            q, k, v, cu_q_lens, cu_kv_lens, causal=inputs.cell.causal, scale=SCALE, implementation=implementation,
            **options,
        )[0]  # fmt: skip

    return Jitted(name, call, inputs.q, (*values, inputs.cu_q_lens, inputs.cu_kv_lens))


def padded_cudnn(inputs: Inputs) -> Jitted:
    """What JAX has ready: cuDNN's attention takes values as wide as keys only."""
    cell = inputs.cell

    def call(q, k, v):
        rows = (x.reshape(cell.batch, -1, cell.heads, 192) for x in (q, k, v))
        out = jax.nn.dot_product_attention(*rows, scale=SCALE, is_causal=cell.causal, implementation="cudnn")
        return out.reshape(-1, cell.heads, 192)[..., :128]

    values = jnp.pad(inputs.kv_up[..., 128:], ((0, 0), (0, 0), (0, 64)))
    return Jitted("jax cudnn, padded", call, inputs.q, (inputs.k, values))


def coded_values(inputs: Inputs, dtype: str, implementation: str) -> tuple[Any, dict[str, Any]]:
    """The values beside queries and keys in fp8, as the implementation takes them, and the call's options."""
    if dtype == "mixed":
        return inputs.kv_up, {"value_offset": 128}
    if implementation.partition(":")[0] != "cuda":
        return inputs.kv_up[..., 128:].astype(E4M3FN), {}
    no_rope = jnp.zeros((inputs.kv_up.shape[0], 64), inputs.kv_up.dtype)
    return jax_mla.pack_kv_fp8(inputs.kv_up, no_rope, dtype=E4M3FN, values="kernel")[1], {}


def contestants(inputs: Inputs, dtype: str, names: Sequence[str], peers: Any) -> tuple[list[Any], Any]:
    """Who takes the cell, and the operands as float64 has to see them."""
    seen = inputs.q[0], inputs.k, inputs.kv_up[..., 128:]
    if dtype == "bf16":
        makers = [
            functools.partial(native, name, name, inputs, (inputs.k, inputs.kv_up), {"value_offset": 128})
            for name in names
        ]
        makers += [functools.partial(padded_cudnn, inputs)] * (peers is not None)
    else:
        coded = dataclasses.replace(inputs, q=tuple(x.astype(E4M3FN) for x in inputs.q))
        k, values = inputs.k.astype(E4M3FN), inputs.kv_up[..., 128:]
        makers = []
        for name in names:
            v, options = coded_values(inputs, dtype, name)
            makers.append(functools.partial(native, name, name, coded, (k, v), options))
        seen = coded.q[0], k, values if dtype == "mixed" else values.astype(E4M3FN)
    makers += [functools.partial(make, inputs, dtype) for make in (peers.PREFILL if peers is not None else ())]
    found = []
    for make in makers:
        try:
            found.append(make())
        except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
            print(f"left out: {dtype} {inputs.cell}: {str(error).splitlines()[0]}", file=sys.stderr)
    return found, seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--cells", type=int, nargs="+", default=range(len(CELLS)), metavar="N", help="of the table")
    parser.add_argument("--shape", type=int, nargs=4, metavar=("B", "Q", "K", "H"), help="instead: one causal cell")
    parser.add_argument("--implementations", nargs="+", default=["cuda", "cuda:generic"], metavar="NAME")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of everything, each kept (default 1)")
    parser.add_argument("--dry-run", action="store_true", help="print, and append nothing")
    arguments = parser.parse_args()
    peers = None
    if not arguments.no_peers:
        import peers
    cells = [Cell(*arguments.shape)] if arguments.shape else [CELLS[i] for i in arguments.cells]
    gpu = jax.default_backend() != "cpu"
    for _ in range(arguments.runs):
        kept = record.Run("prefill", jax.devices()[0].device_kind if gpu else record.cpu_name(), PACKAGES)
        for c in ceilings.measure(gpu, 0.02):
            kept.add(c.name, [c.size], "ceiling", c.us, TBps=c.TBps, TFLOPs=c.TFLOPs)
        for cell in cells:
            inputs = make_inputs(cell, cell.calls)
            for dtype in arguments.dtype:
                found, seen = contestants(inputs, dtype, arguments.implementations, peers)
                rows, exact = truth(inputs, seen)
                for contestant in found:
                    burst, sustained = power.measure(contestant)
                    wrong = np.asarray(contestant.out(), np.float64)[rows] - exact
                    kept.add(
                        "mla_prefill", cell.key, contestant.name, burst, dtype=dtype, causal=cell.causal,
                        TFLOPs=cell.flops / burst * 1e-6, sustained_us=sustained,
                        sustained_TFLOPs=cell.flops / sustained * 1e-6,
                        error=float(np.linalg.norm(wrong) / np.linalg.norm(exact)),
                    )  # fmt: skip
        if not arguments.dry_run:
            kept.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
