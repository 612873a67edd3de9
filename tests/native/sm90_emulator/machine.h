// One CTA of a Hopper GPU, as far as the kernels use it: threads that take turns in random order, shared memory,
// barriers, the tensor copy engine and asynchronous matrix products. It follows the PTX manual, and is as late and as
// disorderly as that allows: a copy lands any time after it was asked for, in any order, and a product reads its
// operands when it is waited for. So what only works because the hardware happens to be quick fails here.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

// CUDA's headers give the vector and element types; its qualifiers mean nothing here.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#undef __device__
#undef __global__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
#define __device__
#define __global__ inline
#define __host__
#define __shared__
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <vector>

// The namespace of the kernel that is emulated, which declares its shared memory there.
#if !defined(MLA_EMULATED)
#define MLA_EMULATED sm90
#endif

namespace mla::MLA_EMULATED {
extern unsigned char shared_base[];
}

namespace mla::emulator {

constexpr int kWarpThreads = 32;
constexpr uint32_t kSharedStart = 1024;  // the address of the first byte that a kernel may use
constexpr uint32_t kSharedBytes = 227 * 1024;

inline void require(bool condition, const char* text) {
  if (condition) return;
  std::fprintf(stderr, "the emulated kernel broke a rule: %s\n", text);
  std::abort();
}

// As the copy engine knows an array: what cuTensorMapEncodeTiled packs into 128 bytes.
struct TensorMap {
  const char* data;
  int32_t rank;
  int32_t boxes[5];
  int64_t sizes[5], strides[5];
  int32_t element_bytes = 2;

  int32_t line_bytes() const { return boxes[0] * element_bytes; }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

struct Barrier {  // an mbarrier's 64 bits
  uint16_t count, pending;
  int32_t bytes : 24;  // announced, and not yet delivered
  uint32_t phase : 8;
};
static_assert(sizeof(Barrier) == 8);

using Product = std::function<void()>;
using AsyncCopy = std::function<void()>;

struct Thread {
  ucontext_t context;
  jmp_buf resume;
  std::vector<char> stack;
  bool started = false, ended = false;
  std::vector<Product> open;                // not yet committed
  std::deque<std::vector<Product>> groups;  // committed
  const uint32_t* fragment = nullptr;       // left operand in registers
  std::vector<AsyncCopy> copying;           // cp.async, not yet committed
  std::deque<std::vector<AsyncCopy>> copies;
};

struct Warp {
  std::array<std::array<uint32_t, kWarpThreads>, 6> values;  // what its threads brought to a meeting
  int arrived = 0, meetings = 0;
  uint32_t result = 0;
};

struct NamedBarrier {
  int arrived = 0, phase = 0;
  bool any = false, result = false;  // of the values brought to this phase, to the last one
};

struct Copy {
  uint32_t shared, barrier;
  const TensorMap* map;  // null: plain bytes
  std::array<int32_t, 5> start;
  const void* data = nullptr;
  uint32_t bytes = 0;
  std::vector<AsyncCopy> own = {};  // where it `arrives`: a thread's cp.async, and nothing else
  bool arrives = false;
};

class Machine {
 public:
  std::mt19937 random;
  uint32_t block = 0, blocks = 1;
  int current = 0, count = 0;

  Thread& thread() { return threads_[current]; }
  Thread& thread_at(int index) { return threads_[index]; }
  Warp& warp() { return warps_[current / kWarpThreads]; }
  int lane() const { return current % kWarpThreads; }

  // Runs `kernel` on `count` threads of block `index`. False: some threads wait for what never comes.
  bool run(uint32_t index, int count, const std::function<void()>& kernel) {
    block = index;
    this->count = count;
    kernel_ = &kernel;
    if (static_cast<int>(threads_.size()) < count) threads_.resize(count);
    warps_.assign(count / kWarpThreads, {});
    named_ = {};
    copies_.clear();
    std::memset(MLA_EMULATED::shared_base, 0xFF, kSharedBytes);  // NaN
    for (int i = 0; i < count; ++i) {
      require(threads_[i].open.empty() && threads_[i].groups.empty(), "products that nobody waited for");
      threads_[i].started = threads_[i].ended = false;
    }
    std::vector<uint32_t> pace(warps_.size());  // of eight turns, how many a warp gets
    for (uint32_t& turns : pace) turns = 1 + random() % 8;
    const uint32_t engine = 1 + random() % 4;
    constexpr int kPatience = 3000000;
    for (int turn = 0; turn < kPatience; ++turn) {
      bool running = false;
      for (current = 0; current < count; ++current) {
        if (thread().ended) continue;
        running = true;
        if (random() % 8 < pace[current / kWarpThreads]) resume();
      }
      if (!running) {
        require(copies_.empty(), "copies that nobody waited for");
        return true;
      }
      for (uint32_t i = 0; i < engine && !copies_.empty(); ++i) deliver();
    }
    return false;
  }

  // The other threads' turn.
  void yield() {
    if (_setjmp(thread().resume) == 0) _longjmp(scheduler_, 1);
  }
  void maybe_yield() {
    if (random() % 4 == 0) yield();
  }

  template <class Condition>
  void wait_until(Condition condition) {
    while (!condition()) yield();
  }

  // A collective instruction of a warp: the last thread to arrive does what it does.
  template <class Action>
  void meet(Action action) {
    Warp& w = warp();
    const int meeting = w.meetings;
    if (++w.arrived == kWarpThreads) {
      action(w);
      w.arrived = 0;
      ++w.meetings;
    } else {
      wait_until([&] { return w.meetings != meeting; });
    }
  }

  // Whether any thread brought true. (Nobody passes the barrier once more before all have read that.)
  bool named_barrier(int name, int count, bool wait, bool value = false) {
    NamedBarrier& barrier = named_[name];
    const int phase = barrier.phase;
    barrier.any = barrier.any || value;
    if (++barrier.arrived == count) {
      barrier.arrived = 0;
      barrier.result = barrier.any;
      barrier.any = false;
      ++barrier.phase;
    } else if (wait) {
      wait_until([&] { return barrier.phase != phase; });
    }
    return barrier.result;
  }

  unsigned char* shared(uint32_t address) {
    require(address >= kSharedStart && address < kSharedStart + kSharedBytes, "an address outside shared memory");
    return MLA_EMULATED::shared_base + (address - kSharedStart);
  }

  Barrier& barrier(uint32_t address) {
    require(address % 8 == 0, "an mbarrier is aligned to 8 bytes");
    return *reinterpret_cast<Barrier*>(shared(address));
  }

  void arrive(uint32_t address) {
    require(barrier(address).pending > 0, "more arrivals at an mbarrier than it counts");
    --barrier(address).pending;
    settle(barrier(address));
  }

  void copy(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int32_t rank, std::array<int32_t, 5> start) {
    const auto* tensor = reinterpret_cast<const TensorMap*>(map);
    require(tensor->rank == rank, "a copy has as many coordinates as its tensor map");
    const int line_bytes = tensor->line_bytes();
    require(line_bytes == 128 || line_bytes == 64, "a line has 128 or 64 bytes");
    require(shared % (8 * line_bytes) == 0, "a swizzled box starts at an atom");
    copies_.push_back({shared, barrier, tensor, start});
  }

  void copy(uint32_t shared, const void* data, uint32_t bytes, uint32_t barrier) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    require(shared % 16 == 0 && address % 16 == 0 && bytes % 16 == 0, "bytes are copied in aligned units of 16");
    copies_.push_back({shared, barrier, nullptr, {}, data, bytes});
  }

  // The thread's cp.async so far, and then its arrival at the barrier.
  void arrive_behind_copies(uint32_t barrier) {
    Thread& t = thread();
    require(t.copies.empty(), "copies of a committed group are waited for, not counted by an mbarrier");
    Copy copy{0, barrier, nullptr, {}};
    copy.own.swap(t.copying);
    copy.arrives = true;
    copies_.push_back(std::move(copy));
  }

  // Where the 128-byte swizzle puts a byte.
  static uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
  // And that of lines of 64 bytes.
  static uint32_t swizzled_64(uint32_t address) { return address ^ (address >> 7 & 3) << 4; }

 private:
  void resume() {
    if (_setjmp(scheduler_) != 0) return;
    Thread& t = thread();
    if (t.started) _longjmp(t.resume, 1);
    t.started = true;
    t.stack.resize(128 * 1024);
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.data();
    t.context.uc_stack.ss_size = t.stack.size();
    t.context.uc_link = nullptr;
    makecontext(&t.context, &Machine::enter, 0);
    setcontext(&t.context);
  }

  static void enter();

  static void settle(Barrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    barrier.pending = barrier.count;
    ++barrier.phase;
  }

  // Any one of the copies that are on their way.
  void deliver() {
    const size_t chosen = random() % copies_.size();
    const Copy copy = std::move(copies_[chosen]);
    copies_.erase(copies_.begin() + static_cast<int64_t>(chosen));
    if (copy.arrives) {
      for (const AsyncCopy& each : copy.own) each();
      arrive(copy.barrier);
      return;
    }
    if (copy.map == nullptr) {
      std::memcpy(shared(copy.shared), copy.data, copy.bytes);
      deliver(copy.barrier, copy.bytes);
      return;
    }
    const TensorMap& map = *copy.map;
    int64_t lines = 1;
    for (int axis = 1; axis < map.rank; ++axis) lines *= map.boxes[axis];
    const int line_bytes = map.line_bytes();
    for (int64_t line = 0; line < lines; ++line) {
      bool inside = true;
      int64_t offset = 0, rest = line;
      for (int axis = 1; axis < map.rank; ++axis) {
        const int64_t at = int64_t{copy.start[axis]} + rest % map.boxes[axis];
        rest /= map.boxes[axis];
        inside = inside && at >= 0 && at < map.sizes[axis];
        offset += at * map.strides[axis];
      }
      for (int byte = 0; byte < line_bytes; byte += 16) {
        const uint32_t address = copy.shared + static_cast<uint32_t>(line * line_bytes + byte);
        unsigned char* target = shared(line_bytes == 128 ? swizzled(address) : swizzled_64(address));
        if (inside) {
          std::memcpy(target, map.data + offset + byte, 16);
        } else {
          std::memset(target, 0, 16);
        }
      }
    }
    deliver(copy.barrier, static_cast<uint32_t>(lines * line_bytes));
  }

  void deliver(uint32_t address, uint32_t bytes) {
    Barrier& done = barrier(address);
    done.bytes -= static_cast<int32_t>(bytes);
    settle(done);
  }

  std::deque<Thread> threads_;
  std::vector<Warp> warps_;
  std::array<NamedBarrier, 16> named_;
  std::vector<Copy> copies_;
  const std::function<void()>* kernel_ = nullptr;
  jmp_buf scheduler_;
};

inline Machine machine;

inline void Machine::enter() {
  (*machine.kernel_)();
  machine.thread().ended = true;
  _longjmp(machine.scheduler_, 1);
}

struct ThreadIndex {
  struct X {
    operator unsigned() const { return static_cast<unsigned>(machine.current); }
  } x;
};

struct BlockIndex {
  struct X {
    operator unsigned() const { return machine.block; }
  } x;
};

struct GridSize {
  struct X {
    operator unsigned() const { return machine.blocks; }
  } x;
};

}  // namespace mla::emulator

#define threadIdx (mla::emulator::ThreadIndex{})
#define blockIdx (mla::emulator::BlockIndex{})
#define gridDim (mla::emulator::GridSize{})

// Two meetings: nobody brings a value for the next before everyone has taken one from this.
template <class T>
T __shfl_sync(uint32_t, T value, int source) {
  static_assert(sizeof(T) == 4);
  auto& machine = mla::emulator::machine;
  std::memcpy(&machine.warp().values[0][machine.lane()], &value, 4);
  machine.meet([](auto&) {});
  std::memcpy(&value, &machine.warp().values[0][source], 4);
  machine.meet([](auto&) {});
  return value;
}

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int distance) {
  return __shfl_sync(mask, value, mla::emulator::machine.lane() ^ distance);
}

template <class Combine>
int32_t combine_lanes(int32_t value, Combine combine) {
  int32_t result = __shfl_sync(0xFFFFFFFF, value, 0);
  for (int lane = 1; lane < mla::emulator::kWarpThreads; ++lane) {
    result = combine(result, __shfl_sync(0xFFFFFFFF, value, lane));
  }
  return result;
}

inline int32_t __reduce_add_sync(uint32_t, int32_t value) { return combine_lanes(value, std::plus<int32_t>()); }

inline int32_t __reduce_min_sync(uint32_t, int32_t value) {
  return combine_lanes(value, [](int32_t a, int32_t b) { return a < b ? a : b; });
}

// Lanes without a source keep their own.
template <class T>
T __shfl_up_sync(uint32_t mask, T value, int distance) {
  const int lane = mla::emulator::machine.lane();
  return __shfl_sync(mask, value, lane >= distance ? lane - distance : lane);
}

inline uint32_t __ballot_sync(uint32_t, bool bit) {
  auto& machine = mla::emulator::machine;
  machine.warp().values[0][machine.lane()] = bit;
  machine.meet([](mla::emulator::Warp& warp) {
    warp.result = 0;
    for (int lane = 0; lane < mla::emulator::kWarpThreads; ++lane) warp.result |= warp.values[0][lane] << lane;
  });
  const uint32_t result = machine.warp().result;
  machine.meet([](auto&) {});
  return result;
}

inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value) {
  for (int distance = 1; distance < 32; distance *= 2) value = std::max(value, __shfl_xor_sync(mask, value, distance));
  return value;
}

inline bool __any_sync(uint32_t mask, bool bit) { return __ballot_sync(mask, bit) != 0; }

inline float __fdividef(float a, float b) { return a / b; }

inline int __popc(uint32_t value) { return __builtin_popcount(value); }

inline int __ffs(uint32_t value) { return __builtin_ffs(static_cast<int>(value)); }

inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xFFFF, b & 0xFFFF);
}

inline int __clz(int value) { return __builtin_clz(static_cast<unsigned>(value)); }

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Loads by way of some caches, or past them.
template <class T>
T __ldg(const T* source) {
  mla::emulator::require(reinterpret_cast<uintptr_t>(source) % sizeof(T) == 0, "loads are aligned to their size");
  return *source;
}
template <class T>
T __ldcg(const T* source) {
  mla::emulator::machine.maybe_yield();
  return __ldg(source);
}

inline void __syncwarp() {
  mla::emulator::machine.meet([](auto&) {});
}

inline void __syncthreads() {
  auto& machine = mla::emulator::machine;
  machine.named_barrier(0, machine.count, true);
}

inline void atomicMin(int32_t* target, int32_t value) { *target = std::min(*target, value); }
inline void atomicMax(int32_t* target, int32_t value) { *target = std::max(*target, value); }
inline int32_t atomicCAS(int32_t* target, int32_t expected, int32_t desired) {
  mla::emulator::machine.maybe_yield();
  const int32_t found = *target;
  if (found == expected) *target = desired;
  return found;
}
