"""Kimi-K3's attention layer inside a Flax NNX module and inside an Equinox module.

    pip install 'jax_mla[examples]'
    python -P examples/flax_equinox.py

The layer is pure functions over a parameter pytree, so that a module only has to hold the parameters, and the cache if
it likes: NNX keeps it as a variable of its own, Equinox passes it through. Either way it is donated, and stays where it
is. Both give the bits of the layer itself.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_mla import allocate_cache, slots
from jax_mla.layer import LayerConfig, LayerParams, absorb, decode, init_weights

CONFIG = LayerConfig(hidden_size=256, q_lora_rank=128, devices=4)  # 24 of Kimi-K3's 96 heads; small projections
PAGE, PAGES, STEPS = 64, 8, 5
PAGE_TABLE = jnp.array([[5, 2], [7, 0]], jnp.int32)


class NnxAttention(nnx.Module):
    """Weights as nnx.Param, the latent cache [PAGES, PAGE, 576] as nnx.Cache; a call writes its tokens there."""

    def __init__(self, config: LayerConfig, params: LayerParams):
        self.config = config
        for name, array in params._asdict().items():
            setattr(self, name, None if array is None else nnx.Param(array))
        self.cache = nnx.Cache(allocate_cache(PAGES, PAGE))

    def __call__(self, x: jax.Array, page_table: jax.Array, kv_lens: jax.Array, own: jax.Array) -> jax.Array:
        weights = {name: getattr(self, name) for name in LayerParams._fields}
        params = LayerParams(**{name: None if weight is None else weight[...] for name, weight in weights.items()})
        y, cache = decode(params, self.config, x, self.cache[...], page_table, kv_lens, own)
        self.cache[...] = cache
        return y


class EquinoxAttention(eqx.Module):
    """Weights as leaves; the cache goes in and comes out."""

    params: LayerParams
    config: LayerConfig = eqx.field(static=True)

    def __call__(
        self, x: jax.Array, cache: jax.Array, page_table: jax.Array, kv_lens: jax.Array, own: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return decode(self.params, self.config, x, cache, page_table, kv_lens, own)


def tokens():
    """Of each step: x [2, 1, hidden], kv_lens [2] and the slots [2, 1] of two sequences' newest tokens."""
    for i, key in enumerate(jax.random.split(jax.random.key(1), STEPS)):
        kv_lens = jnp.array([1, 1], jnp.int32) + i
        x = jax.random.normal(key, (2, 1, CONFIG.hidden_size), jnp.bfloat16)
        yield x, kv_lens, slots(PAGE_TABLE, kv_lens[:, None] - 1, PAGE)


def run_layer(params: LayerParams) -> tuple[list[jax.Array], jax.Array]:
    """The layer itself: what both modules have to give."""
    step = jax.jit(decode, static_argnums=1, donate_argnums=3)
    cache, outputs = allocate_cache(PAGES, PAGE), []
    for x, kv_lens, own in tokens():
        y, cache = step(params, CONFIG, x, cache, PAGE_TABLE, kv_lens, own)
        outputs.append(y)
    return outputs, cache


def run_nnx(params: LayerParams) -> tuple[list[jax.Array], jax.Array]:
    """Split into weights, which stay, and the cache, which is donated."""
    definition, weights, state = nnx.split(NnxAttention(CONFIG, params), nnx.Param, nnx.Cache)

    def step(state, weights, x, kv_lens, own):
        module = nnx.merge(definition, weights, state)
        y = module(x, PAGE_TABLE, kv_lens, own)
        return y, nnx.state(module, nnx.Cache)

    step, outputs = jax.jit(step, donate_argnums=0), []
    address = state["cache"][...].unsafe_buffer_pointer()
    for x, kv_lens, own in tokens():
        y, state = step(state, weights, x, kv_lens, own)
        outputs.append(y)
    assert state["cache"][...].unsafe_buffer_pointer() == address
    return outputs, state["cache"][...]


def run_equinox(params: LayerParams) -> tuple[list[jax.Array], jax.Array]:
    """filter_jit donates all but its first argument: the cache stands alone."""

    @eqx.filter_jit(donate="all-except-first")
    def step(kept, cache):
        module, x, kv_lens, own = kept
        return module(x, cache, PAGE_TABLE, kv_lens, own)

    module, cache, outputs = EquinoxAttention(params, CONFIG), allocate_cache(PAGES, PAGE), []
    address = cache.unsafe_buffer_pointer()
    for x, kv_lens, own in tokens():
        y, cache = step((module, x, kv_lens, own), cache)
        outputs.append(y)
    assert cache.unsafe_buffer_pointer() == address
    return outputs, cache


def main() -> None:
    params = absorb(init_weights(jax.random.key(0), CONFIG), CONFIG)
    outputs, cache = run_layer(params)
    assert all(bool(jnp.isfinite(y).all()) and bool(y.any()) for y in outputs)
    for name, run in (("Flax NNX", run_nnx), ("Equinox", run_equinox)):
        got, got_cache = run(params)
        for y, want in zip((*got, got_cache), (*outputs, cache), strict=True):
            np.testing.assert_array_equal(np.asarray(y).view(np.uint16), np.asarray(want).view(np.uint16))
        print(f"{name}: {STEPS} steps of 2 sequences, y {got[0].shape} in {got[0].dtype}, the layer's own bits")


if __name__ == "__main__":
    main()
