"""decode_scratch says what a call allocates: compared with the traced calls and with what XLA reserves."""

import cases
import jax
import jax.numpy as jnp
import pytest
from helpers import native_only, served

import jax_mla
from jax_mla import decode_scratch, mla_decode

OPERATION = "mla_decode"
BF16 = jnp.dtype("bfloat16")
PADDING = 256  # of each buffer, on a GPU
SHAPES = [  # batch, heads, q_len, batch_invariant
    (1, 24, 1, False),
    (5, 24, 1, True),
    (7, 128, 1, False),
    (3, 96, 4, False),
]


def operands(batch, heads, q_len):
    """Ragged queries, whose results XLA hands out as they come (of [B, 1, H, 512] it may make a copy first)."""
    q = jax.ShapeDtypeStruct((batch * q_len, heads, 576), BF16)
    cache = jax.ShapeDtypeStruct((64, 64, 576), BF16)
    return q, cache, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, 16), (batch,), (batch + 1,)))


def custom_calls(jaxpr):
    """Every ffi_call of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ffi_call":
            yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from custom_calls(getattr(inner, "jaxpr", inner))


@native_only
@pytest.mark.parametrize(("batch", "heads", "q_len", "invariant"), SHAPES)
def test_equals_what_calls_return_and_xla_reserves(batch, heads, q_len, invariant, implementation):
    arrays = operands(batch, heads, q_len)
    static = {"batch_invariant": invariant, "implementation": implementation}
    scratch = decode_scratch(batch, num_heads=heads, cache=arrays[1], q_len=q_len, **static)

    def run(*arrays):
        q, cache, table, kv_lens, cu_q_lens = arrays
        return mla_decode(q, cache, table, kv_lens, cu_q_lens=cu_q_lens, max_q_len=q_len, scale=cases.SCALE, **static)

    calls = list(custom_calls(jax.make_jaxpr(run)(*arrays).jaxpr))
    named = {str(call.params["target_name"]): [x.aval for x in call.outvars] for call in calls}
    plan, decode = named["jax_mla_plan_decode"], named["jax_mla_decode"]
    assert [(x.shape, x.dtype) for x in plan] == [(x.shape, x.dtype) for x in scratch.plan]
    assert [(x.shape, x.dtype) for x in decode[2:]] == [(x.shape, x.dtype) for x in scratch.partials]

    memory = jax.jit(run).lower(*arrays).compile().memory_analysis()
    reserved = memory.temp_size_in_bytes
    # Beside it: tuples of pointers, a few scalars.
    assert scratch.bytes <= reserved <= scratch.bytes + 16 * PADDING


def test_of_another_platform():
    """A host without a GPU says what a GPU will need."""
    cache = operands(1, 24, 1)[1]
    if not served(OPERATION, "cuda", "bfloat16", "bfloat16"):
        with pytest.raises(NotImplementedError, match="implementation='cuda' cannot serve"):
            decode_scratch(1, num_heads=24, cache=cache, implementation="cuda")
        return
    small = decode_scratch(1, num_heads=24, cache=cache, implementation="cuda")
    assert small.partials[0].shape[2] == 512
    assert small.bytes > 0
    # The partials' bound follows from the parts alone; the plan grows with the batch.
    large = decode_scratch(128, num_heads=24, cache=cache, implementation="cuda")
    assert large.partials == small.partials
    assert large.bytes > small.bytes


def test_refusals():
    cache = operands(1, 24, 1)[1]
    with pytest.raises(NotImplementedError, match="XLA would serve this call"):
        decode_scratch(1, num_heads=24, cache=cache, implementation="xla")
    with jax_mla.override_capabilities([]), pytest.raises(NotImplementedError, match="XLA would serve this call"):
        decode_scratch(1, num_heads=24, cache=cache)
    for arguments, message in [
        ({"batch": 0}, "batch is 0"),
        ({"num_heads": 129}, "num_heads"),
        ({"q_len": 0}, "q_len is 0"),
        ({"cache": 3}, "cache is a int; expected an array"),
    ]:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            decode_scratch(**{"batch": 1, "num_heads": 24, "cache": cache, "q_len": 1} | arguments)
