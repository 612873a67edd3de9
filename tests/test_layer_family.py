"""What the layers of the family differ in: rotation, queries without a latent, no gate, chosen slots."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_layer import PAGE, Batch, error

from jax_mla import plan_decode
from jax_mla.layer import LayerConfig, Rope, Yarn, absorb, decode, init_weights, mixed, partition_specs, prefill
from jax_mla.layer import query_latent as latent_of

YARN = Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
V3 = LayerConfig(64, 12, 1, 48, rope=Rope(10000.0, YARN), gate=False)
LITE = LayerConfig(64, 12, 1, None, rope=Rope(10000.0), gate=False)

run_prefill = jax.jit(prefill, static_argnums=1)
run_decode = jax.jit(decode, static_argnums=1)


def prompt_positions(batch):
    return jnp.concatenate([jnp.arange(n, dtype=jnp.int32) for n in batch.prompts])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_rotation_is_a_complex_factor(interleaved, dtype):
    """Heads share the positions; a pair of columns is a complex number, turned; length and dtype stay."""
    rope = Rope(10000.0, YARN, interleaved)
    x = jax.random.normal(jax.random.key(0), (5, 3, 64), dtype)
    positions = jnp.array([0, 1, 77, 1000, 4095], jnp.int32)
    got = rope.rotate(x, positions[:, None])
    assert got.dtype == dtype and got.shape == x.shape

    def pairs(a):
        a = np.asarray(a, np.float64)
        return a[..., ::2] + 1j * a[..., 1::2] if interleaved else a[..., :32] + 1j * a[..., 32:]

    turned = pairs(x) * np.exp(1j * np.asarray(positions)[:, None, None] * rope.frequencies)
    difference = np.abs(pairs(got) - turned).max()
    assert difference < (1e-3 if dtype == jnp.float32 else 3e-2)
    assert np.array_equal(np.asarray(got[0], np.float32), np.asarray(x[0], np.float32))


def test_yarn_keeps_the_fast_and_divides_the_slow():
    plain, slowed = Rope(10000.0).frequencies, Rope(10000.0, YARN).frequencies
    np.testing.assert_array_equal(slowed[:10], plain[:10])
    np.testing.assert_allclose(slowed[24:], plain[24:] / 40, rtol=1e-12)
    quotient = slowed / plain
    assert (np.diff(quotient) <= 1e-15).all() and ((quotient[11:23] < 1) & (quotient[11:23] > 1 / 40)).all()
    assert Yarn(1.0, 4096, mscale_all_dim=1.0).magnitude(1.0) == 1.0


def test_scores_depend_on_distances_alone():
    """All positions moved by the same number: the same outputs, and other latents in the cache."""
    batch = Batch(V3)

    def outputs(shift):
        y, cache = run_prefill(
            batch.params, V3, batch.prompt_x, batch.cache, batch.prompt_slots, batch.cu_q_lens,
            positions=prompt_positions(batch) + shift, layer=1,
        )  # fmt: skip
        return y, jnp.nan_to_num(cache)

    (y, cache), (moved, moved_cache) = outputs(0), outputs(100)
    assert error(moved, y) < 1e-5
    assert error(moved_cache[..., :512], cache[..., :512]) == 0
    assert error(moved_cache[..., 512:], cache[..., 512:]) > 0.1


@pytest.mark.parametrize("config", [V3, LITE], ids=["V3", "V2-Lite"])
def test_mixed_equals_prefill_and_decode(config):
    batch = Batch(config, prompts=(30, 17, 20), steps=1)
    first = batch.prompts[:2].sum()
    positions = prompt_positions(batch)
    _, cache = run_prefill(
        batch.params, config, batch.prompt_x[:first], batch.cache, batch.prompt_slots[:first], batch.cu_q_lens[:3],
        positions=positions[:first], layer=1,
    )  # fmt: skip
    x, kv_lens, own = (a[:2] for a in batch.decode_inputs(0, 1))
    y, _ = run_decode(
        batch.params, config, x, cache, batch.page_table[:2], kv_lens, own, positions=kv_lens[:, None] - 1, layer=1
    )
    z, _ = run_prefill(
        batch.params, config, batch.prompt_x[first:], cache, batch.prompt_slots[first:], jnp.array([0, 20], jnp.int32),
        positions=positions[first:], layer=1,
    )  # fmt: skip
    both, _ = jax.jit(mixed, static_argnums=1, static_argnames="decodes")(
        batch.params,
        config,
        jnp.concatenate([x[:, 0], batch.prompt_x[first:]]),
        cache,
        batch.page_table,
        kv_lens,
        jnp.concatenate([own[:, 0], batch.prompt_slots[first:]]),
        jnp.array([0, 20], jnp.int32),
        decodes=2,
        positions=jnp.concatenate([kv_lens - 1, positions[first:]]),
        layer=1,
    )
    assert error(both, jnp.concatenate([y[:, 0], z])) < 1e-5


def all_slots(batch, kv_lens):
    """[B, K] slots of every cached token of each sequence, the newest first, then -1."""
    order = np.arange(batch.page_table.shape[1] * PAGE)[::-1]
    everything = batch.page_table[:, order // PAGE] * PAGE + order % PAGE
    return jnp.asarray(np.where(order < np.asarray(kv_lens)[:, None], everything, -1), jnp.int32)


def test_all_slots_chosen_is_dense_decode():
    """And `topk_lens` cuts the choice: a token that sees itself alone gives its own value."""
    batch = Batch(V3, steps=1)
    _, cache = run_prefill(
        batch.params, V3, batch.prompt_x, batch.cache, batch.prompt_slots, batch.cu_q_lens,
        positions=prompt_positions(batch), layer=1,
    )  # fmt: skip
    x, kv_lens, own = batch.decode_inputs(0, 1)
    places = {"positions": kv_lens[:, None] - 1, "layer": 1}
    want, _ = run_decode(batch.params, V3, x, cache, batch.page_table, kv_lens, own, **places)

    everything = all_slots(batch, kv_lens)[:, None]
    chosen = jnp.concatenate([own[..., None], jnp.where(everything == own[..., None], -1, everything)], axis=-1)
    got, _ = run_decode(batch.params, V3, x, cache, None, None, own, indices=chosen, **places)
    assert error(got, want) < 1e-5

    alone, _ = run_decode(
        batch.params, V3, x, cache, None, None, own, indices=chosen, topk_lens=jnp.ones((3, 1), jnp.int32), **places
    )
    itself, _ = run_decode(batch.params, V3, x, cache, None, None, own, indices=own[..., None], **places)
    assert error(alone, itself) < 1e-6


@pytest.mark.parametrize("q_len", [1, 2])
def test_mixed_over_chosen_slots(q_len):
    """Decoding sequences attend to what they name, as in `decode`; the prompt beside them as in `prefill`."""
    batch = Batch(V3, prompts=(30, 17, 20), steps=q_len)
    first = batch.prompts[:2].sum()
    positions = prompt_positions(batch)
    _, cache = run_prefill(
        batch.params, V3, batch.prompt_x[:first], batch.cache, batch.prompt_slots[:first], batch.cu_q_lens[:3],
        positions=positions[:first], layer=1,
    )  # fmt: skip
    x, kv_lens, own = (a[:2] for a in batch.decode_inputs(0, q_len))
    newest = kv_lens[:, None] - q_len + jnp.arange(q_len)
    slots = jnp.repeat(all_slots(batch, batch.prompts)[:2, None], q_len, axis=1)
    indices = jnp.concatenate([own[..., None], slots], axis=-1)  # itself and its prompt
    # Of the second prompt's 17 tokens the newest 4 and more, of the first one's 30 the newest 17 and more.
    topk_lens = jnp.asarray(slots.shape[-1] - 12 + np.arange(2 * q_len).reshape(2, q_len) * 3, jnp.int32)
    chosen = {"indices": indices, "topk_lens": topk_lens}
    want, _ = run_decode(batch.params, V3, x, cache, None, None, own, positions=newest, layer=1, **chosen)
    prompt, _ = run_prefill(
        batch.params, V3, batch.prompt_x[first:], cache, batch.prompt_slots[first:], jnp.array([0, 20], jnp.int32),
        positions=positions[first:], layer=1,
    )  # fmt: skip
    run = jax.jit(mixed, static_argnums=1, static_argnames=("decodes", "q_len"))
    operands = (
        jnp.concatenate([x.reshape(-1, x.shape[-1]), batch.prompt_x[first:]]),
        cache,
        batch.page_table,
        None,
        jnp.concatenate([own.reshape(-1), batch.prompt_slots[first:]]),
        jnp.array([0, 20], jnp.int32),
    )
    options = {"decodes": 2, "q_len": q_len, "layer": 1}
    options["positions"] = jnp.concatenate([newest.reshape(-1), positions[first:]])
    flat = {name: array.reshape(2 * q_len, *array.shape[2:]) for name, array in chosen.items()}
    got, _ = run(batch.params, V3, *operands, **options, **flat)
    assert error(got, jnp.concatenate([want.reshape(-1, want.shape[-1]), prompt])) < 1e-5

    with pytest.raises(ValueError, match=rf"indices has shape .*; expected \[{2 * q_len}, K\]"):
        run(batch.params, V3, *operands, **options, indices=indices)
    plan = plan_decode(kv_lens, num_heads=V3.heads, cache=cache, q_len=q_len)
    with pytest.raises(ValueError, match="plan is given beside indices; expected None"):
        run(batch.params, V3, *operands, **options, **flat, plan=plan)
    with pytest.raises(ValueError, match="topk_lens is given without indices"):
        run(batch.params, V3, *operands, **options, topk_lens=flat["topk_lens"])


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
def test_latent_norms_use_the_configured_epsilon(eps):
    """Activations so small that the epsilon decides: both latents, of queries and of keys, in float64 beside."""
    config = LayerConfig(64, 12, 1, 48, rms_norm_eps=eps)
    batch = Batch(config)
    x = batch.prompt_x * 1e-3
    _, cache = run_prefill(
        batch.params, config, x, jnp.zeros_like(batch.cache), batch.prompt_slots, batch.cu_q_lens, layer=1
    )
    weights = {name: np.asarray(array, np.float64) for name, array in batch.weights.items()}

    def normalised(rows, weight):
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps) * weight

    joint = np.asarray(x, np.float64) @ weights["kv_a_proj_with_mqa"][:512].T
    stored = np.asarray(cache[1]).reshape(-1, 576)[np.asarray(batch.prompt_slots), :512]
    assert error(stored, normalised(joint, weights["kv_a_layernorm"])) < 1e-5
    down = np.asarray(x, np.float64) @ weights["q_a_proj"].T
    assert error(latent_of(batch.params, config, x), normalised(down, weights["q_a_layernorm"])) < 1e-5


@pytest.mark.parametrize("config", [V3, LITE], ids=["V3", "V2-Lite"])
def test_heads_over_a_mesh(config):
    """Parameters that a model does not have are None, and split over a mesh all the same."""
    batch = Batch(config)
    part = LayerConfig(64, 12, 4, config.q_lora_rank, rope=config.rope, gate=False)
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    operands = (batch.prompt_x, batch.cache, batch.prompt_slots, batch.cu_q_lens)
    run = partial(prefill, positions=prompt_positions(batch), layer=1)
    whole = jax.sharding.PartitionSpec()
    specs = {"in_specs": (partition_specs("heads"), *(whole,) * 4), "out_specs": whole}
    split = jax.shard_map(lambda params, *rest: run(params, part, *rest, axis_name="heads")[0], mesh=mesh, **specs)
    want, _ = jax.jit(run, static_argnums=1)(batch.params, config, *operands)
    assert error(jax.jit(split)(batch.params, *operands), want) < 1e-5
    assert batch.params.g_proj is None and (batch.params.q_a_proj is None) == (config.q_lora_rank is None)


def test_errors():
    batch = Batch(V3, steps=1)
    x, kv_lens, own = batch.decode_inputs(0, 1)
    dense = (batch.params, V3, x, batch.cache, batch.page_table, kv_lens, own)
    with pytest.raises(ValueError, match=r"positions is None; expected int32 of shape \[3, 1\], since config.rope"):
        run_decode(*dense, layer=1)
    with pytest.raises(ValueError, match=r"positions is \[3\]; expected int32 of shape \[3, 1\]"):
        run_decode(*dense, positions=kv_lens, layer=1)
    plan = plan_decode(kv_lens, num_heads=V3.heads, cache=batch.cache, q_len=1)
    with pytest.raises(ValueError, match="plan is given beside indices; expected None"):
        run_decode(*dense, positions=kv_lens[:, None], indices=own[..., None], plan=plan, layer=1)
    with pytest.raises(ValueError, match="topk_lens is given without indices"):
        run_decode(*dense, positions=kv_lens[:, None], topk_lens=own, layer=1)
    with pytest.raises(ValueError, match=r"config\.q_lora_rank is None: queries have no latent"):
        latent_of(batch.params, LITE, x)
    with pytest.raises(ValueError, match="weights lack q_proj; a layer needs q_proj, kv_a_proj_with_mqa, "):
        absorb(init_weights(jax.random.key(0), V3), LITE)
