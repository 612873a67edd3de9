"""Operands reach the kernels where they lie: nothing of their size is made beside a kernel's results."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from helpers import native_only, served

from jax_mla import _checks, mla_decode, mla_prefill, pack_kv

OPERATION = "mla_prefill"
pytestmark = [native_only, pytest.mark.leave_out("xla*", "rocm*")]  # AMD kernels take some head counts padded
TOKENS, HEADS, PAGES, PAGE, BATCH = 2048, 24, 64, 64, 4
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "custom-call")
LENS = jax.ShapeDtypeStruct((BATCH + 1,), jnp.int32)


def rows(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def prefill(name, *, carried, in_parts=False):
    """in_parts: keys in the up-projection, beside gathered latent rows."""
    call = partial(mla_prefill, causal=True, scale=0.1, value_offset=128, implementation=name)
    up_projection = rows(TOKENS, HEADS, 256)
    keys = (up_projection, rows(TOKENS, _checks.WIDTH)) if in_parts else rows(TOKENS, HEADS, 192)
    operands = rows(TOKENS, HEADS, 192), keys, up_projection, LENS, LENS
    if not carried:
        return jax.jit(call).lower(*operands)
    carry = rows(TOKENS, HEADS, 128, dtype=jnp.float32), rows(TOKENS, HEADS, dtype=jnp.float32)
    return jax.jit(lambda carry, *operands: call(*operands, carry=carry), donate_argnums=0).lower(carry, *operands)


def packing(name):
    return jax.jit(partial(pack_kv, implementation=name)).lower(rows(TOKENS, HEADS, 256), rows(TOKENS, _checks.WIDTH))


def decode(name, *, in_parts):
    """in_parts: queries as (latent, rope)."""
    width = (512, 64) if in_parts else (576,)
    q = tuple(rows(BATCH, 2, HEADS, n) for n in width)
    table, kv_lens = rows(BATCH, PAGES // BATCH, dtype=jnp.int32), rows(BATCH, dtype=jnp.int32)
    call = jax.jit(partial(mla_decode, scale=0.1, implementation=name))
    return call.lower(q if in_parts else q[0], rows(PAGES, PAGE, 576), table, kv_lens)


CALLS = {
    "prefill": ("mla_prefill", partial(prefill, carried=False)),
    "prefill with a carry": ("mla_prefill", partial(prefill, carried=True)),
    "prefill of keys in parts": ("mla_prefill", partial(prefill, carried=False, in_parts=True)),
    "packing": ("pack_kv", packing),
    "decode": ("mla_decode", partial(decode, in_parts=False)),
    "decode in parts": ("mla_decode", partial(decode, in_parts=True)),
}


def made(text, least):
    """The operations of a compiled program, its kernels apart, whose results have `least` elements or more."""
    entry = text[text.index("\nENTRY ") :]
    found = re.findall(r"^ +(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z-]+)\(", entry, re.MULTILINE)
    sizes = [
        (name, math.prod(map(int, dims.split(","))))
        for shapes, name in found
        for dims in re.findall(r"\[([\d,]+)\]", shapes)
    ]
    assert any(name == "custom-call" for name, _ in sizes)
    return [(name, size) for name, size in sizes if name not in FREE and size >= least]


@pytest.mark.parametrize("call", CALLS)
def test_no_operand_is_copied(call, implementation):
    operation, lower = CALLS[call]
    name = implementation if operation == OPERATION else implementation.partition(":")[0]
    if not served(operation, name, "bfloat16", "bfloat16", HEADS, PAGE):
        pytest.skip(f"no native {operation}")
    assert made(lower(name).compile().as_text(), BATCH * 2 * HEADS * 64) == []


def test_copies_are_seen():
    """Of an operand that is sliced, as XLA hands custom calls dense arrays."""

    def sliced(q, k, v):
        lens = jnp.array([0, TOKENS])
        return mla_prefill(q, k, v[..., 128:], lens, lens, causal=True, scale=0.1, implementation="cpu")

    if not served(OPERATION, "cpu", "bfloat16", "bfloat16"):
        pytest.skip("no native mla_prefill on the CPU")
    operands = rows(TOKENS, HEADS, 192), rows(TOKENS, HEADS, 192), rows(TOKENS, HEADS, 256)
    with jax.default_device(jax.devices("cpu")[0]):
        text = jax.jit(sliced).lower(*operands).compile().as_text()
    assert sum(size for _, size in made(text, TOKENS)) == TOKENS * HEADS * 128
