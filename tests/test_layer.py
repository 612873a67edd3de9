"""Kimi-K3's MLA block against a direct, unabsorbed attention in float64 NumPy."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mla import allocate_cache, plan_context, plan_decode, slots
from jax_mla.layer import LayerConfig, absorb, decode, init_weights, mixed, partition_specs, prefill, rms_norm

HIDDEN, QUERY_LATENT, PAGE = 64, 48, 16
LAYERS, LAYER = 3, 1
jit_prefill = jax.jit(prefill, static_argnums=1)
jit_decode = jax.jit(decode, static_argnums=1, static_argnames="max_q_len")

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}


def geometry(heads, devices=1):
    return LayerConfig(HIDDEN, heads, devices, QUERY_LATENT)


def oracle(weights, x):
    """One sequence, [n, M] -> [n, M]: keys and values of every head, a causal softmax, the gate, the projection."""
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    x = np.asarray(x, np.float64)
    n, heads = len(x), w["kv_b_proj"].shape[0] // 256

    def norm(a, weight):
        return a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6) * weight

    q = (norm(x @ w["q_a_proj"].T, w["q_a_layernorm"]) @ w["q_b_proj"].T).reshape(n, heads, 192)
    joint = x @ w["kv_a_proj_with_mqa"].T
    up = (norm(joint[:, :512], w["kv_a_layernorm"]) @ w["kv_b_proj"].T).reshape(n, heads, 256)
    k = np.concatenate([up[..., :128], np.repeat(joint[:, None, 512:], heads, 1)], axis=-1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(192)
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    probabilities = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    attended = np.einsum("hts,shd->thd", probabilities, up[..., 128:]).reshape(n, -1)
    return (attended / (1 + np.exp(-x @ w["g_proj"].T))) @ w["o_proj"].T


def error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return np.linalg.norm(got - want) / np.linalg.norm(want)


class Batch:
    """Sequences of different lengths on scattered pages of a stacked cache that holds NaN everywhere else."""

    def __init__(self, config, prompts=(5, 1, 17), steps=4, dtype=jnp.float32, seed=0):
        self.prompts, self.steps = np.array(prompts), steps
        keys = jax.random.split(jax.random.key(seed), len(prompts) + 1)
        self.weights = init_weights(keys[-1], config, dtype)
        self.params = absorb(self.weights, config, dtype)
        lengths = self.prompts + steps
        self.x = [jax.random.normal(key, (n, HIDDEN), dtype) for key, n in zip(keys, lengths, strict=False)]
        pages = -(-lengths // PAGE)
        order = iter(np.random.default_rng(seed).permutation(pages.sum() + 2))
        self.page_table = np.full((len(prompts), pages.max()), -1, np.int32)
        for row, count in zip(self.page_table, pages, strict=True):
            row[:count] = [next(order) for _ in range(count)]
        self.cache = jnp.full_like(allocate_cache(pages.sum() + 2, PAGE, dtype=dtype, layers=LAYERS), jnp.nan)
        self.cu_q_lens = jnp.asarray(np.cumsum([0, *prompts]), jnp.int32)
        request = jnp.asarray(np.repeat(np.arange(len(prompts)), prompts), jnp.int32)
        positions = jnp.concatenate([jnp.arange(n, dtype=jnp.int32) for n in prompts])
        self.prompt_slots = slots(self.page_table, positions, PAGE, request=request)
        self.prompt_x = jnp.concatenate([x[:n] for x, n in zip(self.x, prompts, strict=True)])

    def want_prompts(self):
        """Oracle's rows of the prompts."""
        return np.concatenate([oracle(self.weights, x)[:n] for x, n in zip(self.x, self.prompts, strict=True)])

    def want(self, begin, end):
        """Oracle's rows [begin, end) after each prompt."""
        full = [oracle(self.weights, x) for x in self.x]
        return np.stack([y[n + begin : n + end] for y, n in zip(full, self.prompts, strict=True)])

    def decode_inputs(self, begin, end):
        """x [B, Q, M], kv_lens [B] and slots [B, Q] of the tokens [begin, end) after each prompt."""
        x = jnp.stack([x[n + begin : n + end] for x, n in zip(self.x, self.prompts, strict=True)])
        positions = jnp.asarray(self.prompts[:, None] + np.arange(begin, end), jnp.int32)
        return x, positions[:, -1] + 1, slots(self.page_table, positions, PAGE)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [12, 24, 96])
def test_prefill_then_decode_token_by_token(heads, dtype):
    config = geometry(heads)
    batch = Batch(config, dtype=dtype)

    @partial(jax.jit, donate_argnums=1)
    def run_prefill(params, cache, layer):
        return prefill(params, config, batch.prompt_x, cache, batch.prompt_slots, batch.cu_q_lens, layer=layer)

    @partial(jax.jit, donate_argnums=1)
    def step(params, cache, layer, x, kv_lens, slot_mapping):
        plan = plan_decode(kv_lens, num_heads=config.heads, cache=cache, q_len=1)
        return decode(params, config, x, cache, batch.page_table, kv_lens, slot_mapping, layer=layer, plan=plan)

    y, cache = run_prefill(batch.params, batch.cache, jnp.int32(LAYER))
    assert y.dtype == dtype
    assert error(y, batch.want_prompts()) < TOLERANCE[dtype]

    ys = []
    for i in range(batch.steps):
        x, kv_lens, slot_mapping = batch.decode_inputs(i, i + 1)
        y, cache = step(batch.params, cache, jnp.int32(LAYER), x, kv_lens, slot_mapping)
        ys.append(y)
    assert error(jnp.concatenate(ys, axis=1), batch.want(0, batch.steps)) < TOLERANCE[dtype]

    rows = np.asarray(cache, np.float32).reshape(LAYERS, -1, 576)
    written = ~np.isnan(rows).any(-1)
    assert written.sum() == (batch.prompts + batch.steps).sum()
    assert written[LAYER].sum() == written.sum()


def test_several_queries_at_once():
    """Draft tokens: uniform queries, and ragged ones with padding, give what one token at a time gives."""
    config = geometry(24)
    batch = Batch(config)
    _, cache = jit_prefill(
        batch.params, config, batch.prompt_x, batch.cache, batch.prompt_slots, batch.cu_q_lens, layer=LAYER
    )
    x, kv_lens, slot_mapping = batch.decode_inputs(0, 3)
    y, _ = jit_decode(batch.params, config, x, cache, batch.page_table, kv_lens, slot_mapping, layer=LAYER)
    assert error(y, batch.want(0, 3)) < 1e-5

    counts = np.array([2, 0, 3])
    take = np.concatenate([np.arange(3 * b, 3 * b + n) for b, n in enumerate(counts)])
    padding = jnp.zeros((2, HIDDEN))
    y, _ = jit_decode(
        batch.params,
        config,
        jnp.concatenate([x.reshape(-1, HIDDEN)[take], padding]),
        cache,
        batch.page_table,
        jnp.asarray(batch.prompts + counts, jnp.int32),
        jnp.concatenate([slot_mapping.reshape(-1)[take], jnp.full(2, -1, jnp.int32)]),
        layer=LAYER,
        cu_q_lens=jnp.asarray(np.cumsum([0, *counts]), jnp.int32),
        max_q_len=3,
    )
    assert error(y[:-2], batch.want(0, 3).reshape(-1, HIDDEN)[take]) < 1e-5
    assert not np.any(y[-2:])


def test_prefill_ignores_padding():
    config = geometry(12)
    batch = Batch(config)
    y, cache = jit_prefill(
        batch.params,
        config,
        jnp.concatenate([batch.prompt_x, jnp.full((4, HIDDEN), jnp.nan)]),
        batch.cache,
        jnp.concatenate([batch.prompt_slots, jnp.full(4, -1, jnp.int32)]),
        batch.cu_q_lens,
        layer=LAYER,
    )
    assert error(y[:-4], batch.want_prompts()) < 1e-5
    assert np.isfinite(np.asarray(cache)).all(-1).sum() == batch.prompts.sum()


def rows_of(batch, begins, ends):
    """Of tokens [begin, end) of each sequence, one sequence after another: x, slots, cu_q_lens."""
    counts = np.subtract(ends, begins)
    positions = np.concatenate([np.arange(b, e) for b, e in zip(begins, ends, strict=True)])
    request = np.repeat(np.arange(len(counts)), counts)
    x = jnp.concatenate([x[b:e] for x, b, e in zip(batch.x, begins, ends, strict=True)])
    own = slots(batch.page_table, jnp.asarray(positions, jnp.int32), PAGE, request=jnp.asarray(request, jnp.int32))
    return x, own, jnp.asarray(np.cumsum([0, *counts]), jnp.int32)


def want_rows(batch, begins, ends):
    full = [oracle(batch.weights, x) for x in batch.x]
    return np.concatenate([y[b:e] for y, b, e in zip(full, begins, ends, strict=True)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_prefill_over_cached_context(dtype):
    """Long prompts in three calls, of which one ends early and one begins late."""
    config = geometry(24)
    batch = Batch(config, prompts=(100, 10, 40), steps=0, dtype=dtype)
    cuts = ((0, 0, 0), (60, 10, 0), (90, 10, 13), (100, 10, 40))
    plan = partial(plan_context, workspace_tokens=32, page_size=PAGE, max_chunks=8)
    cache = batch.cache
    for begins, ends in itertools.pairwise(cuts):
        x, own, cu_q_lens = rows_of(batch, begins, ends)
        y, cache = jit_prefill(
            batch.params,
            config,
            x,
            cache,
            own,
            cu_q_lens,
            page_table=batch.page_table,
            context=plan(begins),
            layer=LAYER,
        )
        assert y.dtype == dtype
        assert error(y, want_rows(batch, begins, ends)) < TOLERANCE[dtype]


def dequantised(cache, k_scale, dtype):
    """What an fp8 cache stands for, as a cache without a scale; powers of two are exact in bfloat16."""
    return (cache.astype(jnp.float32) * k_scale).astype(dtype)


@pytest.mark.parametrize("k_scale", [0.5, 2])
def test_prefill_over_cached_context_of_fp8(k_scale):
    """Cached context is read with the layer's k_scale: the answer of the dequantised cache, and near the oracle's."""
    config = geometry(24)
    batch = Batch(config, prompts=(100, 10, 40), steps=0, dtype=jnp.bfloat16)
    before = (60, 9, 0)
    scales = jnp.full(LAYERS, jnp.nan).at[LAYER].set(k_scale)
    x, own, cu_q_lens = rows_of(batch, (0, 0, 0), before)
    cache = batch.cache.astype(jnp.float8_e4m3fn)
    _, cache = jit_prefill(batch.params, config, x, cache, own, cu_q_lens, layer=LAYER, k_scale=scales)

    x, own, cu_q_lens = rows_of(batch, before, batch.prompts)
    context = plan_context(before, workspace_tokens=32, page_size=PAGE)
    run = partial(jit_prefill, page_table=batch.page_table, context=context, layer=LAYER)
    got, cache = run(batch.params, config, x, cache, own, cu_q_lens, k_scale=scales)
    nowhere = jnp.full_like(own, -1)
    want, _ = run(batch.params, config, x, dequantised(cache, k_scale, x.dtype), nowhere, cu_q_lens)
    assert error(got, want) < TOLERANCE[jnp.bfloat16]
    assert error(got, want_rows(batch, before, batch.prompts)) < 4e-2


@pytest.mark.parametrize("q_len", [1, 3])
def test_decode_and_prefill_in_one_call(q_len):
    """Two sequences that decode (and one row of padding) beside a prompt with cached context and one without."""
    config = geometry(12)
    batch = Batch(config, prompts=(30, 5, 50, 20), steps=0)
    before = (30 - q_len, 5 - q_len, 33, 0)
    x, own, cu_q_lens = rows_of(batch, (0, 0, 0, 0), before)
    _, cache = jit_prefill(batch.params, config, x, batch.cache, own, cu_q_lens, layer=LAYER)

    x, own, cu_q_lens = rows_of(batch, before, batch.prompts)
    at, decodes = 2 * q_len, 3

    def padded(rows, value):
        return jnp.concatenate([rows[:at], jnp.full((q_len, *rows.shape[1:]), value, rows.dtype), rows[at:]])

    run = jax.jit(mixed, static_argnums=1, static_argnames=("decodes", "q_len"))
    kv_lens = jnp.array([30, 5, 0], jnp.int32)
    y, cache = run(
        batch.params,
        config,
        padded(x, jnp.nan),
        cache,
        jnp.asarray(np.insert(batch.page_table, 2, -1, axis=0)),
        kv_lens,
        padded(own, -1),
        cu_q_lens[2:] - at,
        decodes=decodes,
        q_len=q_len,
        context=plan_context(before[2:], workspace_tokens=16, page_size=PAGE),
        plan=plan_decode(kv_lens, num_heads=config.heads, cache=cache, q_len=q_len),
        layer=LAYER,
    )
    got = jnp.concatenate([y[:at], y[at + q_len :]])
    assert error(got, want_rows(batch, before, batch.prompts)) < 1e-5
    written = np.isfinite(np.asarray(cache[LAYER])).all(-1).sum()
    assert written == batch.prompts.sum()


@pytest.mark.parametrize("k_scale", [0.5, 2])
def test_decode_and_prefill_in_one_call_of_fp8(k_scale):
    """Both kinds read the cache with the layer's k_scale: the answer of the dequantised cache, near the oracle's."""
    config = geometry(12)
    batch = Batch(config, prompts=(30, 5, 50, 20), steps=0, dtype=jnp.bfloat16)
    before = (29, 4, 33, 0)
    scales = jnp.full(LAYERS, jnp.nan).at[LAYER].set(k_scale)
    x, own, cu_q_lens = rows_of(batch, (0, 0, 0, 0), before)
    cache = batch.cache.astype(jnp.float8_e4m3fn)
    _, cache = jit_prefill(batch.params, config, x, cache, own, cu_q_lens, layer=LAYER, k_scale=scales)

    x, own, cu_q_lens = rows_of(batch, before, batch.prompts)
    context = plan_context(before[2:], workspace_tokens=16, page_size=PAGE)
    table, kv_lens = jnp.asarray(batch.page_table), jnp.array([30, 5], jnp.int32)

    @jax.jit
    def run(cache, own, k_scale=None):
        return mixed(
            batch.params, config, x, cache, table, kv_lens, own, cu_q_lens[2:] - 2, decodes=2, context=context,
            layer=LAYER, k_scale=k_scale,
        )  # fmt: skip

    got, cache = run(cache, own, scales)
    want, _ = run(dequantised(cache, k_scale, x.dtype), jnp.full_like(own, -1))
    truth = want_rows(batch, before, batch.prompts)
    for rows in (slice(2), slice(2, None)):  # those that decode, and the prompts
        assert error(got[rows], want[rows]) < TOLERANCE[jnp.bfloat16]
        assert error(got[rows], truth[rows]) < 4e-2


def test_context_needs_a_page_table():
    config = geometry(12)
    batch = Batch(config)
    context = plan_context([0, 0, 0], workspace_tokens=32, page_size=PAGE)
    with pytest.raises(ValueError, match="context is given without page_table"):
        jit_prefill(
            batch.params, config, batch.prompt_x, batch.cache, batch.prompt_slots, batch.cu_q_lens, layer=LAYER,
            context=context,
        )  # fmt: skip


def test_scan_over_layers_equals_a_loop():
    """Three blocks in a row on one stacked cache, the carry of a scan with a traced layer."""
    config = geometry(12)
    batch = Batch(config)
    layers = [absorb(init_weights(jax.random.key(i), config, jnp.float32), config, jnp.float32) for i in range(LAYERS)]
    x, kv_lens, slot_mapping = batch.decode_inputs(0, 1)
    cache = jnp.zeros_like(batch.cache)

    def block(x, cache, params, layer):
        y, cache = decode(params, config, x, cache, batch.page_table, kv_lens, slot_mapping, layer=layer)
        return x + y, cache

    @partial(jax.jit, donate_argnums=1)
    def loop(x, cache):
        for i, params in enumerate(layers):
            x, cache = block(x, cache, params, i)
        return x, cache

    @partial(jax.jit, donate_argnums=1)
    def scan(x, cache):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        body = lambda carry, scanned: (block(*carry, *scanned), None)  # noqa: E731
        return jax.lax.scan(body, (x, cache), (stacked, jnp.arange(LAYERS)))[0]

    (y_loop, cache_loop), (y_scan, cache_scan) = loop(x, cache + 0), scan(x, cache + 0)
    assert error(y_scan, y_loop) < 1e-6
    assert error(cache_scan, cache_loop) < 1e-6
    assert (np.asarray(cache_scan).any(-1).sum((1, 2)) == 3).all()  # one token a sequence in every layer


@pytest.mark.parametrize("devices", [4, 8])
def test_parts_of_all_devices_sum_to_the_block(devices):
    whole, part = geometry(96), geometry(96, devices)
    batch = Batch(whole)
    x, kv_lens, slot_mapping = batch.decode_inputs(0, 1)
    total = np.zeros((len(batch.prompts), 1, HIDDEN))
    for rank in range(devices):
        weights = {
            name: jnp.take(batch.weights[name], jnp.arange(rank * shape[axis], (rank + 1) * shape[axis]), axis=axis)
            for (name, shape), axis in zip(part.weight_shapes.items(), (0, 0, 0, 0, 0, 0, 0, 1), strict=True)
            if shape != batch.weights[name].shape
        }
        params = absorb(batch.weights | weights, part, jnp.float32)
        _, cache = jit_prefill(
            params, part, batch.prompt_x, batch.cache, batch.prompt_slots, batch.cu_q_lens, layer=LAYER
        )
        y, _ = jit_decode(params, part, x, cache, batch.page_table, kv_lens, slot_mapping, layer=LAYER)
        total += np.asarray(y, np.float64)
    assert error(total, batch.want(0, 1)) < 1e-5


def test_heads_over_a_mesh():
    """Under shard_map each device attends with its heads, and the outputs are summed over the mesh axis."""
    config = geometry(24, 4)
    batch = Batch(geometry(24))
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    x, kv_lens, slot_mapping = batch.decode_inputs(0, 1)

    def both(params, cache):
        y, cache = prefill(
            params,
            config,
            batch.prompt_x,
            cache,
            batch.prompt_slots,
            batch.cu_q_lens,
            layer=LAYER,
            axis_name="heads",
        )
        z, cache = decode(
            params, config, x, cache, batch.page_table, kv_lens, slot_mapping, layer=LAYER, axis_name="heads"
        )
        return y, z, cache

    whole = jax.sharding.PartitionSpec()
    specs = {"in_specs": (partition_specs("heads"), whole), "out_specs": whole}
    y, z, _ = jax.jit(jax.shard_map(both, mesh=mesh, **specs))(batch.params, batch.cache)
    assert error(y, batch.want_prompts()) < 1e-5
    assert error(z, batch.want(0, 1)) < 1e-5


def test_fp8_cache():
    """A per-tensor fp8 cache: what the cache rounds away is all that is lost."""
    config = geometry(24)
    batch = Batch(config, dtype=jnp.bfloat16)
    k_scale = jnp.float32(0.02)
    cache = allocate_cache(batch.cache.shape[1], PAGE, dtype=jnp.float8_e4m3fn)
    _, cache = jit_prefill(
        batch.params, config, batch.prompt_x, cache, batch.prompt_slots, batch.cu_q_lens, k_scale=k_scale
    )
    assert cache.dtype == jnp.float8_e4m3fn
    x, kv_lens, slot_mapping = batch.decode_inputs(0, 1)
    y, _ = jit_decode(batch.params, config, x, cache, batch.page_table, kv_lens, slot_mapping, k_scale=k_scale)
    assert error(y, batch.want(0, 1)) < 4e-2


def test_rms_norm():
    x = jax.random.normal(jax.random.key(0), (3, 512)) * jnp.array([[1e-3], [1.0], [1e3]])
    weight = jax.random.normal(jax.random.key(1), (512,))
    wide = np.asarray(x, np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(weight, np.float64)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-5), want, rtol=1e-5)
    low = rms_norm(x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), 1e-5)
    assert low.dtype == jnp.bfloat16
    assert error(low, want) < 5e-3


def test_absorb_names_what_does_not_fit():
    config = geometry(12)
    weights = init_weights(jax.random.key(0), config)
    with pytest.raises(ValueError, match="weights lack g_proj, o_proj; a layer needs q_a_proj, "):
        absorb({name: array for name, array in weights.items() if name not in ("g_proj", "o_proj")}, config)
    with pytest.raises(ValueError, match=r"weights\['q_b_proj'\] has shape \(2304, 48\); expected \(4608, 48\)"):
        absorb(weights, geometry(24))
