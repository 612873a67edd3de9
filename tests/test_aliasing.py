"""Donated caches are updated in place, and the forms that XLA is known to break give right values."""

from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import served_or_refused

from jax_mla import copy_pages, mla_decode, update_cache

OPERATION = "update_cache"
BF16 = cases.dtype("bfloat16")
LAYERS, PAGES, PAGE_SIZE, TOKENS = 4, 16, 16, 3
CACHE_BYTES = LAYERS * PAGES * PAGE_SIZE * 576 * 2


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((LAYERS, PAGES, PAGE_SIZE, 576)).astype(BF16)
    kv_c = rng.standard_normal((LAYERS, TOKENS, 512)).astype(BF16)
    k_pe = rng.standard_normal((LAYERS, TOKENS, 64)).astype(BF16)
    mapping = np.array([7, 200, 55], np.int32)
    want = cache.copy()
    want.reshape(LAYERS, -1, 576)[:, mapping] = np.concatenate([kv_c, k_pe], axis=-1)
    return cache, kv_c, k_pe, mapping, want


def in_place(function, cache, *args):
    """Compiles with the cache donated and runs it; asserts that no second cache is in memory at any time."""
    program = jax.jit(function, donate_argnums=0).lower(cache, *args).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= CACHE_BYTES
    assert memory.temp_size_in_bytes < CACHE_BYTES // LAYERS
    given = jax.jit(jnp.copy)(cache)  # XLA's own memory: what NumPy owns cannot be donated
    address = given.unsafe_buffer_pointer()
    updated = program(given, *args)
    assert updated.unsafe_buffer_pointer() == address
    return np.asarray(updated)


def run_either(implementation, function, cache, *args):
    """What XLA does with its own scatter is XLA's affair: only values are checked there."""
    if implementation == "xla":
        return np.asarray(jax.jit(function)(cache, *args))
    return in_place(function, cache, *args)


def test_one_update(data, implementation):
    cache, kv_c, k_pe, mapping, want = data
    update = partial(update_cache, implementation=implementation)
    got = run_either(implementation, lambda c: update(c, kv_c[2], k_pe[2], mapping, layer=2), cache)
    np.testing.assert_array_equal(got[2], want[2])
    np.testing.assert_array_equal(got[[0, 1, 3]], cache[[0, 1, 3]])


def test_unrolled_layers(data, implementation):
    cache, kv_c, k_pe, mapping, want = data

    def layers(cache):
        for layer in range(LAYERS):
            cache = update_cache(cache, kv_c[layer], k_pe[layer], mapping, layer=layer, implementation=implementation)
        return cache

    np.testing.assert_array_equal(run_either(implementation, layers, cache), want)


def test_stacked_cache_as_the_carry_of_a_scan(data, implementation):
    """The first-class form: updating and reading each layer of a stacked cache costs no copy of it."""
    cache, kv_c, k_pe, mapping, want = data
    q, table = np.ones((1, 1, 4, 576), BF16), np.arange(PAGES, dtype=np.int32)[None]
    read = partial(mla_decode, scale=0.1, implementation="cpu" if implementation.startswith("cpu") else implementation)

    def step(cache, xs):
        layer, kv_c, k_pe = xs
        cache = update_cache(cache, kv_c, k_pe, mapping, layer=layer, implementation=implementation)
        out, _ = read(q, cache, table, np.array([200], np.int32), layer=layer)
        return cache, out

    def layers(cache):
        return jax.lax.scan(step, cache, (jnp.arange(LAYERS), kv_c, k_pe))[0]

    np.testing.assert_array_equal(run_either(implementation, layers, cache), want)


def test_fori_loop_that_reads_and_writes(data, implementation):
    cache, _, _, mapping, _ = data

    def body(i, cache):
        rows = cache.reshape(LAYERS, -1, 576)[0, mapping] + 1
        return update_cache(cache, rows[:, :512], rows[:, 512:], mapping, layer=0, implementation=implementation)

    got = run_either(implementation, lambda c: jax.lax.fori_loop(0, 5, body, c), cache)
    want = cache.copy()
    for _ in range(5):
        want.reshape(LAYERS, -1, 576)[0, mapping] += 1
    np.testing.assert_array_equal(got, want)


def test_per_layer_caches_as_scan_inputs_and_outputs(data, implementation):
    """Unsafe form: slice, aliased call, update slice. It copies, and it must be right."""
    cache, kv_c, k_pe, mapping, want = data

    @partial(jax.jit, donate_argnums=0)
    def layers(cache):
        def step(_, xs):
            return None, update_cache(*xs, mapping, implementation=implementation)

        return jax.lax.scan(step, None, (cache, kv_c, k_pe))[1]

    for _ in range(3):
        np.testing.assert_array_equal(layers(jnp.array(cache)), want)


def test_update_of_a_slice_set_back(data, implementation):
    """Unsafe form: c.at[l].set(update(c[l])), unrolled and with a traced layer."""
    cache, kv_c, k_pe, mapping, want = data

    def one(layer, cache):
        rows = (x[layer] for x in (jnp.asarray(kv_c), jnp.asarray(k_pe)))
        return cache.at[layer].set(update_cache(cache[layer], *rows, mapping, implementation=implementation))

    unrolled = jax.jit(lambda c: one(3, one(2, one(1, one(0, c)))), donate_argnums=0)
    looped = jax.jit(lambda c: jax.lax.fori_loop(0, LAYERS, one, c), donate_argnums=0)
    for run in (unrolled, looped):
        for _ in range(2):
            np.testing.assert_array_equal(run(jnp.array(cache)), want)


def test_old_value_stays_readable(data, implementation):
    """Not donated, or needed after the update: the old cache is untouched."""
    cache, kv_c, k_pe, mapping, want = data
    old = jnp.asarray(cache)
    update = jax.jit(lambda c: update_cache(c, kv_c[0], k_pe[0], mapping, layer=0, implementation=implementation))
    np.testing.assert_array_equal(update(old)[0], want[0])
    np.testing.assert_array_equal(old, cache)

    @partial(jax.jit, donate_argnums=0)
    def both(c):
        new = update_cache(c, kv_c[0], k_pe[0], mapping, layer=0, implementation=implementation)
        return new, c * 2

    new, twice = both(jnp.array(cache))
    np.testing.assert_array_equal(new[0], want[0])
    np.testing.assert_array_equal(twice, cache * 2)


def test_cond_and_reshape(data, implementation):
    cache, kv_c, k_pe, mapping, want = data

    def maybe(cache, wanted):
        flat = cache.reshape(LAYERS, PAGES // 2, 2 * PAGE_SIZE, 576)

        def write(c):
            return update_cache(c, kv_c[1], k_pe[1], mapping, layer=1, implementation=implementation)

        return jax.lax.cond(wanted, write, lambda c: c, flat).reshape(cache.shape)

    run = jax.jit(maybe, donate_argnums=0)
    np.testing.assert_array_equal(run(jnp.array(cache), True)[1], want[1])
    np.testing.assert_array_equal(run(jnp.array(cache), False), cache)


def test_copy_pages_then_update(data, implementation):
    """A copy of pages and an update of the copy, in one program."""
    cache, kv_c, k_pe, mapping, _ = data

    def both(cache):
        cache = copy_pages(cache, jnp.array([0]), jnp.array([15]))
        where = mapping[:1] + 15 * PAGE_SIZE
        return update_cache(cache, kv_c[0][:1], k_pe[0][:1], where, layer=0, implementation=implementation)

    got = np.asarray(jax.jit(both, donate_argnums=0)(jnp.array(cache)))
    want = cache.copy()
    want[:, 15] = want[:, 0]
    want[0, 15, mapping[0]] = np.concatenate([kv_c[0, 0], k_pe[0, 0]])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
def test_decode_does_not_copy_the_cache(cache_dtype, implementation):
    """Reading a layer of a stacked cache takes no memory of the cache's size."""
    name = implementation.partition(":")[0]
    case = cases.DecodeCase("", (300, 200), layers=64, layer=5, heads=4, cache_dtype=cache_dtype)
    inputs = cases.make(case)
    run = jax.jit(partial(mla_decode, implementation=name, **inputs.static))
    with served_or_refused("mla_decode", name, "bfloat16", cache_dtype, case.heads, case.page_size):
        memory = run.lower(*inputs.args, **inputs.arrays).compile().memory_analysis()
        assert memory.temp_size_in_bytes < inputs.cache.nbytes // 4
