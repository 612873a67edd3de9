"""The prefill kernels as rows of the tables: a tile is a block of keys and values that all rows of a workgroup see."""

from .calls import load, numbers, zeros
from .launch import Execution
from .memory import Memory
from .params import DType, struct
from .tables import Entry


def prefill(architecture: str, name: str, dtype: DType) -> Entry:
    """mla_prefill in 16 bits: a full tile of queries of one head, not causal; a tile of the table is 64 keys."""
    program = load(f"prefill/gfx9/{name}.hip", architecture)
    queries = {"gfx942": 256, "gfx950": 128}[architecture]
    kernel, threads = f"mla_prefill_{name}", 2 * queries

    def run(tiles: int) -> Execution:
        memory, p, keys = Memory(), struct("PrefillParams")(), 64 * tiles
        p.q, p.k = zeros(memory, queries, 192, 2), zeros(memory, keys, 192, 2)
        p.v, p.v_stride = zeros(memory, keys, 128, 2), 128
        p.cu_q_lens, p.cu_kv_lens = numbers(memory, 0, queries), numbers(memory, 0, keys)
        p.out, p.lse = zeros(memory, queries, 128, 2), zeros(memory, queries, 4)
        p.stored, p.tokens, p.batch, p.heads, p.scale = keys, queries, 1, 1, 0.07
        p.dtype = p.v_dtype = p.out_dtype = dtype
        return program.launch(kernel, (1, 1, 1), (threads, 1, 1), bytes(p), memory=memory)

    return Entry(program, kernel, f"64 keys, {queries} queries", 64 * (192 + 128) * 2, threads, run)


def prefill_fp8() -> Entry:
    """mla_prefill in e4m3fn on gfx950, behind its plan: 256 queries of one head; a tile of the table is 128 keys."""
    plan = load("prefill/gfx950/plan.hip", "gfx950")
    program = load("prefill/gfx950/attention.hip", "gfx950")

    def run(tiles: int) -> Execution:
        memory, p, keys = Memory(), struct("PrefillParams")(), 128 * tiles
        p.q, p.k, p.v = (zeros(memory, rows, width) for rows, width in ((256, 192), (keys, 192), (keys, 128)))
        p.v_stride = 128
        p.cu_q_lens, p.cu_kv_lens = numbers(memory, 0, 256), numbers(memory, 0, keys)
        p.out, p.lse = zeros(memory, 256, 128, 2), zeros(memory, 256, 4)
        p.stored, p.tokens, p.batch, p.heads, p.scale = keys, 256, 1, 1, 0.07
        p.dtype = p.v_dtype = DType.E4M3FN
        p.out_dtype = DType.BF16
        p.scratch_bytes = 1 << 16
        p.scratch = zeros(memory, p.scratch_bytes)
        plan.launch("mla_prefill_fp8_plan", (1, 1, 1), (64, 1, 1), bytes(p), memory=memory)
        return program.launch("mla_prefill_fp8", (1, 1, 1), (512, 1, 1), bytes(p), memory=memory)

    return Entry(program, "mla_prefill_fp8", "128 keys, 256 queries", 128 * (192 + 128), 512, run)


def prefill_entries() -> list[Entry]:
    entries = []
    for architecture in ("gfx942", "gfx950"):
        entries += [prefill(architecture, "bf16", DType.BF16), prefill(architecture, "f16", DType.F16)]
    return [*entries, prefill_fp8()]
