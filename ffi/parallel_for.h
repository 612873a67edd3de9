// A parallel loop on XLA's thread pool, for the CPU kernels.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#if defined(__linux__)
#include <sched.h>
#endif

#include "kernels/device.h"
#include "xla/ffi/api/ffi.h"

namespace mla {

// The CPUs that workers of one loop run on. A thread of the pool may be woken on the CPU of the thread that wakes it,
// and on a virtual machine Linux may leave it waiting there for milliseconds, beside an idle CPU: seen as calls that
// take twice as long, every other time. So the caller lets the threads that it wakes run for a moment, and a worker
// that finds its CPU taken moves to one that is not.
class WorkerCpus {
 public:
  static void let_others_run() {
#if defined(__linux__)
    sched_yield();
#endif
  }

  void claim() {
#if defined(__linux__)
    const int here = sched_getcpu();
    if (here < 0 || here >= kMaxCpus || !taken_[here].exchange(true)) return;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
    for (int cpu = 0; cpu < kMaxCpus; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed) || taken_[cpu].exchange(true)) continue;
      cpu_set_t there;
      CPU_ZERO(&there);
      CPU_SET(cpu, &there);
      if (sched_setaffinity(0, sizeof(there), &there) == 0) sched_setaffinity(0, sizeof(allowed), &allowed);
      return;
    }
#endif
  }

 private:
  static constexpr int kMaxCpus = 1024;  // of a cpu_set_t
  std::array<std::atomic<bool>, kMaxCpus> taken_{};
};

// Runs f over [0, n) on the pool and on the calling thread. The caller works too, so the loop ends even when every
// thread of the pool is busy, or waits in a handler of its own.
inline ParallelFor parallel_for_on(xla::ffi::ThreadPool pool) {
  return [pool](int64_t n, const std::function<void(int64_t)>& f) mutable {
    struct Shared {
      std::mutex mutex;
      std::condition_variable all_done;
      int64_t next = 0, done = 0;
      WorkerCpus cpus;
    };
    auto shared = std::make_shared<Shared>();
    // A task that starts after the loop has ended finds next == n and never touches f.
    auto work = [shared, n, &f](bool placed) {
      for (;;) {
        int64_t i;
        {
          std::lock_guard<std::mutex> lock(shared->mutex);
          if (shared->next == n) return;
          i = shared->next++;
        }
        if (!placed) shared->cpus.claim();
        placed = true;
        f(i);
        std::lock_guard<std::mutex> lock(shared->mutex);
        if (++shared->done == n) shared->all_done.notify_all();
      }
    };
    const int64_t helpers = std::min<int64_t>(pool.num_threads(), n) - 1;
    if (helpers > 0) shared->cpus.claim();
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(/*placed=*/false); });
    if (helpers > 0) WorkerCpus::let_others_run();
    work(/*placed=*/true);
    std::unique_lock<std::mutex> lock(shared->mutex);
    shared->all_done.wait(lock, [&] { return shared->done == n; });
  };
}

}  // namespace mla
