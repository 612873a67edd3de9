// Every handler of the module; module.cc hands them to Python. One declaration for all platforms.
#pragma once

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(jax_mla_plan_decode);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jax_mla_decode);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jax_mla_sparse_decode);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jax_mla_update_cache);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jax_mla_merge_states);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jax_mla_gather_context);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jax_mla_pack_kv);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jax_mla_pack_kv_fp8);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jax_mla_prefill);
