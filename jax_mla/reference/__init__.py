"""Every operation in plain ``jax.numpy``: what it means, its ``"xla"`` implementation, and the oracle of its tests.

The functions take the arguments of the public ones, without ``implementation``, ``plan`` and ``batch_invariant``, and
two more: ``compute_dtype``, float32 or, under ``jax.enable_x64``, float64, which makes them the truth that every other
implementation is compared with; and ``out_dtype``, which leaves the rounding of the result out. They check nothing
(the public functions do), trace under ``jax.jit``, and mask by selection: a value that is masked is never read into a
result, NaN or not.
"""

from jax_mla.reference.attend import varying_like
from jax_mla.reference.cache import allocate_cache, copy_pages, gather_cache, slots, update_cache
from jax_mla.reference.context import gather_context, latent_dtype, mla_context, readable_context, up_project
from jax_mla.reference.decode import mla_decode
from jax_mla.reference.merge import apply_sink, merge_states
from jax_mla.reference.pack import VALUE_TILE, pack_kv, pack_kv_fp8, tile_values, untile_values
from jax_mla.reference.plan import plan_decode
from jax_mla.reference.plan_context import ContextPlan, plan_context, plan_context_traced
from jax_mla.reference.prefill import mla_prefill
from jax_mla.reference.sparse import mla_sparse_decode

__all__ = [
    "VALUE_TILE",
    "ContextPlan",
    "allocate_cache",
    "apply_sink",
    "copy_pages",
    "gather_cache",
    "gather_context",
    "latent_dtype",
    "merge_states",
    "mla_context",
    "mla_decode",
    "mla_prefill",
    "mla_sparse_decode",
    "pack_kv",
    "pack_kv_fp8",
    "plan_context",
    "plan_context_traced",
    "plan_decode",
    "readable_context",
    "slots",
    "tile_values",
    "untile_values",
    "up_project",
    "update_cache",
    "varying_like",
]
