// The helper threads behind `parallel`: they join a job if they arrive in time, and the caller waits only for these.
//
// OpenMP's team starts and ends together, so on a shared machine one descheduled thread delays every call. Its threads
// also spin for milliseconds between calls, which uses up their next time slice. Here the caller starts tasks immediately
// and finishes alone if no helper joins; helpers spin for some microseconds (the gap between two kernels of a layer),
// then sleep.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>
#include <thread>

#include "common.h"

namespace moe {
namespace {

constexpr int SPINS = 4000;      // about 30-100 us, by processor
constexpr int LEAVE_SPINS = 2000;  // wait for a helper's last task before yielding the core

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
}

class Team {
 public:
  void run(int64_t tasks, int threads, Task task, void* data) {
    std::unique_lock<std::mutex> only(busy_, std::try_to_lock);
    if (!only.owns_lock()) {  // another thread of this process is using the helpers
      for (int64_t i = 0; i < tasks; i++) task(data, i);
      return;
    }
    hire(threads - 1);
    task_ = task, data_ = data, tasks_ = tasks, wanted_ = threads - 1;
    next_.store(0, std::memory_order_relaxed);
    open_.store(true, std::memory_order_seq_cst);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(&generation_, FUTEX_WAKE_PRIVATE, uint32_t(wanted_));
    work();
    open_.store(false, std::memory_order_seq_cst);
    for (int spins = 0; inside_.load(std::memory_order_seq_cst) != 0; spins++) {
      if (spins < LEAVE_SPINS) pause_core();
      else sched_yield();
    }
  }

 private:
  void hire(int helpers) {
    if (owner_ != getpid()) {  // helpers do not survive a fork
      owner_ = getpid();
      hired_ = 0;
      inside_.store(0);
      sleepers_.store(0);
    }
    for (; hired_ < helpers; hired_++) std::thread([this, index = hired_] { serve(index); }).detach();
  }

  void serve(int index) {
    pthread_setname_np(pthread_self(), "moe-cpu");
    for (uint32_t seen = generation_.load();;) {
      seen = await(seen);
      // Register first, then check: either the caller sees this helper, or the helper sees the job closed.
      inside_.fetch_add(1, std::memory_order_seq_cst);
      if (open_.load(std::memory_order_seq_cst) && index < wanted_) work();
      inside_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  uint32_t await(uint32_t seen) {
    for (int spins = 0; spins < SPINS; spins++) {
      const uint32_t now = generation_.load(std::memory_order_acquire);
      if (now != seen) return now;
      pause_core();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (generation_.load(std::memory_order_seq_cst) == seen) futex(&generation_, FUTEX_WAIT_PRIVATE, seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return generation_.load(std::memory_order_acquire);
  }

  void work() {
    const Task task = task_;
    void* const data = data_;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) task(data, i);
  }

  std::mutex busy_;
  Task task_ = nullptr;
  void* data_ = nullptr;
  int64_t tasks_ = 0;
  int wanted_ = 0, hired_ = 0;
  pid_t owner_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<bool> open_{false};
  alignas(64) std::atomic<int> inside_{0};
  std::atomic<int> sleepers_{0};
};

}  // namespace

void run_team(int64_t tasks, int threads, Task task, void* data) {
  static Team* team = new Team;  // never destroyed: helpers may still read it while the process exits
  team->run(tasks, threads, task, data);
}

}  // namespace moe
