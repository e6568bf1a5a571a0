// Shared by all kernels: dtypes, threads, scratch memory.
//
// A *unit* is four bytes: one float, or two adjacent bf16 (the operand pair of a bf16 dot instruction).
// A *panel* is 16 columns of a right-hand side, stored [steps][16] units, where a step is one unit of K. Weights,
// queries and values are all packed in panels, so one matrix kernel (gemm.h) serves every product in this library.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#define API extern "C" __attribute__((visibility("default")))

// Number of threads that torch.set_num_threads allows the calling thread; from the OpenMP runtime loaded by torch.
extern "C" int omp_get_max_threads(void);

namespace moe {

struct bf16 {
  uint16_t bits;
};

constexpr int LANES = 16;

template <class T>
constexpr int PER_UNIT = 4 / int(sizeof(T));

// Steps of a packed weight of K input features. bf16 is padded with zeros to 32 elements, a full AMX tile.
template <class T>
inline int64_t packed_steps(int64_t k) {
  return PER_UNIT<T> == 2 ? (k + 31) / 32 * 16 : k;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t panels_of(int64_t n) { return ceil_div(n, LANES); }

using Task = void (*)(void* data, int64_t index);

// Runs all tasks, in index order, on this thread and up to threads - 1 helper threads (team.cpp).
void run_team(int64_t tasks, int threads, Task task, void* data);

// Calls body(task) for every task, on torch's number of threads; tasks are assigned in order.
template <class Body>
void parallel(int64_t tasks, const Body& body) {
  const int threads = omp_get_max_threads();
  if (tasks <= 1 || threads == 1) {
    for (int64_t i = 0; i < tasks; i++) body(i);
    return;
  }
  run_team(
      tasks, threads, [](void* data, int64_t i) { (*static_cast<const Body*>(data))(i); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// The same over ranges [begin, end) of `count` items, for items too small for a task each.
// `cost` estimates one item in nanoseconds; work below a few microseconds stays on this thread.
template <class Body>
void parallel_ranges(int64_t count, double cost, const Body& body) {
  int64_t threads = omp_get_max_threads();
  if (threads == 1 || count <= 1 || double(count) * cost < 8000) {
    if (count > 0) body(0, count);
    return;
  }
  int64_t chunk = ceil_div(count, threads * 4);
  parallel(ceil_div(count, chunk), [&](int64_t i) { body(i * chunk, std::min(count, (i + 1) * chunk)); });
}

// Per-thread memory kept between calls, one block per purpose. Contents are undefined.
enum Purpose {
  ROWS, PRODUCT, HIDDEN, QUERIES, KEYS, VALUES, SCORES, WEIGHTS, OUTPUT, TOTAL, STATS, TILES, WIDENED, TURNED,
  DECODED,  // these and all before per thread
  SHARED_ROWS, SHARED_HIDDEN, SHARED_OUT, SHARED_STATS, SHARED_INDEX, SHARED_UNITS,  // the caller's, read by helpers
  LAYER,  // of a whole-layer call
  CHAIN,  // of a draft-chain call
  STEP,  // of a draft-step call
  PREFIX,  // of attention to a shared prefix
  PURPOSES
};

inline void* scratch_bytes(Purpose purpose, size_t bytes) {
  struct Block {
    void* data = nullptr;
    size_t size = 0;
    ~Block() { std::free(data); }
  };
  static thread_local Block blocks[PURPOSES];
  Block& block = blocks[purpose];
  if (block.size < bytes || !block.data) {
    std::free(block.data);
    block.size = (bytes / 4096 + 2) * 4096;
    block.data = std::aligned_alloc(4096, block.size);
    if (!block.data) throw std::bad_alloc();
  }
  return block.data;
}

template <class X>
X* scratch(Purpose purpose, int64_t count) {
  return static_cast<X*>(scratch_bytes(purpose, size_t(count) * sizeof(X)));
}

}  // namespace moe
