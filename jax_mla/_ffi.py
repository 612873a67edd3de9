"""The boundary to native code, and the only file that names custom-call targets, types attributes and registers.

Each function here is one custom call on flat operands. An operand that may be absent travels as an empty array; a
scalar travels as a one-element array; scratch is an extra result, dropped here.
"""

from __future__ import annotations

import functools
import importlib
import pathlib
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from jax_mla.heads import HeadSpecification

OLDEST_JAXLIB = (0, 10, 2)

# Our platform names (also jax.lax.platform_dependent's) -> (module, the platform's name at registration).
PLATFORMS = {"cpu": ("jax_mla._cpu", "cpu"), "cuda": ("jax_mla._cuda", "CUDA"), "rocm": ("jax_mla._rocm", "ROCM")}

_PLAN_DECODE = "jax_mla_plan_decode"
_DECODE = "jax_mla_decode"
_UPDATE_CACHE = "jax_mla_update_cache"
_MERGE_STATES = "jax_mla_merge_states"
_PACK_KV = "jax_mla_pack_kv"
_PACK_KV_FP8 = "jax_mla_pack_kv_fp8"
_PREFILL = "jax_mla_prefill"
_GATHER_CONTEXT = "jax_mla_gather_context"
_SPARSE_DECODE = "jax_mla_sparse_decode"

CUSTOM_CALL_TARGETS = (
    _PLAN_DECODE, _DECODE, _UPDATE_CACHE, _MERGE_STATES, _PACK_KV, _PACK_KV_FP8, _PREFILL, _GATHER_CONTEXT,
    _SPARSE_DECODE,
)  # fmt: skip


def check_jaxlib(version: str) -> None:
    """Raises ImportError for a jaxlib that would refuse our handlers and take its whole backend down with them."""
    found = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if found < OLDEST_JAXLIB:
        oldest = ".".join(map(str, OLDEST_JAXLIB))
        raise ImportError(
            f"jax_mla needs jaxlib >= {oldest}, found {version}: its kernels are built against the FFI headers of "
            f"{oldest}, which an older jaxlib refuses. Install a newer one: pip install 'jax>={oldest}'"
        )


def api_version(c_api_header: str) -> tuple[int, int] | None:
    """The FFI API version (major, minor) that XLA's header defines; None where it defines none."""
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR)\s+(\d+)", c_api_header))
    return (int(found["MAJOR"]), int(found["MINOR"])) if len(found) == 2 else None


def check_api_version(name: str, built: tuple[int, int], supported: tuple[int, int] | None) -> None:
    """Raises ImportError for a module built with newer headers than jaxlib's: registering it would end its backend."""
    if supported is not None and built > supported:
        raise ImportError(
            f"{name} was built for version {built[0]}.{built[1]} of XLA's FFI, and jaxlib {jaxlib.__version__} has "
            f"{supported[0]}.{supported[1]}. Build jax_mla against jaxlib {'.'.join(map(str, OLDEST_JAXLIB))}, as "
            "pip's isolated build does, or install a newer jaxlib"
        )


@functools.cache
def _jaxlib_api_version() -> tuple[int, int] | None:
    header = pathlib.Path(jaxlib.__file__).parent / "include" / "xla" / "ffi" / "api" / "c_api.h"
    return api_version(header.read_text()) if header.is_file() else None


def _load(platform: str) -> types.ModuleType | None:
    """The platform's native module, or None where it was not built."""
    name, registered_as = PLATFORMS[platform]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        if platform == "cpu":  # always built, so this is a source tree that shadows the installed package
            raise ImportError(
                f"{name} is missing beside {__file__}: this is jax_mla's source tree. Install it (pip install .), and "
                "run Python elsewhere or with -P, so that it imports the installed package"
            ) from None
        return None
    check_api_version(name, module.api_version(), _jaxlib_api_version())
    for target, handler in module.handlers().items():
        jax.ffi.register_ffi_target(target, handler, platform=registered_as)
    return module


check_jaxlib(jaxlib.__version__)
# Registering for CUDA or ROCm on a machine without such a GPU is harmless, and lets it lower programs for one.
MODULES: dict[str, types.ModuleType] = {p: m for p in PLATFORMS if (m := _load(p)) is not None}


@functools.cache
def variant_number(platform: str, variant: str | None) -> int:
    """The attribute `variant`: 0 leaves the choice to the machine that runs, else the place in the module's list."""
    return 0 if variant is None else 1 + MODULES[platform].variants().index(variant)


def _varying_axes(operands: Sequence[jax.Array]) -> tuple[str, ...]:
    """The shard_map axes over which any operand differs between devices."""
    axes: set[str] = set()
    for operand in operands:
        axes |= getattr(jax.typeof(operand).manual_axis_type, "varying", frozenset())
    return tuple(sorted(axes))


def _call(target: str, results: Any, operands: Sequence[jax.Array], *, aliases: Any = None, **attributes: Any) -> Any:
    call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    outputs = call(*operands, **attributes)
    # shard_map's check types what a custom call returns as equal on all devices; it varies where an operand does.
    if axes := _varying_axes(operands):
        outputs = jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), outputs)
    return outputs


def _shape(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _optional(x: jax.Array | None, dtype: Any) -> jax.Array:
    """[n] or [] -> [n], None -> [0]."""
    return jnp.zeros((0,), dtype) if x is None else jnp.asarray(x, dtype).reshape(-1)


def plan_shapes(heads: HeadSpecification, batch: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of a plan: items [max_items, 8], part_offsets [parts + 1], tile_splits [tiles, 2]."""
    return (
        _shape((heads.max_items(batch), 8), jnp.int32),
        _shape((heads.parts + 1,), jnp.int32),
        _shape((batch * heads.row_tiles, 2), jnp.int32),
    )


def partial_shapes(heads: HeadSpecification, batch: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of the scratch that split tiles write: out [max_partials, tile_rows, 512], lse [max_partials, tile_rows]."""
    partials = (heads.max_partials(batch), heads.tile_rows)
    return _shape((*partials, 512), jnp.float32), _shape(partials, jnp.float32)


def plan_decode(
    kv_lens: jax.Array,
    cu_q_lens: jax.Array | None,
    *,
    heads: HeadSpecification,
    overhead_blocks: int,
    min_part_blocks: int,
    few_pieces: int,
    slack: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """kv_lens [B], cu_q_lens [B + 1] -> items, part_offsets and tile_splits, as in plan_shapes."""
    return _call(
        _PLAN_DECODE,
        plan_shapes(heads, kv_lens.shape[0]),
        (kv_lens, _optional(cu_q_lens, jnp.int32)),
        heads=np.int32(heads.padded_heads),
        max_q_len=np.int32(heads.max_q_len),
        tile_rows=np.int32(heads.tile_rows),
        overhead_blocks=np.int32(overhead_blocks),
        min_part_blocks=np.int32(min_part_blocks),
        few_pieces=np.int32(few_pieces),
        slack=np.int32(slack),
        batch_invariant=np.bool_(heads.batch_invariant),
    )


def decode(
    q: jax.Array,
    q_rope: jax.Array | None,
    cache: jax.Array,
    layer: jax.Array | None,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    plan: tuple[jax.Array, jax.Array, jax.Array],
    *,
    heads: HeadSpecification,
    scale: float,
    causal: bool,
    variant: int,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """q [T, H, 576] (or [T, H, 512] beside q_rope [T, H, 64]) over cache [layers, pages, P, 576] -> out, lse."""
    tokens, num_heads, _ = q.shape
    if q_rope is None:
        q_rope = jnp.zeros((0,), q.dtype)
    results = (
        _shape((tokens, num_heads, 512), out_dtype),
        _shape((tokens, num_heads), jnp.float32),
        *partial_shapes(heads, page_table.shape[0]),
    )
    operands = (
        q,
        q_rope,
        cache,
        _optional(layer, jnp.int32),
        page_table,
        kv_lens,
        _optional(cu_q_lens, jnp.int32),
        _optional(q_scale, jnp.float32),
        _optional(k_scale, jnp.float32),
        *plan,
    )
    out, lse, _, _ = _call(
        _DECODE,
        results,
        operands,
        max_q_len=np.int32(heads.max_q_len),
        variant=np.int32(variant),
        scale=np.float32(scale),
        causal=np.bool_(causal),
    )
    return out, lse


def sparse_decode(
    q: jax.Array,
    q_rope: jax.Array | None,
    cache: jax.Array,
    layer: jax.Array | None,
    indices: jax.Array,
    topk_lens: jax.Array | None,
    sink: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    *,
    heads: HeadSpecification,
    splits: int,
    scale: float,
    variant: int,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """q [T, H, 576] (or [T, H, 512] beside q_rope [T, H, 64]), cache [layers, pages, P, width], indices [T, K],
    topk_lens [T], sink [H] -> out [T, H, 512], lse [T, H]."""
    tokens, num_heads, _ = q.shape
    if q_rope is None:
        q_rope = jnp.zeros((0,), q.dtype)
    partials = (0 if splits == 1 else splits, tokens, num_heads)
    results = (
        _shape((tokens, num_heads, 512), out_dtype),
        _shape((tokens, num_heads), jnp.float32),
        _shape((*partials, 512), jnp.float32),
        _shape(partials, jnp.float32),
    )
    operands = (
        q,
        q_rope,
        cache,
        _optional(layer, jnp.int32),
        indices,
        _optional(topk_lens, jnp.int32),
        _optional(sink, jnp.float32),
        _optional(q_scale, jnp.float32),
        _optional(k_scale, jnp.float32),
    )
    out, lse, _, _ = _call(
        _SPARSE_DECODE,
        results,
        operands,
        splits=np.int32(splits),
        tile_rows=np.int32(heads.tile_rows),
        variant=np.int32(variant),
        scale=np.float32(scale),
    )
    return out, lse


# Up to here every token looks for a later one with its slot; beyond, a hash table in scratch finds them.
_OWNER_SCAN_TOKENS = 1024


def update_cache(
    cache: jax.Array,
    kv_c: jax.Array,
    k_pe: jax.Array,
    slot_mapping: jax.Array,
    layer: jax.Array | None,
    k_scale: jax.Array | None,
    *,
    saturate: bool,
    power_of_two_scales: bool,
) -> jax.Array:
    """cache [layers, pages, P, width], aliased; kv_c [T, 512], k_pe [T, 64], slot_mapping [T] -> cache."""
    tokens = slot_mapping.shape[0]
    owner_slots = 0 if tokens <= _OWNER_SCAN_TOKENS else 1 << (2 * tokens - 1).bit_length()
    # XLA may fold `slice -> aliased call -> update slice` into one fusion and silently drop the alias; barriers on
    # both sides keep it from doing so.
    cache = jax.lax.optimization_barrier(cache)
    operands = (cache, kv_c, k_pe, slot_mapping, _optional(layer, jnp.int32), _optional(k_scale, jnp.float32))
    results = (_shape(cache.shape, cache.dtype), _shape((owner_slots, 2), jnp.int32))
    updated, _ = _call(
        _UPDATE_CACHE, results, operands, aliases={0: 0}, saturate=np.bool_(saturate),
        power_of_two_scales=np.bool_(power_of_two_scales),
    )  # fmt: skip
    return jax.lax.optimization_barrier(updated)


def merge_states(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """out [rows, width] and lse [rows] of two sides -> out, lse."""
    results = (_shape(out_a.shape, out_a.dtype), _shape(lse_a.shape, jnp.float32))
    return _call(_MERGE_STATES, results, (out_a, lse_a, out_b, lse_b))


def prefill_scratch_bytes(tokens: int, stored: int, num_heads: int, batch: int) -> int:
    """What gfx950's kernel for 8-bit queries, keys and values needs for its plan and its partial results.

    As limits_of in kernels/prefill/gfx950/shape.h has it: 32 bytes of plan and for each piece of a tile of 256 queries,
    16 for each tile that is cut, and for each piece of those and each head 256 rows of 128 columns and an lse in fp32.
    """
    workgroups, tile, block, least_blocks = 256, 256, 128, 8
    tiles = tokens // tile + batch + 2
    cuts = -(-stored // (block * least_blocks))
    split = 0 if cuts < 2 else min(tiles * cuts, 2 * workgroups // num_heads)
    split = split if split >= 2 else 0
    lists = 32 + (tiles + split) * 32 + split // 2 * 16
    return -(-lists // 16) * 16 + split * num_heads * tile * (128 + 1) * 4


def prefill(
    q: jax.Array,
    k: jax.Array,
    k_pe: jax.Array | None,
    v: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    key_mask: jax.Array | None,
    scales: Sequence[jax.Array | None],
    carry: tuple[jax.Array, jax.Array] | None,
    *,
    value_offset: int,
    scale: float,
    causal: bool,
    variant: int,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """q [T, H, 192], k [S, H, 192], v [S, H, 128 or 256], key_mask [ceil(S / 32)] uint32 -> out [T, H, 128], lse.

    Beside k_pe [S, 64 or 576], k is [S, H, 128 or 256], of which the first 128 columns are a key's nope part. v may be
    KernelValues' tiles [ceil(S / 16), H, 128, 16]. scales: of q, k and v. carry: out and lse in fp32, aliased with the
    results, which are then out_dtype float32.
    """
    tokens, num_heads, _ = q.shape
    only_8_bits = q.dtype == v.dtype == jnp.float8_e4m3fn and v.ndim == 3  # what gfx950 alone has a kernel for
    scratch = prefill_scratch_bytes(tokens, k.shape[0], num_heads, cu_q_lens.shape[0] - 1) if only_8_bits else 0
    results = (
        _shape((tokens, num_heads, 128), out_dtype),
        _shape((tokens, num_heads), jnp.float32),
        _shape((scratch,), jnp.uint8),
    )
    aliases = None
    state = (jnp.zeros((0,), jnp.float32),) * 2
    inputs = (
        q,
        k,
        jnp.zeros((0,), k.dtype) if k_pe is None else k_pe,
        v,
        cu_q_lens,
        cu_kv_lens,
        _optional(key_mask, jnp.uint32),
        *(_optional(s, jnp.float32) for s in scales),
    )
    if carry is not None:
        # As for update_cache: between barriers, so that no fusion drops the alias.
        state = jax.lax.optimization_barrier(carry)
        aliases = {len(inputs): 0, len(inputs) + 1: 1}
    out, lse, _ = _call(
        _PREFILL,
        results,
        (*inputs, *state),
        aliases=aliases,
        value_offset=np.int32(value_offset),
        variant=np.int32(variant),
        scale=np.float32(scale),
        causal=np.bool_(causal),
    )
    return (out, lse) if carry is None else jax.lax.optimization_barrier((out, lse))


def pack_kv(kv_up: jax.Array, k_pe: jax.Array, k_scale: jax.Array | None) -> jax.Array:
    """kv_up [T, H, 256], k_pe [T, 64] or [T, 576] -> k [T, H, 192]."""
    tokens, num_heads, _ = kv_up.shape
    k = _shape((tokens, num_heads, 192), kv_up.dtype)
    return _call(_PACK_KV, k, (kv_up, k_pe, _optional(k_scale, jnp.float32)))


def pack_kv_fp8(
    kv_up: jax.Array,
    k_pe: jax.Array,
    k_scale: jax.Array | None,
    packed_k_scale: jax.Array | None,
    packed_v_scale: jax.Array | None,
    *,
    dtype: Any,
    saturate: bool,
    tiled: bool,
) -> tuple[jax.Array, jax.Array]:
    """kv_up [T, H, 256], k_pe [T, 64] or [T, 576] -> k [T, H, 192], v [T, H, 128] in `dtype`.

    tiled: v comes as KernelValues' tiles [ceil(T / 16), H, 128, 16].
    """
    tokens, num_heads, _ = kv_up.shape
    v_shape = (-(-tokens // 16), num_heads, 128, 16) if tiled else (tokens, num_heads, 128)
    results = (_shape((tokens, num_heads, 192), dtype), _shape(v_shape, dtype))
    scales = (_optional(s, jnp.float32) for s in (k_scale, packed_k_scale, packed_v_scale))
    return _call(_PACK_KV_FP8, results, (kv_up, k_pe, *scales), saturate=np.bool_(saturate))


def gather_context(
    cache: jax.Array,
    layer: jax.Array | None,
    k_scale: jax.Array | None,
    page_table: jax.Array,
    starts: jax.Array,
    cu_kv_lens: jax.Array,
    *,
    workspace_tokens: int,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """cache [layers, pages, P, width], page_table [B, max_pages], starts [B], cu_kv_lens [B + 1]
    -> latent [workspace_tokens, 512], rope [workspace_tokens, 64] in `dtype`."""
    results = (_shape((workspace_tokens, 512), dtype), _shape((workspace_tokens, 64), dtype))
    scale_and_layer = (_optional(layer, jnp.int32), _optional(k_scale, jnp.float32))
    return _call(_GATHER_CONTEXT, results, (cache, *scale_and_layer, page_table, starts, cu_kv_lens))


def export_checks() -> list[Callable[..., Any]]:
    """What jax.export needs as `disabled_checks` to let our custom calls through."""
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in CUSTOM_CALL_TARGETS]
