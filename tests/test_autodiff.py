"""Decode serves inference: differentiating it raises a worded error."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mla import mla_context, mla_decode, plan_context

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


@pytest.mark.leave_out("cpu*", "cuda*", "rocm*")
def test_context_through_xla_differentiates(implementation):
    """By each operand, and by what of the weights goes into the keys alone, against finite differences."""
    rng = np.random.default_rng(0)

    def random(*shape):
        return rng.standard_normal(shape, np.float32)

    cache, table = random(8, 16, 576), np.arange(8, dtype=np.int32).reshape(2, 4)
    plan = plan_context(np.array([50, 20], np.int32), workspace_tokens=32, page_size=16)
    cu_q_lens = np.array([0, 2, 3], np.int32)

    def loss(q, cache, w_kv_b):
        options = {"cu_q_lens": cu_q_lens, "scale": cases.SCALE, "implementation": implementation}
        out, lse = mla_context(q, cache, table, plan, w_kv_b, **options)
        return out.sum() + lse.sum()

    operands = random(3, 2, 192), cache, random(512, 2, 256) * 0.05
    gradients = jax.grad(loss, argnums=(0, 1, 2))(*operands)
    run = jax.jit(loss)
    for number, columns in ((0, 192), (1, 576), (2, 256), (2, 128)):
        direction = random(*operands[number].shape)
        direction[..., columns:] = 0
        step = 1e-3 * direction
        ahead, behind = (
            run(*(x + sign * step if i == number else x for i, x in enumerate(operands))) for sign in (1, -1)
        )
        np.testing.assert_allclose(np.vdot(gradients[number], direction), (ahead - behind) / 2e-3, rtol=2e-2)


def test_what_does_not_depend_on_decode_still_differentiates():
    """A stopped gradient passes."""
    inputs = cases.make(cases.DecodeCase("", (20,), q_dtype="float32", cache_dtype="float32", heads=2))

    def loss(x):
        out, _ = mla_decode(jax.lax.stop_gradient(x * inputs.q), *inputs.args[1:], **inputs.static)
        return x * jax.lax.stop_gradient(out.sum())

    assert jnp.isfinite(jax.grad(loss)(2.0))
