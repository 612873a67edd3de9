// What the module says about operations whose kernels a build may lack. Their own entry functions take the place of
// these at link time.
#include "kernels/rocm/launch.h"

namespace mla {
namespace {

Error absent(const char* operation) { return std::string("jax_mla: this build has no AMD kernels for ") + operation; }

}  // namespace

[[gnu::weak]] Error decode(const DecodeParams&, const Device&) { return absent("mla_decode"); }
[[gnu::weak]] Error sparse_decode(const SparseDecodeParams&, const Device&) { return absent("mla_sparse_decode"); }
[[gnu::weak]] Error prefill(const PrefillParams&, const Device&) { return absent("mla_prefill"); }

}  // namespace mla
