// Managed memory of the HIP runtime, which host and device share.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <new>
#include <string>

namespace mla::test {

// A function of the runtime that the process has loaded.
template <class Function>
Function hip_function(const char* name) {
  static void* const newest = dlopen("libamdhip64.so.7", RTLD_NOW | RTLD_LOCAL);
  static void* const library = newest != nullptr ? newest : dlopen("libamdhip64.so.6", RTLD_NOW | RTLD_LOCAL);
  return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
}

template <class T>
struct ManagedAllocator {
  using value_type = T;

  ManagedAllocator() = default;
  template <class U>
  ManagedAllocator(const ManagedAllocator<U>&) {}

  T* allocate(size_t count) {
    constexpr unsigned kAttachGlobal = 1;
    static const auto allocate_managed = hip_function<int (*)(void**, size_t, unsigned)>("hipMallocManaged");
    void* memory = nullptr;
    if (allocate_managed == nullptr || allocate_managed(&memory, count * sizeof(T), kAttachGlobal) != 0) {
      throw std::bad_alloc();
    }
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) {
    static const auto release = hip_function<int (*)(void*)>("hipFree");
    release(memory);
  }
  template <class U>
  bool operator==(const ManagedAllocator<U>&) const {
    return true;
  }
  template <class U>
  bool operator!=(const ManagedAllocator<U>&) const {
    return false;
  }
};

}  // namespace mla::test
