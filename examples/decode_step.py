"""A decode step of several Kimi-K3 attention layers under one jit, with speculative tokens and a stacked cache.

    python examples/decode_step.py

Four sequences hold different numbers of tokens, and each proposes a different number of new ones (0 to 4), as after
speculative decoding with different acceptance. The layers run in a `lax.scan` whose carry is the stacked cache: it is
donated, updated in place, and never copied. One plan serves all layers of the step.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jax_mla
from jax_mla.layer import LayerConfig, absorb, decode, init_weights

LAYERS, PAGE, PAGES, MAX_Q = 3, 64, 16, 4
CONFIG = LayerConfig(hidden_size=256, q_lora_rank=128, devices=4)  # 24 of Kimi-K3's 96 heads; small projections


def step(params, cache, x, page_table, kv_lens, slot_mapping, cu_q_lens):
    """x [T, hidden] through all layers -> y [T, hidden], cache."""
    ragged = {"cu_q_lens": cu_q_lens, "max_q_len": MAX_Q}
    plan = jax_mla.plan_decode(kv_lens, num_heads=CONFIG.heads, cache=cache, **ragged)

    def block(carry, layer_and_params):
        layer, layer_params = layer_and_params
        x, cache = carry
        y, cache = decode(
            layer_params, CONFIG, x, cache, page_table, kv_lens, slot_mapping, layer=layer, plan=plan, **ragged
        )
        return (x + y, cache), None

    (y, cache), _ = jax.lax.scan(block, (x, cache), (jnp.arange(LAYERS, dtype=jnp.int32), params))
    return y, cache


def main() -> None:
    layers = [absorb(init_weights(jax.random.key(i), CONFIG), CONFIG) for i in range(LAYERS)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

    rng = np.random.default_rng(0)
    cache = jax_mla.allocate_cache(PAGES, PAGE, layers=LAYERS)
    page_table = jnp.asarray(rng.permutation(PAGES).reshape(4, -1), jnp.int32)
    cached, proposed = np.array([13, 200, 64, 100]), np.array([1, 4, 2, 0])
    kv_lens = jnp.asarray(cached + proposed, jnp.int32)
    cu_q_lens = jnp.asarray(np.concatenate([[0], proposed.cumsum()]), jnp.int32)

    request = np.repeat(np.arange(4), proposed)
    position = np.concatenate([np.arange(start, start + n) for start, n in zip(cached, proposed, strict=True)])
    slot_mapping = jax_mla.slots(
        page_table, jnp.asarray(position, jnp.int32), PAGE, request=jnp.asarray(request, jnp.int32)
    )
    jax_mla.validate(
        cache, page_table=page_table, kv_lens=kv_lens, cu_q_lens=cu_q_lens, max_q_len=MAX_Q,
        slot_mapping=slot_mapping, layer=0,
    )  # fmt: skip

    x = jnp.asarray(rng.standard_normal((int(proposed.sum()), CONFIG.hidden_size)), jnp.bfloat16)
    jitted = jax.jit(step, donate_argnames="cache")
    y, cache = jitted(params, cache, x, page_table, kv_lens, slot_mapping, cu_q_lens)
    print(jax_mla.explain("mla_decode", num_heads=CONFIG.heads, q_len=MAX_Q))
    print(f"{x.shape[0]} tokens of {len(cached)} sequences through {LAYERS} layers: y {y.shape} in {y.dtype}")
    print("finite:", bool(jnp.isfinite(y.astype(jnp.float32)).all()))


if __name__ == "__main__":
    main()
