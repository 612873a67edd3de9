// The core's interface to Python, and the run of a grid.
#include <cstring>
#include <memory>

#include "machine.h"
#include "registry.h"

namespace gfx9 {
namespace {

const Registry& registry() {
  static const Registry all = [] {
    Registry result;
    define_scalar(result);
    define_vector(result);
    define_packed(result);
    define_matrix(result);
    define_lds(result);
    define_global(result);
    return result;
  }();
  return all;
}

// What a launch needs to know; launch.py fills it in. Mirrored by core.py.
struct Launch {
  const Instruction* instructions;
  int32_t count;
  int32_t entry;
  int32_t architecture;
  uint32_t grid[3], block[3];
  uint32_t lds_bytes;
  uint32_t mode;
  const uint32_t* user_scalars;  // at the start of a wave, before the workgroup's ids
  int32_t user_scalar_count;
  int32_t wants_group_id[3];
  const Allocation* allocations;
  int32_t allocation_count;
  int32_t check_races, check_waits;
  int32_t order;  // Order
  int64_t instruction_limit;
  // results
  uint64_t* executed;  // [count]
  Traffic traffic;
  int32_t failed_instruction, failed_wave;
  uint32_t failed_group[3];
  char message[512];
};

enum Order : int32_t { kForward, kBackward, kInterleaved };

class Run {
 public:
  explicit Run(Launch& launch) : launch_(launch), memory_(launch.allocations, launch.allocation_count) {
    uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
    for (uint32_t first = 0; first < threads; first += kLanes) waves_.push_back(std::make_unique<Wave>());
  }

  void all() {
    for (group_[2] = 0; group_[2] < launch_.grid[2]; ++group_[2])
      for (group_[1] = 0; group_[1] < launch_.grid[1]; ++group_[1])
        for (group_[0] = 0; group_[0] < launch_.grid[0]; ++group_[0]) group();
  }

  void describe_failure(const char* message) {
    std::snprintf(launch_.message, sizeof(launch_.message), "%s", message);
    launch_.failed_wave = current_ ? current_->id : -1;
    launch_.failed_instruction = current_ ? current_instruction_ : -1;
    std::copy(group_, group_ + 3, launch_.failed_group);
  }

 private:
  void start(Wave& wave, int id, Group& group) {
    // Registers and LDS begin as NaN in every format, so that a value nobody wrote shows.
    std::memset(wave.v, 0xff, sizeof(wave.v));
    std::memset(wave.s, 0xff, sizeof(wave.s));
    wave.scc = 0;
    wave.mode = launch_.mode;
    wave.id = id;
    wave.pc = launch_.entry;
    wave.state = State::running;
    wave.group = &group;
    wave.vector_vm.fill(0);
    wave.vector_lgkm.fill(0);
    wave.scalar_lgkm.fill(0);
    wave.vm.clear();
    wave.lgkm.clear();
    const uint32_t* block = launch_.block;
    uint32_t threads = block[0] * block[1] * block[2];
    uint64_t exec = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      uint32_t thread = id * kLanes + lane;
      if (thread < threads) exec |= 1ull << lane;
      wave.v[0][lane] = thread % block[0] | thread / block[0] % block[1] << 10 | thread / (block[0] * block[1]) << 20;
    }
    wave.set_scalar64(kExec, exec);
    wave.set_scalar64(kVcc, 0);
    int next = launch_.user_scalar_count;
    std::copy_n(launch_.user_scalars, next, wave.s);
    for (int axis = 0; axis < 3; ++axis)
      if (launch_.wants_group_id[axis]) wave.s[next++] = group_[axis];
  }

  // Waves run to their next barrier, or in turns of a few instructions.
  void step(Wave& wave, int64_t turn) {
    current_ = &wave;
    const Instruction* instructions = launch_.instructions;
    for (; turn > 0 && wave.state == State::running; --turn) {
      if (wave.pc < 0 || wave.pc >= launch_.count) throw Fault("the end of the code was passed");
      current_instruction_ = wave.pc;
      const Instruction& in = instructions[wave.pc++];
      ++launch_.executed[current_instruction_];
      if (!in.run) throw Fault("an instruction was reached that no branch leads to");
      in.run(wave, in);
      if (--launch_.instruction_limit < 0)
        throw Fault("the limit of instructions was reached: an endless loop, or set a higher limit");
    }
    current_ = nullptr;
  }

  void group() {
    Group group{Lds(launch_.lds_bytes, launch_.check_races),
                &memory_,
                static_cast<Architecture>(launch_.architecture),
                launch_.check_waits != 0,
                {}};
    int count = static_cast<int>(waves_.size());
    for (int i = 0; i < count; ++i) start(*waves_[i], i, group);
    constexpr int64_t kTurn = 7;
    for (uint32_t epoch = 1;;) {
      bool running = false;
      for (int i = 0; i < count; ++i) {
        Wave& wave = *waves_[launch_.order == kBackward ? count - 1 - i : i];
        if (wave.state != State::running) continue;
        step(wave, launch_.order == kInterleaved ? kTurn : INT64_MAX);
        running |= wave.state == State::running;
      }
      if (running) continue;
      bool waiting = false;
      group.lds.set_epoch(++epoch);
      for (auto& wave : waves_) {
        if (wave->state != State::at_barrier) continue;
        carry_past_barrier(*wave);
        wave->state = State::running;
        waiting = true;
      }
      if (!waiting) break;
    }
    launch_.traffic.global_read += group.traffic.global_read;
    launch_.traffic.global_written += group.traffic.global_written;
    launch_.traffic.lds_read += group.traffic.lds_read;
    launch_.traffic.lds_written += group.traffic.lds_written;
  }

  Launch& launch_;
  Memory memory_;
  std::vector<std::unique_ptr<Wave>> waves_;
  uint32_t group_[3] = {};
  Wave* current_ = nullptr;
  int current_instruction_ = -1;
};

}  // namespace
}  // namespace gfx9

extern "C" {

// The handler of an instruction, or null for one that is not known.
gfx9::Handler gfx9_handler(const char* name) {
  auto found = gfx9::registry().find(name);
  return found == gfx9::registry().end() ? nullptr : found->second;
}

int gfx9_run(gfx9::Launch* launch) {
  gfx9::Run run(*launch);
  try {
    run.all();
  } catch (const gfx9::Fault& fault) {
    run.describe_failure(fault.what());
    return 1;
  }
  return 0;
}

int gfx9_size_of_instruction() { return sizeof(gfx9::Instruction); }
int gfx9_size_of_launch() { return sizeof(gfx9::Launch); }
}
