"""Decode, prefill and chunked context on the CPU: what this machine runs beside XLA's jitted einsums, in one run.

    python -P benchmarks/cpu.py [--op mla_prefill] [--rounds N] [--threads 2] [--isa AVX2] [--dry-run]

Appends its rows to benchmarks/results/cpu.jsonl. Times are medians of whole jitted calls on the host clock;
implementations take turns, a few calls in a row each, so that a change of clock meets all of them. --isa keeps both
sides to an older machine's instructions: XLA by its own flag, jax_mla by leaving wider variants out.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time

OPERATIONS = ["mla_decode", "mla_prefill", "mla_context"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="cores that this process may use")
    parser.add_argument("--isa", choices=("AVX2", "AVX512"), help="widest instruction set that both sides may use")
    parser.add_argument("--dry-run", action="store_true", help="print, and append nothing")
    return parser.parse_args()


ARGUMENTS = parse()
os.environ["JAX_PLATFORMS"] = "cpu"  # also on a machine with a GPU
# Variants that a machine limited to --isa has.
NARROW = {"AVX2": ("avx2", "portable"), "AVX512": ("avx512", "avx2", "portable")}
if ARGUMENTS.isa:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_cpu_max_isa={ARGUMENTS.isa}"
    os.environ["ONEDNN_MAX_CPU_ISA"] = {"AVX2": "AVX2", "AVX512": "AVX512_CORE"}[ARGUMENTS.isa]
# Before jax starts its thread pool, which is as large as the affinity mask.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: ARGUMENTS.threads])

# Python -P, which takes the installed jax_mla and not the sources, does not look beside the script either.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import record  # noqa: E402

import jax_mla  # noqa: E402
from jax_mla import reference  # noqa: E402

PAGE = 64
SCALE = 192**-0.5
CALLS_IN_A_ROW = 4
DECODE_CELLS = [(4, 4096, 24, 1), (1, 32768, 24, 1), (4, 4096, 128, 1)]  # sequences, tokens, heads, query tokens
PREFILL_CELLS = [(512, 16384, 24)]  # query tokens, tokens, heads
PREFILL_SAMPLE = 16  # query tokens compared with float64
CONTEXT_CELLS = [(512, 16384, 24)]  # query tokens, cached tokens, heads
WORKSPACE = 4096


@jax.jit
def gather_einsum(q, cache, page_table, kv_lens):
    """What a user writes without this library."""
    batch, max_pages = page_table.shape
    rows = cache[page_table].reshape(batch, max_pages * PAGE, 576)
    scores = jnp.einsum("bqhd,bnd->bqhn", q, rows, preferred_element_type=jnp.float32) * SCALE
    keys = jnp.arange(max_pages * PAGE)
    scores = jnp.where(keys < kv_lens[:, None, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(rows.dtype)
    return jnp.einsum("bqhn,bnl->bqhl", weights, rows[..., :512])


@jax.jit
def einsum_softmax(q, k, v):
    """What a user writes for the attention of new tokens to their context. The products are in bf16, summed in fp32."""
    scores = jnp.einsum("thd,shd->hts", q, k, preferred_element_type=jnp.float32) * SCALE
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores, axis=-1).astype(q.dtype), v)


@jax.jit
def gather_up_project_einsum(q, cache, page_table, w_kv_b, kv_lens):
    """What a user writes for new tokens of one sequence over its cached context, in bf16 and all at once."""
    rows = cache[page_table[0]].reshape(-1, 576)
    kv_up = jnp.einsum("nl,lhv->nhv", rows[:, :512], w_kv_b)
    rope = jnp.broadcast_to(rows[:, None, 512:], (*kv_up.shape[:2], 64))
    return einsum_softmax(q, jnp.concatenate([kv_up[..., :128], rope], axis=-1), kv_up[..., 128:])


def native_decode(implementation: str):
    return jax.jit(lambda *operands: jax_mla.mla_decode(*operands, scale=SCALE, implementation=implementation)[0])


def native_prefill(implementation: str):
    def run(q, k, v):
        cu = (jnp.array([0, len(x)], jnp.int32) for x in (q, k))
        return jax_mla.mla_prefill(q, k, v, *cu, causal=False, scale=SCALE, implementation=implementation)[0]

    return jax.jit(run)


def native_context(implementation: str):
    def run(q, cache, page_table, w_kv_b, kv_lens):
        sizes = {"workspace_tokens": WORKSPACE, "page_size": PAGE}
        plan = jax_mla.plan_context(kv_lens, **sizes, max_chunks=page_table.size * PAGE // WORKSPACE + 1)
        options = {"cu_q_lens": jnp.array([0, len(q)], jnp.int32), "scale": SCALE, "implementation": implementation}
        return jax_mla.mla_context(q, cache, page_table, plan, w_kv_b, **options)[0]

    return jax.jit(run)


def decode_inputs(cell: tuple[int, ...]):
    batch, tokens, heads, q_len = cell
    rng = np.random.default_rng(0)
    pages = batch * tokens // PAGE
    cache = jnp.asarray(rng.standard_normal((pages, PAGE, 576), np.float32), jnp.bfloat16)
    q = jnp.asarray(rng.standard_normal((batch, q_len, heads, 576), np.float32), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(pages).reshape(batch, -1).astype(np.int32))
    return q, cache, table, jnp.full((batch,), tokens, jnp.int32)


def prefill_inputs(cell: tuple[int, ...]):
    queries, tokens, heads = cell
    rng = np.random.default_rng(0)
    shapes = (queries, heads, 192), (tokens, heads, 192), (tokens, heads, 128)
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes)


def context_inputs(cell: tuple[int, ...]):
    queries, tokens, heads = cell
    rng = np.random.default_rng(0)
    shapes = (queries, heads, 192), (tokens // PAGE, PAGE, 576), (512, heads, 256)
    q, cache, w_kv_b = (jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes)
    table = jnp.asarray(rng.permutation(tokens // PAGE)[None].astype(np.int32))
    return q, cache, table, w_kv_b * 512**-0.5, jnp.full((1,), tokens, jnp.int32)


def decode_truth(operands) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(
            reference.mla_decode(*operands, scale=SCALE, compute_dtype=jnp.float64, out_dtype=jnp.float64)[0]
        )


def prefill_truth(operands) -> np.ndarray:
    """Of the first queries alone."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in operands)
    scores = np.einsum("thd,shd->hts", q[:PREFILL_SAMPLE], k, optimize=True) * SCALE
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(axis=-1, keepdims=True), v, optimize=True)


def context_truth(operands) -> np.ndarray:
    """Of the first queries alone, absorbed: nothing is rounded on the way."""
    q, cache, page_table, w_kv_b, _ = (np.asarray(x).astype(np.float64) for x in operands)
    rows, q = cache[page_table[0].astype(int)].reshape(-1, 576), q[:PREFILL_SAMPLE]
    latent = np.einsum("thn,lhn->thl", q[..., :128], w_kv_b[..., :128], optimize=True)
    scores = np.einsum("thd,sd->hts", np.concatenate([latent, q[..., 128:]], axis=-1), rows, optimize=True) * SCALE
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    latent = np.einsum("hts,sl->thl", weights / weights.sum(axis=-1, keepdims=True), rows[:, :512], optimize=True)
    return np.einsum("thl,lhv->thv", latent, w_kv_b[..., 128:], optimize=True)


def relative_error(out: jax.Array, exact: np.ndarray) -> float:
    """On the leading rows that the truth has."""
    return float(np.linalg.norm(np.asarray(out[: len(exact)], np.float64) - exact) / np.linalg.norm(exact))


def measure(functions: dict, operands, rounds: int) -> dict[str, float]:
    """Medians in microseconds of calls in a row, as a decode loop makes them: the first of each row is not counted."""
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            for call in range(CALLS_IN_A_ROW):
                start = time.perf_counter()
                jax.block_until_ready(function(*operands))
                if call > 0:
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(spent) * 1e6 for name, spent in times.items()}


def variants_of(operation: str) -> list[str]:
    rows = [row for row in jax_mla.capabilities("cpu") if row.operation == operation]
    variants = list(dict.fromkeys(row.implementation for row in rows))
    if ARGUMENTS.isa:
        variants = [name for name in variants if name.partition(":")[2] in NARROW[ARGUMENTS.isa]]
    print(f"{operation}: the best variant is {variants[0]}", file=sys.stderr)
    return variants


def decode(run: record.Run) -> None:
    natives = {name: native_decode(name) for name in variants_of("mla_decode")}
    for cell in DECODE_CELLS:
        batch, tokens, heads, q_len = cell
        operands = decode_inputs(cell)
        functions = {"xla gather + einsum": gather_einsum} | natives
        work = {
            "TBps": batch * tokens * 1152 / 1e6,
            "TFLOPs": 2 * batch * tokens * heads * q_len * 1088 / 1e6,
        }
        compare(run, "mla_decode", cell, functions, operands, decode_truth(operands), work)


def prefill(run: record.Run) -> None:
    natives = {name: native_prefill(name) for name in variants_of("mla_prefill")}
    for cell in PREFILL_CELLS:
        queries, tokens, heads = cell
        operands = prefill_inputs(cell)
        functions = {"xla einsum + softmax": einsum_softmax, "xla": native_prefill("xla")} | natives
        work = {"TFLOPs": 2 * queries * tokens * heads * 320 / 1e6}
        compare(run, "mla_prefill", cell, functions, operands, prefill_truth(operands), work)


def context(run: record.Run) -> None:
    for cell in CONTEXT_CELLS:
        queries, tokens, heads = cell
        operands = context_inputs(cell)
        functions = {"xla einsum + softmax": gather_up_project_einsum} | {
            name: native_context(name) for name in ("xla", "cpu")
        }
        work = {"TFLOPs": 2 * tokens * heads * (queries * 320 + 512 * 256) / 1e6}
        compare(run, "mla_context", cell, functions, operands, context_truth(operands), work)


def compare(run, operation: str, cell, functions: dict, operands, exact: np.ndarray, work: dict[str, float]) -> None:
    """Adds a row for each function; work: amounts that become rates. The first function is the baseline of ratios."""
    errors = {name: relative_error(function(*operands), exact) for name, function in functions.items()}
    times = measure(functions, operands, ARGUMENTS.rounds)
    baseline = next(iter(times.values()))
    for name, us in times.items():
        rates = {unit: amount / us for unit, amount in work.items()}
        run.add(operation, list(cell), name, us, **rates, error=errors[name], ratio=baseline / us)


def main() -> None:
    limit = f", limited to {ARGUMENTS.isa}" if ARGUMENTS.isa else ""
    run = record.Run("cpu", f"{record.cpu_name()}, {ARGUMENTS.threads} threads{limit}")
    print(run.heading["device"], file=sys.stderr)
    for operation in ARGUMENTS.op:
        if operation == "mla_context" and ARGUMENTS.isa:
            print("mla_context is left out: its attention takes the machine's best variant", file=sys.stderr)
            continue
        {"mla_decode": decode, "mla_prefill": prefill, "mla_context": context}[operation](run)
    if not ARGUMENTS.dry_run:
        run.save()


if __name__ == "__main__":
    main()
