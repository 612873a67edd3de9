"""Attention over up-projected keys and values of a ragged batch, for prompts.

Method: exact softmax attention, causal to the bottom right, with the log-sum-exp that merging needs.
"""

from __future__ import annotations

import functools

import jax

from jax_mla import _checks, dispatch, reference


def mla_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    *,
    causal: bool,
    scale: float,
    value_offset: int = 0,
    q_scale: jax.Array | float | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    carry: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Ragged attention with keys of 192 and values of 128 columns.

    q [T, H, 192], k [S, H, 192]; v [S, H, 128], or the whole up-projection [S, H, 256] with value_offset=128, read in
    place. All in one dtype: bf16, fp16, fp32, or fp8 with the fp32 scalars q_scale, k_scale, v_scale (None = 1).
    cu_q_lens, cu_kv_lens [B + 1] int32: where each sequence begins and ends. causal: query i of n sees keys up to
    m - n + i of its m. scale: static (192 ** -0.5). carry: (out [T, H, 128], lse [T, H]) in fp32, into which the
    result is merged.

    Returns out [T, H, 128] in q's dtype (bf16 for fp8 queries; fp32 with a carry) and lse [T, H] fp32, natural. A row
    without keys has out 0 and lse -inf. Raises ValueError or NotImplementedError while tracing, as `mla_decode`.
    """
    q, k, v = _checks.array("q", q), _checks.array("k", k), _checks.array("v", v)
    _checks.dtype("q", q, (*_checks.FLOATS, *_checks.FP8))
    _checks.shape("q", q, ("T", "H", _checks.HEAD_DIM))
    tokens, num_heads, _ = q.shape
    _checks.num_heads("q", num_heads)
    _checks.shape("k", k, ("S", num_heads, _checks.HEAD_DIM))
    whole = v.ndim == 3 and v.shape[-1] == 2 * _checks.NOPE
    _checks.shape("v", v, (k.shape[0], num_heads, 2 * _checks.NOPE if whole else _checks.NOPE))
    if value_offset != (_checks.NOPE if whole else 0):
        raise ValueError(
            f"value_offset is {value_offset} for v of {v.shape[-1]} columns; expected 0 for 128, 128 for 256"
        )
    for name, x in (("k", k), ("v", v)):
        _checks.dtype(name, x, (q.dtype.name,))
    cu_q_lens = _checks.int32("cu_q_lens", cu_q_lens, ("B + 1",))
    if cu_q_lens.shape[0] < 1:
        raise ValueError("cu_q_lens is empty; expected [B + 1] elements")
    cu_kv_lens = _checks.int32("cu_kv_lens", cu_kv_lens, cu_q_lens.shape)
    scales = {}
    for name, scale_of in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if scale_of is not None and q.dtype.name not in _checks.FP8:
            raise ValueError(f"{name} is given for {q.dtype.name} inputs; it belongs to fp8")
        scales[name] = _checks.fp32_scalar(name, scale_of)
    if carry is not None:
        out, lse = (_checks.array(f"carry[{i}]", x) for i, x in enumerate(carry))
        _checks.dtype("carry[0] (out)", out, ("float32",))
        _checks.dtype("carry[1] (lse)", lse, ("float32",))
        _checks.shape("carry[0] (out)", out, (tokens, num_heads, _checks.NOPE))
        _checks.shape("carry[1] (lse)", lse, (tokens, num_heads))
        carry = (out, lse)
    kind = q.dtype.name
    dispatch.select("mla_prefill", implementation=implementation, q_dtype=kind, cache_dtype=kind, num_heads=num_heads)
    return _attend(
        q, k, v, cu_q_lens, cu_kv_lens, carry, scales, causal=_checks.flag("causal", causal),
        scale=_checks.number("scale", scale), value_offset=value_offset,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("causal", "scale", "value_offset"))
def _attend(q, k, v, cu_q_lens, cu_kv_lens, carry, scales, *, causal: bool, scale: float, value_offset: int):
    return reference.mla_prefill(
        q, k, v, cu_q_lens, cu_kv_lens, causal=causal, scale=scale, value_offset=value_offset, carry=carry, **scales
    )
