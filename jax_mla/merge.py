"""Merging attention over disjoint sets of keys by their log-sum-exps, and the attention sink.

Method: the online softmax (Milakov and Gimelshein, arXiv:1805.02867), as FlashAttention and its split forms use it.
"""

from __future__ import annotations

import functools

import jax

from jax_mla import _checks, _ffi, dispatch, reference
from jax_mla.dispatch import Choice


def _native(choice: Choice, out_a, lse_a, out_b, lse_b):
    del choice
    rows = (lse_a.size, out_a.shape[-1])
    out, lse = _ffi.merge_states(out_a.reshape(rows), lse_a.reshape(-1), out_b.reshape(rows), lse_b.reshape(-1))
    return out.reshape(out_a.shape), lse.reshape(lse_a.shape)


@functools.partial(jax.jit, static_argnames=("choices", "named"))
def _merge(out_a, lse_a, out_b, lse_b, *, choices: tuple[Choice, ...], named: bool):
    # Rows are independent, so a mapped axis is only one more of them.
    @jax.custom_batching.custom_vmap
    def merge(*operands):
        return dispatch.run(choices, named, _native, reference.merge_states, *operands)

    @merge.def_vmap
    def fold(axis_size, in_batched, *operands):
        each = (dispatch.spread(x, axis_size, b) for x, b in zip(operands, in_batched, strict=True))
        return merge(*each), (True, True)

    differentiable = jax.custom_jvp(merge)
    differentiable.defjvp(functools.partial(jax.jvp, reference.merge_states))
    return differentiable(out_a, lse_a, out_b, lse_b)


def merge_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention over two disjoint sets of keys, from the attention over each.

    out_a, out_b [..., V] in one dtype (bf16, fp16 or fp32); lse_a, lse_b [...] fp32, natural logarithms. The weights
    are exp(lse_a) and exp(lse_b) over their sum; computed in fp32. A side whose lse is -inf, +inf or NaN is empty,
    whatever its out holds; two empty sides give out 0 and lse -inf.

    Returns out (out_a's shape and dtype) and lse fp32. Can be differentiated; the derivative runs through XLA. Raises
    ValueError for wrong shapes or dtypes, NotImplementedError where a named implementation cannot serve.
    """
    out_a, out_b = _checks.array("out_a", out_a), _checks.array("out_b", out_b)
    lse_a, lse_b = _checks.array("lse_a", lse_a), _checks.array("lse_b", lse_b)
    _checks.dtype("out_a", out_a, _checks.FLOATS)
    _checks.dtype("out_b", out_b, (out_a.dtype.name,))
    if out_a.ndim < 2:
        raise ValueError(f"out_a has shape {list(out_a.shape)}; expected [..., rows, width]")
    _checks.shape("out_b", out_b, out_a.shape)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _checks.dtype(name, lse, ("float32",))
        _checks.shape(name, lse, out_a.shape[:-1])
    if out_a.size == 0:
        return reference.merge_states(out_a, lse_a, out_b, lse_b)
    kind = out_a.dtype.name
    choices = dispatch.select("merge_states", implementation=implementation, q_dtype=kind, cache_dtype=kind)
    return _merge(out_a, lse_a, out_b, lse_b, choices=choices, named=implementation is not None)


def apply_sink(out: jax.Array, lse: jax.Array, sink: jax.Array) -> jax.Array:
    """out with a sink logit in the denominator: out * exp(lse) / (exp(lse) + exp(sink)). Apply it after merging.

    out [..., H, V], lse [..., H] fp32 natural, sink [H] fp32, a natural-log logit. lse is not changed by a sink, and
    an empty row stays empty. Returns out's shape and dtype. Raises ValueError for wrong shapes or dtypes.
    """
    out, lse, sink = _checks.array("out", out), _checks.array("lse", lse), _checks.array("sink", sink)
    _checks.dtype("out", out, _checks.FLOATS)
    _checks.dtype("lse", lse, ("float32",))
    _checks.dtype("sink", sink, ("float32",))
    if out.ndim < 2:
        raise ValueError(f"out has shape {list(out.shape)}; expected [..., H, width]")
    _checks.shape("lse", lse, out.shape[:-1])
    _checks.shape("sink", sink, (out.shape[-2],))
    return reference.apply_sink(out, lse, sink)
