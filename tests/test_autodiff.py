"""Decode serves inference: differentiating it raises a worded error."""

import cases
import jax
import jax.numpy as jnp
import pytest

from jax_mla import mla_decode

OPERATION = "mla_decode"


@pytest.mark.parametrize("name", ["kimi_k3_on_8", "ragged", "pair"])
@pytest.mark.parametrize("mode", ["grad", "grad of jit", "jvp"])
def test_derivative_is_refused(mode, name, implementation):
    inputs = cases.make(cases.BY_NAME[name])
    q = jax.tree.map(jnp.asarray, inputs.q)

    def loss(q):
        out, lse = mla_decode(q, *inputs.args[1:], implementation=implementation, **inputs.arrays, **inputs.static)
        return out.astype(jnp.float32).sum() + lse.sum()

    with pytest.raises(NotImplementedError, match="mla_decode has no derivative: it serves inference"):
        if mode == "jvp":
            jax.jvp(loss, (q,), (q,))
        else:
            jax.grad(loss if mode == "grad" else jax.jit(loss))(q)


def test_what_does_not_depend_on_decode_still_differentiates():
    """A stopped gradient passes."""
    inputs = cases.make(cases.DecodeCase("", (20,), q_dtype="float32", cache_dtype="float32", heads=2))

    def loss(x):
        out, _ = mla_decode(jax.lax.stop_gradient(x * inputs.q), *inputs.args[1:], **inputs.static)
        return x * jax.lax.stop_gradient(out.sum())

    assert jnp.isfinite(jax.grad(loss)(2.0))
