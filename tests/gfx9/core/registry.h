// Instructions by name, without the suffix of their encoding.
#pragma once

#include <string>
#include <unordered_map>

#include "instruction.h"

namespace gfx9 {

using Registry = std::unordered_map<std::string, Handler>;

void define_scalar(Registry&);
void define_vector(Registry&);
void define_packed(Registry&);
void define_matrix(Registry&);
void define_lds(Registry&);
void define_global(Registry&);

// The argument and result types of a lambda.
template <class F>
struct Signature : Signature<decltype(&F::operator())> {};
template <class F, class R, class... A>
struct Signature<R (F::*)(A...) const> {
  using Result = R;
  template <template <class, class, class...> class Template>
  using Apply = Template<F, R, A...>;
};

}  // namespace gfx9
