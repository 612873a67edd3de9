"""Multi-head Latent Attention for JAX: native kernels for NVIDIA GPUs and CPUs, called under jax.jit.

L = 512 latent width, R = 64 rope width, D = L + R; B sequences, T query tokens, H query heads, P page size.
"""

from importlib.metadata import version as _version

from jax_mla._ffi import CUSTOM_CALL_TARGETS, export_checks
from jax_mla.cache import allocate_cache, copy_pages, slots, update_cache
from jax_mla.context import ContextPlan, mla_context, plan_context
from jax_mla.decode import DecodePlan, mla_decode, plan_decode
from jax_mla.dispatch import Capability, capabilities, explain, override_capabilities
from jax_mla.merge import apply_sink, merge_states
from jax_mla.pack import KernelValues, pack_kv, pack_kv_fp8
from jax_mla.prefill import mla_prefill
from jax_mla.scratch import DecodeScratch, decode_scratch
from jax_mla.sharding import sharded_decode
from jax_mla.sparse import mla_sparse_decode
from jax_mla.validation import validate

__version__ = _version("jax_mla")

__all__ = [
    "CUSTOM_CALL_TARGETS",
    "Capability",
    "ContextPlan",
    "DecodePlan",
    "DecodeScratch",
    "KernelValues",
    "allocate_cache",
    "apply_sink",
    "capabilities",
    "copy_pages",
    "decode_scratch",
    "explain",
    "export_checks",
    "merge_states",
    "mla_context",
    "mla_decode",
    "mla_prefill",
    "mla_sparse_decode",
    "override_capabilities",
    "pack_kv",
    "pack_kv_fp8",
    "plan_context",
    "plan_decode",
    "sharded_decode",
    "slots",
    "update_cache",
    "validate",
]
