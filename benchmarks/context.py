"""Chunked context on a GPU: the whole scan beside what it cannot do without.

    python -P benchmarks/context.py [--tokens N] [--heads N] [--runs N] [--dry-run]

Appends its rows to benchmarks/results/context.jsonl: new tokens over cached ones, in chunks; the attention and the
up-projection of the same chunks alone, from keys and values that are already there; and the reference's path (gather,
einsum, concatenate, cast, attend, merge). Each has two times, as power.py says. "temporary_of_sum" is the temporary
memory that XLA says it takes over that of the workspace, a chunk's up-projection, and the carry. helpers.py times the
memory-bound parts.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

# Python -P, which takes the installed jax_mla and not the sources, does not look beside the script either.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
import power
import record
from failures import Failures
from jitted import Jitted

import jax_mla
from jax_mla.bench import ceilings

SCALE = 192**-0.5
PAGE = 64
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy")
BF16 = jnp.bfloat16


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    make = jax.jit(lambda key: jax.random.normal(key, shape, BF16))
    return make(jax.random.key(seed, impl="rbg"))


def scan(new: int, cached: int, heads: int, workspace: int) -> list[Jitted]:
    q = [normal(0, (new, heads, 192))]
    cache, w_kv_b = normal(1, (cached // PAGE, PAGE, 576)), normal(2, (512, heads, 256)) * 512**-0.5
    table = jnp.asarray(np.random.default_rng(0).permutation(cached // PAGE).astype(np.int32))[None]
    plan = jax_mla.plan_context(np.array([cached]), workspace_tokens=workspace, page_size=PAGE)
    cu_q_lens, cu_kv_lens = jnp.array([0, new], jnp.int32), jnp.array([0, workspace], jnp.int32)

    def whole(implementation):
        def call(q, cache, table, plan, w_kv_b):
            return jax_mla.mla_context(
                q, cache, table, plan, w_kv_b, cu_q_lens=cu_q_lens, scale=SCALE, implementation=implementation
            )

        return call

    def bare(q, latent, k, w_kv_b):
        state = jnp.zeros((new, heads, 128)), jnp.full((new, heads), -jnp.inf)

        def chunk(_, carry):
            # Tied to the carry, lest XLA multiply the same latents once for all chunks.
            tied, carry = jax.lax.optimization_barrier((latent, carry))
            kv_up = jnp.einsum("nl,lhv->nhv", tied, w_kv_b)
            return jax_mla.mla_prefill(
                q, k, kv_up, cu_q_lens, cu_kv_lens, causal=False, scale=SCALE, value_offset=128, carry=carry
            )

        return jax.lax.fori_loop(0, plan.num_chunks, chunk, state)

    operands = cache, table, plan, w_kv_b
    ready = normal(3, (workspace, 512)), normal(4, (workspace, heads, 192)), w_kv_b
    return [
        Jitted("mla_context", whole(None), q, operands),
        Jitted("attention and up-projection", bare, q, ready),
        Jitted("xla", whole("xla"), q, operands),
    ]


def memory(new: int, heads: int, workspace: int) -> int:
    """Bytes of the workspace, of a chunk's up-projection, which keys and values are read from, and of the carry."""
    return workspace * (576 + heads * 256) * 2 + new * heads * (128 + 1) * 4


def difference(a, b) -> float:
    """Norm of the difference over the norm, of the first results."""
    first, second = (np.asarray(jax.tree.leaves(x)[0], np.float64) for x in (a, b))
    return float(np.linalg.norm(first - second) / np.linalg.norm(second))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="of a chunk (default 65536)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 16], help="of context (default 2 and 16)")
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--new", type=int, default=2048, help="tokens (default 2048)")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of everything, each kept (default 1)")
    parser.add_argument("--dry-run", action="store_true", help="print, and append nothing")
    arguments = parser.parse_args()
    tokens, heads, gpu = arguments.tokens, arguments.heads, jax.default_backend() != "cpu"
    failures = Failures()
    for _ in range(arguments.runs):
        kept = record.Run("context", jax.devices()[0].device_kind if gpu else record.cpu_name(), PACKAGES)
        copy = next(iter(ceilings.measure(gpu, 0.02)))
        kept.add(copy.name, [copy.size], "ceiling", copy.us, TBps=copy.TBps)
        for chunks in arguments.chunks:
            contestants = scan(arguments.new, chunks * tokens, heads, tokens)
            if chunks > 2:  # the reference's path is slow, and its time per chunk is known by then
                contestants.pop()
            times = [power.measure(contestant) for contestant in contestants]
            error = difference(contestants[0].out(), contestants[-1].out()) if chunks <= 2 else None
            for contestant, time in zip(contestants, times, strict=True):
                if not all(np.isfinite(x).all() for x in contestant.out()):  # a GPU multiplies NaN with less power
                    failures.add(f"{contestant.name}, {chunks} chunks: not finite")
                kept.add(
                    "mla_context", [arguments.new, chunks * tokens, heads], contestant.name, time.burst, error=error,
                    ratio=time.burst / times[1].burst, sustained_us=time.sustained,
                    sustained_ratio=time.sustained / times[1].sustained, temporary_bytes=contestant.temporary_bytes,
                    temporary_of_sum=contestant.temporary_bytes / memory(arguments.new, heads, tokens),
                )  # fmt: skip
        if not arguments.dry_run:
            kept.save()
    return failures.exit_status


if __name__ == "__main__":
    sys.exit(main())
