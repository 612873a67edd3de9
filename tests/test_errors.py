"""Bad calls of every public operation: refused while tracing, naming the argument, what it is and what would do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla
from jax_mla.context import gather_context
from jax_mla.dispatch import capabilities, override_capabilities

BF16, F16, F32, FP8, FNUZ = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e4m3fnuz


def zeros(*shape, dtype=BF16):
    return jnp.zeros(shape, dtype)


def ints(*shape):
    return jnp.zeros(shape, jnp.int32)


def tiled_values(tokens):
    return jax_mla.KernelValues(zeros(-(-tokens // 16), 4, 128, 16, dtype=FP8), tokens)


FP8_KEYS = {"q": zeros(5, 4, 192, dtype=FP8), "k": zeros(7, 4, 192, dtype=FP8)}
FP8_PARTS = zeros(7, 4, 256, dtype=FP8), zeros(7, 64, dtype=FP8)

# A good call of each operation; the table below changes arguments of it.
GOOD = {
    "mla_decode": {
        "q": zeros(2, 1, 24, 576),
        "cache": zeros(3, 64, 576),
        "page_table": ints(2, 4),
        "kv_lens": ints(2),
        "scale": 0.1,
    },
    "plan_decode": {"kv_lens": ints(2), "num_heads": 24, "cache": zeros(3, 64, 576)},
    "mla_sparse_decode": {
        "q": zeros(2, 24, 576),
        "cache": zeros(3, 64, 576),
        "indices": ints(2, 8),
        "scale": 0.1,
    },
    "update_cache": {
        "cache": zeros(3, 64, 576),
        "kv_c": zeros(5, 512),
        "k_pe": zeros(5, 64),
        "slot_mapping": ints(5),
    },
    "allocate_cache": {"num_pages": 3},
    "copy_pages": {"cache": zeros(3, 64, 576), "source_pages": ints(2), "target_pages": ints(2)},
    "slots": {"page_table": ints(2, 4), "positions": ints(2), "page_size": 64},
    "mla_prefill": {
        "q": zeros(5, 4, 192),
        "k": zeros(7, 4, 192),
        "v": zeros(7, 4, 128),
        "cu_q_lens": ints(3),
        "cu_kv_lens": ints(3),
        "causal": True,
        "scale": 0.1,
    },
    "plan_context": {"context_lens": [5, 6], "workspace_tokens": 128, "page_size": 64},
    "mla_context": {
        "q": zeros(5, 4, 192),
        "cache": zeros(3, 64, 576),
        "page_table": ints(2, 4),
        "plan": jax_mla.plan_context([5, 6], workspace_tokens=128, page_size=64),
        "w_kv_b": zeros(512, 4, 256),
        "cu_q_lens": ints(3),
        "scale": 0.1,
    },
    "merge_states": {
        "out_a": zeros(5, 4, 128),
        "lse_a": zeros(5, 4, dtype=F32),
        "out_b": zeros(5, 4, 128),
        "lse_b": zeros(5, 4, dtype=F32),
    },
    "apply_sink": {"out": zeros(5, 4, 128), "lse": zeros(5, 4, dtype=F32), "sink": zeros(4, dtype=F32)},
    "pack_kv": {"kv_up": zeros(5, 4, 256), "k_pe": zeros(5, 64)},
    "pack_kv_fp8": {"kv_up": zeros(5, 4, 256), "k_pe": zeros(5, 64)},
    "capabilities": {},
    "explain": {},
    "validate": {"cache": zeros(3, 64, 576)},
}

RAGGED = {"q": zeros(6, 24, 576), "cu_q_lens": ints(3), "max_q_len": 3}
STACKED = {"cache": zeros(2, 3, 64, 576), "layer": 0}
FP8_CACHE = {"cache": zeros(3, 64, 576, dtype=FP8)}
NO, LATER = ValueError, NotImplementedError

BAD = [
    # queries
    ("mla_decode", {"q": zeros(2, 24, 576)}, NO, r"q has shape \[2, 24, 576\]; expected \[B, Q, H, 576\]"),
    ("mla_decode", {"q": zeros(2, 1, 24, 512)}, NO, r"q has shape \[2, 1, 24, 512\]; expected"),
    ("mla_decode", {"q": zeros(3, 1, 24, 576)}, NO, "q has 3 sequences and page_table 2"),
    ("mla_decode", {"q": zeros(2, 1, 129, 576)}, LATER, "q has 129 heads; jax_mla takes 1 to 128"),
    ("mla_decode", {"q": zeros(2, 1, 0, 576)}, LATER, "q has 0 heads"),
    ("mla_decode", {"q": [[1.0]]}, NO, "q is a list; expected an array"),
    ("mla_decode", {"q": None}, NO, "q is a NoneType; expected an array"),
    ("mla_decode", {"q": zeros(2, 1, 24, 576, dtype=jnp.int32)}, NO, "q has dtype int32; expected bfloat16"),
    ("mla_decode", {"q": (zeros(2, 1, 24, 512),) * 3}, NO, "q is a tuple of 3"),
    ("mla_decode", {"q": (zeros(2, 1, 24, 512), zeros(2, 1, 12, 64))}, NO, "one dtype and one leading shape"),
    ("mla_decode", {"q": (zeros(2, 1, 24, 512), zeros(2, 1, 24, 64, dtype=F16))}, NO, "one dtype and one leading"),
    ("mla_decode", {"q": (zeros(2, 1, 24, 64), zeros(2, 1, 24, 512))}, NO, "latent"),
    # dtypes of q and cache together
    ("mla_decode", {"q": zeros(2, 1, 24, 576, dtype=F16)}, NO, "q is float16 over a bfloat16 cache"),
    ("mla_decode", {"q": zeros(2, 1, 24, 576, dtype=F32)} | FP8_CACHE, NO, "q is float32 over a float8_e4m3fn cache"),
    ("mla_decode", {"q": zeros(2, 1, 24, 576, dtype=FNUZ)} | FP8_CACHE, NO, "same fp8 format"),
    ("mla_decode", {"q": zeros(2, 1, 24, 576, dtype=FP8)}, NO, "q is float8_e4m3fn over a bfloat16 cache"),
    ("mla_decode", {"cache": zeros(3, 64, 576, dtype=jnp.float8_e5m2)}, NO, "cache has dtype float8_e5m2"),
    # cache, layer, scales
    ("mla_decode", {"cache": zeros(3, 64, 512)}, NO, r"cache has shape \[3, 64, 512\] in bfloat16; expected"),
    ("mla_decode", {"cache": zeros(3, 64, 576, dtype=jnp.uint8)}, NO, r"expected \[pages, page size, 656\]"),
    ("mla_decode", {"cache": zeros(3, 64, 656)}, NO, "cache has shape"),
    ("mla_decode", {"cache": zeros(192, 576)}, NO, "cache has shape"),
    ("mla_decode", {"cache": zeros(3, 0, 576)}, NO, "page size of at least 1"),
    ("mla_decode", {"cache": zeros(2, 3, 64, 576)}, NO, "layer is needed for a stacked cache"),
    ("mla_decode", {"layer": 0}, NO, "layer is given for an unstacked cache"),
    ("mla_decode", STACKED | {"layer": 0.5}, NO, "layer is a float"),
    ("mla_decode", STACKED | {"layer": ints(1)}, NO, "layer has shape"),
    ("mla_decode", STACKED | {"layer": 2**31}, NO, "layer is 2147483648"),
    ("mla_decode", STACKED | {"layer": jnp.float32(0)}, NO, "layer has dtype float32"),
    ("mla_decode", {"k_scale": jnp.float32(1)}, NO, "k_scale is given for a bfloat16 cache"),
    ("mla_decode", {"cache": zeros(3, 64, 656, dtype=jnp.uint8), "k_scale": 1.0}, NO, "for a fp8_ds_mla cache"),
    ("mla_decode", FP8_CACHE | {"k_scale": zeros(3, dtype=F32)}, NO, "k_scale has shape"),
    ("mla_decode", FP8_CACHE | {"k_scale": zeros(dtype=F16)}, NO, "k_scale has dtype float16"),
    ("mla_decode", {"q_scale": jnp.float32(1)}, NO, "q_scale is given for bfloat16 queries"),
    # tables and lengths
    ("mla_decode", {"page_table": ints(3, 4)}, NO, r"kv_lens has shape \[2\]; expected \[3\]"),
    ("mla_decode", {"page_table": ints(2)}, NO, r"page_table has shape \[2\]; expected \[B, max_pages\]"),
    ("mla_decode", {"page_table": zeros(2, 4)}, NO, "page_table has dtype bfloat16; expected int32"),
    ("mla_decode", {"kv_lens": ints(3)}, NO, r"kv_lens has shape \[3\]; expected \[2\]"),
    ("mla_decode", {"kv_lens": zeros(2, dtype=F32)}, NO, "kv_lens has dtype float32"),
    ("mla_decode", {"kv_lens": [1, 2]}, NO, "kv_lens is a list"),
    # ragged queries
    ("mla_decode", {"cu_q_lens": ints(3)}, NO, "q has shape"),
    ("mla_decode", RAGGED | {"max_q_len": None}, NO, "cu_q_lens is given without max_q_len"),
    ("mla_decode", RAGGED | {"max_q_len": 0}, NO, "max_q_len is 0; expected a static positive integer"),
    ("mla_decode", RAGGED | {"cu_q_lens": ints(2)}, NO, r"cu_q_lens has shape \[2\]; expected \[3\]"),
    ("mla_decode", {"max_q_len": 2}, NO, "max_q_len is 2, and q has 1"),
    # static values
    ("mla_decode", {"scale": jnp.float32(1)}, NO, "scale is a .*; expected a static Python number"),
    ("mla_decode", {"scale": float("nan")}, NO, "scale is nan; expected a finite number"),
    ("mla_decode", {"scale": "1"}, NO, "scale is a str"),
    ("mla_decode", {"causal": None}, NO, "causal is None; expected a static True or False"),
    ("mla_decode", {"batch_invariant": 1}, NO, "batch_invariant is 1"),
    ("mla_decode", {"implementation": "tpu"}, NO, "implementation is 'tpu'; expected None, cpu, cuda, rocm, xla"),
    ("mla_decode", {"implementation": "cpu:sse"}, LATER, "no variant 'sse' for mla_decode on this machine; there are"),
    ("mla_decode", {"implementation": "rocm"}, LATER, "implementation='rocm' cannot serve this call of mla_decode"),
    ("mla_decode", {"plan": (1, 2)}, NO, "plan is a tuple; expected what plan_decode returned"),
    # plan_decode
    ("plan_decode", {"kv_lens": ints(2, 1)}, NO, "kv_lens has shape"),
    ("plan_decode", {"num_heads": 129}, LATER, "num_heads has 129 heads"),
    ("plan_decode", {"num_heads": 0}, NO, "num_heads is 0"),
    ("plan_decode", {"cache": "bfloat16"}, NO, "cache is a str; expected an array or a jax.ShapeDtypeStruct"),
    ("plan_decode", {"cache": zeros(3, 64, 512)}, NO, r"cache has shape \[3, 64, 512\] in bfloat16; expected"),
    ("plan_decode", {"q_len": 0}, NO, "q_len is 0"),
    ("plan_decode", {"max_q_len": 3}, NO, "max_q_len is given without cu_q_lens"),
    ("plan_decode", {"cu_q_lens": ints(3)}, NO, "expected max_q_len beside it"),
    ("plan_decode", {"cu_q_lens": ints(3), "max_q_len": 3, "q_len": 1}, NO, "no q_len"),
    ("plan_decode", {"cu_q_lens": ints(4), "max_q_len": 3}, NO, "cu_q_lens has shape"),
    # sparse
    ("mla_sparse_decode", {"indices": ints(3, 8)}, NO, r"indices has shape \[3, 8\]; expected \[2, K\]"),
    ("mla_sparse_decode", {"indices": zeros(2, 8, dtype=F32)}, NO, "indices has dtype float32"),
    ("mla_sparse_decode", {"topk_lens": ints(3)}, NO, "topk_lens has shape"),
    ("mla_sparse_decode", {"sink": zeros(12, dtype=F32)}, NO, r"sink has shape \[12\]; expected \[24\]"),
    ("mla_sparse_decode", {"sink": zeros(24)}, NO, "sink has dtype bfloat16"),
    ("mla_sparse_decode", {"q": zeros(2, 129, 576)}, LATER, "129 heads"),
    ("mla_sparse_decode", {"cache": zeros(3, 64, 512)}, NO, "cache has shape"),
    ("mla_sparse_decode", {"k_scale": 1.0}, NO, "k_scale is given for a bfloat16 cache"),
    ("mla_sparse_decode", {"implementation": "rocm"}, LATER, "cannot serve this call of mla_sparse_decode"),
    # cache
    ("update_cache", {"kv_c": zeros(5, 576)}, NO, r"kv_c has shape \[5, 576\]; expected \[T, 512\]"),
    ("update_cache", {"k_pe": zeros(4, 64)}, NO, r"k_pe has shape \[4, 64\]; expected \[5, 64\]"),
    ("update_cache", {"k_pe": zeros(5, 64, dtype=F32)}, NO, "k_pe has dtype float32; expected bfloat16"),
    ("update_cache", {"kv_c": zeros(5, 512, dtype=F32)}, NO, "kv_c has dtype float32; expected bfloat16"),
    ("update_cache", {"slot_mapping": ints(4)}, NO, "slot_mapping has shape"),
    ("update_cache", {"slot_mapping": zeros(5, dtype=F32)}, NO, "slot_mapping has dtype float32"),
    ("update_cache", {"cache": zeros(2, 3, 64, 576)}, NO, "layer is needed"),
    ("update_cache", {"k_scale": jnp.float32(1)}, NO, "k_scale is given for a bfloat16 cache"),
    ("update_cache", {"saturate": True}, NO, "saturate is given for a bfloat16 cache"),
    ("update_cache", {"power_of_two_scales": True}, NO, "power_of_two_scales is given for a bfloat16 cache"),
    ("update_cache", {"implementation": "rocm"}, LATER, "cannot serve this call of update_cache"),
    ("allocate_cache", {"num_pages": 0}, NO, "num_pages is 0; expected a static positive integer"),
    ("allocate_cache", {"page_size": -1}, NO, "page_size is -1"),
    ("allocate_cache", {"layers": 0}, NO, "layers is 0"),
    ("allocate_cache", {"dtype": jnp.int8}, NO, "dtype is int8; expected bfloat16"),
    ("copy_pages", {"target_pages": ints(3)}, NO, "target_pages has shape"),
    ("copy_pages", {"source_pages": zeros(2)}, NO, "source_pages has dtype"),
    ("copy_pages", {"cache": zeros(3, 576)}, NO, "cache has shape"),
    ("slots", {"positions": ints(3)}, NO, "positions has shape"),
    ("slots", {"page_size": 0}, NO, "page_size is 0"),
    ("slots", {"request": ints(3)}, NO, "positions has shape"),
    # prefill and context
    ("mla_prefill", {"q": zeros(5, 4, 128)}, NO, r"q has shape \[5, 4, 128\]; expected \[T, H, 192\]"),
    ("mla_prefill", {"k": zeros(7, 5, 192)}, NO, "k has shape"),
    (
        "mla_prefill",
        {"k": [zeros(7, 4, 256)]},
        NO,
        r"k is a tuple of 1; expected one array, or the pair \(nope, k_pe\)",
    ),
    ("mla_prefill", {"k": (zeros(7, 4, 256),) * 3}, NO, "k is a tuple of 3"),
    ("mla_prefill", {"k": (None, zeros(7, 64))}, NO, r"k\[0\] \(nope\) is a NoneType; expected an array"),
    ("mla_prefill", {"k": (zeros(7, 4, 256), None)}, NO, r"k\[1\] \(k_pe\) is a NoneType"),
    (
        "mla_prefill",
        {"k": (zeros(7, 4, 192), zeros(7, 64))},
        NO,
        r"k\[0\] \(nope\) has shape \[7, 4, 192\]; expected \[S",
    ),
    ("mla_prefill", {"k": (zeros(7, 5, 256), zeros(7, 64))}, NO, r"k\[0\] \(nope\) has shape \[7, 5, 256\]"),
    ("mla_prefill", {"k": (zeros(7, 512), zeros(7, 64))}, NO, r"k\[0\] \(nope\) has shape \[7, 512\]"),
    ("mla_prefill", {"k": (zeros(6, 4, 256), zeros(6, 64))}, NO, r"v has shape \[7, 4, 128\]; expected \[6, 4, 128\]"),
    (
        "mla_prefill",
        {"k": (zeros(7, 4, 256), zeros(6, 64))},
        NO,
        r"k\[1\] \(k_pe\) has shape \[6, 64\]; expected \[7, 64",
    ),
    (
        "mla_prefill",
        {"k": (zeros(7, 4, 256), zeros(7, 512))},
        NO,
        r"k\[1\] \(k_pe\) has shape .* latent rows \[7, 576\]",
    ),
    ("mla_prefill", {"k": (zeros(7, 4, 128), zeros(7, 4, 64))}, NO, r"k\[1\] \(k_pe\) has shape \[7, 4, 64\]"),
    ("mla_prefill", {"k": (zeros(7, 4, 128, dtype=F16), zeros(7, 64))}, NO, r"k\[0\] \(nope\) has dtype float16"),
    ("mla_prefill", {"k": (zeros(7, 4, 128), zeros(7, 64, dtype=F32))}, NO, r"k\[1\] \(k_pe\) has dtype float32"),
    (
        "mla_prefill",
        FP8_KEYS | {"k": FP8_PARTS},
        NO,
        "k is a pair beside q in float8_e4m3fn; expected one array in fp8",
    ),
    ("mla_prefill", {"k": (zeros(7, 4, 256), zeros(7, 64)), "k_scale": 1.0}, NO, "k_scale is given for bfloat16"),
    ("mla_prefill", {"v": zeros(7, 4, 192)}, NO, "v has shape"),
    ("mla_prefill", {"v": zeros(6, 4, 128)}, NO, "v has shape"),
    ("mla_prefill", {"v": zeros(7, 4, 256)}, NO, "value_offset is 0 for v of 256 columns"),
    ("mla_prefill", {"value_offset": 128}, NO, "value_offset is 128 for v of 128 columns"),
    ("mla_prefill", {"k": zeros(7, 4, 192, dtype=F16)}, NO, "k has dtype float16; expected bfloat16"),
    ("mla_prefill", {"cu_q_lens": ints(0)}, NO, r"cu_q_lens is empty; expected \[B \+ 1\] elements"),
    ("mla_prefill", {"cu_kv_lens": ints(4)}, NO, "cu_kv_lens has shape"),
    ("mla_prefill", {"q_scale": 1.0}, NO, "q_scale is given for bfloat16 inputs"),
    ("mla_prefill", {"q": zeros(5, 4, 192, dtype=FP8)}, NO, "k has dtype bfloat16; expected float8_e4m3fn"),
    ("mla_prefill", {**FP8_KEYS, "v_scale": 1.0}, NO, "v_scale is given for bfloat16 inputs"),
    ("mla_prefill", {"v": tiled_values(7)}, NO, "v is KernelValues beside q in bfloat16; expected q and k in float8"),
    ("mla_prefill", {**FP8_KEYS, "v": tiled_values(8)}, NO, "v has 8 tokens; expected k's 7"),
    ("mla_prefill", {**FP8_KEYS, "v": tiled_values(17)}, NO, r"v.tiles has shape \[2, 4, 128, 16\]"),
    (
        "mla_prefill",
        {**FP8_KEYS, "v": tiled_values(7), "value_offset": 128},
        NO,
        "value_offset is 128 for KernelValues",
    ),
    ("mla_prefill", {**FP8_KEYS, "v": zeros(7, 4, 128, dtype=F16)}, NO, "v has dtype float16; expected float8_e4m3fn"),
    ("mla_prefill", {"carry": (zeros(5, 4, 128), zeros(5, 4, dtype=F32))}, NO, "carry.* has dtype bfloat16"),
    ("mla_prefill", {"carry": (zeros(5, 4, 64, dtype=F32), zeros(5, 4, dtype=F32))}, NO, "carry.* has shape"),
    ("mla_prefill", {"q": zeros(5, 129, 192)}, LATER, "129 heads"),
    ("mla_prefill", {"causal": 2}, NO, "causal is 2"),
    ("mla_prefill", {"implementation": "rocm"}, LATER, "cannot serve this call of mla_prefill"),
    ("plan_context", {"workspace_tokens": 63}, NO, "workspace_tokens is 63"),
    ("plan_context", {"page_size": 0}, NO, "page_size is 0"),
    ("plan_context", {"max_chunks": 0}, NO, "max_chunks is 0"),
    ("plan_context", {"context_lens": [500], "max_chunks": 2}, NO, "max_chunks is 2; context_lens take 4 chunks"),
    ("plan_context", {"context_lens": [0.5]}, NO, "context_lens is float64"),
    ("plan_context", {"context_lens": [[1]]}, NO, "context_lens is int"),
    ("mla_context", {"w_kv_b": zeros(512, 5, 256)}, NO, r"w_kv_b has shape \[512, 5, 256\]; expected \[512, 4, 256\]"),
    ("mla_context", {"page_table": ints(3, 4), "cu_q_lens": ints(4)}, NO, "plan was made for 2 requests"),
    ("mla_context", {"cache": zeros(3, 16, 576)}, NO, "pages of 64 tokens"),
    ("mla_context", {"carry": (zeros(5, 4, 128), zeros(5, 4, dtype=F32))}, NO, r"carry \(out\) has dtype bfloat16"),
    (
        "mla_context",
        {"carry": (zeros(5, 4, 128, dtype=F32), zeros(5, 4))},
        NO,
        r"carry \(lse\) has dtype bfloat16; expected float32",
    ),
    ("mla_context", {"w_kv_b": zeros(512, 4, 256, dtype=FP8)}, NO, "w_kv_b has dtype float8_e4m3fn; expected bfloat16"),
    ("mla_context", {"w_kv_b": lambda latents: latents}, NO, r"w_kv_b\(latents\) has shape \[128, 512\]"),
    (
        "mla_context",
        {"w_kv_b": lambda latents: zeros(128, 4, 256, dtype=FP8)},
        NO,
        r"w_kv_b\(latents\) has dtype float8_e4m3fn; expected bfloat16",
    ),
    ("mla_context", {"k_scale": 1.0}, NO, "k_scale is given for a bfloat16 cache"),
    ("mla_context", {"q": zeros(5, 129, 192)}, LATER, "q has 129 heads; jax_mla takes 1 to 128"),
    ("mla_context", {"plan": None}, NO, "plan is a NoneType; expected what plan_context returned"),
    ("mla_context", {"q": zeros(5, 4, 192, dtype=FP8)}, NO, "q has dtype float8_e4m3fn"),
    ("mla_context", {"implementation": "rocm"}, LATER, "cannot serve this call of mla_context"),
    # merge and pack
    ("merge_states", {"out_a": zeros(5), "out_b": zeros(5)}, NO, r"out_a has shape \[5\]; expected \[..., rows, width"),
    ("merge_states", {"lse_a": zeros(5, 3, dtype=F32)}, NO, r"lse_a has shape \[5, 3\]; expected \[5, 4\]"),
    ("merge_states", {"lse_b": zeros(5, 4)}, NO, "lse_b has dtype bfloat16; expected float32"),
    ("merge_states", {"out_b": zeros(5, 4, 64)}, NO, "out_b has shape"),
    ("merge_states", {"out_b": zeros(5, 4, 128, dtype=F32)}, NO, "out_b has dtype float32; expected bfloat16"),
    ("merge_states", {"implementation": "rocm"}, LATER, "cannot serve this call of merge_states"),
    ("apply_sink", {"out": zeros(5)}, NO, r"out has shape \[5\]; expected \[..., H, width\]"),
    ("apply_sink", {"sink": zeros(5, dtype=F32)}, NO, "sink has shape"),
    ("apply_sink", {"lse": zeros(5, dtype=F32)}, NO, "lse has shape"),
    ("pack_kv", {"kv_up": zeros(5, 4, 192)}, NO, "kv_up has shape"),
    ("pack_kv", {"k_pe": zeros(5, 65)}, NO, r"k_pe has shape \[5, 65\]; expected \[5, 64\], or"),
    ("pack_kv", {"k_pe": zeros(5, 64, dtype=F32)}, NO, "k_pe has dtype float32; expected bfloat16"),
    ("pack_kv", {"k_scale": 1.0}, NO, "k_scale is given for a bfloat16 k_pe"),
    ("pack_kv_fp8", {"values": "tiles"}, NO, "values is 'tiles'; expected 'plain' or 'kernel'"),
    ("pack_kv_fp8", {"values": "kernel", "dtype": FNUZ}, NO, "values is 'kernel' for dtype float8_e4m3fnuz"),
    ("pack_kv_fp8", {"dtype": jnp.float8_e5m2}, NO, "dtype is float8_e5m2; expected float8_e4m3fn"),
    ("pack_kv_fp8", {"packed_k_scale": zeros(4, dtype=F32)}, NO, "packed_k_scale has shape"),
    ("pack_kv_fp8", {"implementation": "rocm"}, LATER, "cannot serve this call of pack_kv_fp8"),
    # what runs where, and eager checks
    ("capabilities", {"target": "tpu"}, NO, "target is 'tpu'; expected one of cpu, cuda, rocm"),
    ("explain", {"implementation": "metal"}, NO, "implementation is 'metal'"),
    ("explain", {"target": "v100"}, NO, "target is 'v100'"),
    ("validate", {"page_table": ints(2, 4) + 3, "kv_lens": ints(2) + 1}, NO, r"page_table\[0, 0\] is 3; cache has 3"),
    ("validate", {"page_table": ints(2, 4) - 2}, NO, r"page_table\[0, 0\] is -2"),
    ("validate", {"kv_lens": jnp.array([0, -1])}, NO, r"kv_lens\[1\] is -1; expected 0 or more"),
    ("validate", {"page_table": ints(2, 4), "kv_lens": jnp.array([256, 257])}, NO, r"kv_lens\[1\] is 257; .* 256"),
    ("validate", {"page_table": ints(3, 4), "kv_lens": ints(2)}, NO, "page_table has 3 rows and kv_lens 2"),
    ("validate", {"slot_mapping": jnp.array([0, 192])}, NO, r"slot_mapping\[1\] is 192; cache has 192 slots"),
    ("validate", {"slot_mapping": jnp.array([5, -1, -1, 5])}, NO, "slot 5 more than once"),
    ("validate", {"indices": jnp.array([[0, -1], [-2, 0]])}, NO, r"indices\[1, 0\] is -2"),
    ("validate", {"cu_q_lens": jnp.array([1, 2])}, NO, "cu_q_lens starts at 1; expected 0"),
    ("validate", {"cu_q_lens": jnp.array([0, 3, 2])}, NO, "expected it not to fall"),
    ("validate", {"cu_q_lens": jnp.array([0, 3]), "max_q_len": 2}, NO, "max_q_len is 2"),
    ("validate", {"cu_q_lens": jnp.array([0, 3]), "num_tokens": 2}, NO, "ends at 3; q has 2 tokens"),
    ("validate", {"cu_q_lens": jnp.array([0, 3]), "kv_lens": jnp.array([2])}, NO, "more query tokens"),
    ("validate", {"cache": zeros(2, 3, 64, 576), "layer": 2}, NO, "layer is 2; cache has 2 layers"),
]


@pytest.mark.parametrize("name", GOOD)
def test_the_good_calls_are_good(name):
    getattr(jax_mla, name)(**GOOD[name])


@pytest.mark.parametrize("name, changes, error, message", BAD)
def test_bad_calls(name, changes, error, message):
    with pytest.raises(error, match=message):
        getattr(jax_mla, name)(**(GOOD[name] | changes))


@pytest.mark.parametrize(
    "name", ["mla_decode", "update_cache", "merge_states", "mla_prefill", "mla_context", "pack_kv"]
)
def test_the_same_while_tracing(name):
    """The checks need shapes alone, so that an error comes while tracing, not from a handler."""
    arrays = {k: v for k, v in GOOD[name].items() if isinstance(v, jax.Array)}
    static = {k: v for k, v in GOOD[name].items() if k not in arrays}
    first = next(iter(arrays))
    wrong = arrays | {first: jax.ShapeDtypeStruct((7, 7), BF16)}
    with pytest.raises(ValueError, match="has shape"):
        jax.eval_shape(lambda **kw: getattr(jax_mla, name)(**kw, **static), **wrong)


def test_gathered_context_is_in_a_float():
    chunk = ints(2), ints(3)
    with pytest.raises(ValueError, match="dtype is float8_e4m3fn; expected bfloat16 or float16 or float32"):
        gather_context(zeros(3, 64, 576), ints(2, 4), *chunk, workspace_tokens=128, dtype=FP8)


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_vmap_over_the_scales_of_prefill(name):
    """Refused wherever a kernel takes fp8; that is the CPU's here, by a changed table, before anything is compiled."""
    prefill = GOOD["mla_prefill"] | {x: GOOD["mla_prefill"][x].astype(FP8) for x in ("q", "k", "v")}
    rows = [row for row in capabilities("cpu") if row.operation == "mla_prefill"]
    rows = [dataclasses.replace(row, q_dtype=FP8.dtype.name, cache_dtype=FP8.dtype.name) for row in rows]
    with (
        override_capabilities(rows),
        pytest.raises(NotImplementedError, match="vmap of mla_prefill over q_scale, k_scale or v_scale: they are one"),
    ):
        jax.vmap(lambda s: jax_mla.mla_prefill(**prefill, **{name: s}, implementation="cpu"))(zeros(3, dtype=F32))


def test_validate_accepts_what_is_right():
    jax_mla.validate(
        zeros(2, 3, 64, 576),
        layer=1,
        page_table=jnp.array([[0, 2, -1], [-1, -1, -1]]),
        kv_lens=jnp.array([128, 0]),
        cu_q_lens=jnp.array([0, 2, 2]),
        max_q_len=2,
        num_tokens=4,
        slot_mapping=jnp.array([3, -1, -1, 191]),
        indices=jnp.array([[0, 0, -1]]),
    )


def test_validate_is_eager():
    with pytest.raises(ValueError, match="call it eagerly"):
        jax.jit(lambda x: jax_mla.validate(zeros(3, 64, 576), kv_lens=x))(ints(2))


def test_traced_context_lengths_need_a_bound():
    with pytest.raises(ValueError, match="context_lens is traced; expected max_chunks"):
        jax.jit(lambda x: jax_mla.plan_context(x, workspace_tokens=64, page_size=64).starts)(ints(2))


def test_numpy_scalars_and_python_numbers_serve_as_static_values():
    """0.1, np.float32(0.1) and np.float64(0.1) one after the other: attributes are typed in one place."""
    for scale in (0.5, np.float32(0.5), np.float64(0.5), 1, np.int64(1)):
        jax_mla.mla_decode(**(GOOD["mla_decode"] | {"scale": scale}))
    for causal in (True, np.bool_(True), np.False_):
        jax_mla.mla_decode(**(GOOD["mla_decode"] | {"causal": causal}))
