// Products with packed weights, shared by linear.cpp and experts.cpp.
#pragma once

#include "coded.h"
#include "gemm.h"
#include "vec.h"

namespace moe {

constexpr int64_t K_BLOCK = 512;   // steps of K per pass: GROUP panels of it, and the next, fit the L2 cache
constexpr int64_t ROW_BLOCK = 96;  // max rows of one task: A's block fits the L2 cache too
constexpr int64_t DECODED_BLOCK = 4 * ROW_BLOCK;  // the same of a task that decodes its panels
constexpr int64_t LONG_BLOCK = 256;               // the same of K from 2 K_BLOCK on
constexpr int64_t GROUP = 4;       // panels processed together
constexpr int64_t SHARED_PANELS = 512 << 10;  // bytes of the panels that adjacent tasks read again from the L2 cache
constexpr int64_t MANY_ROWS = 256;  // from here on few of the rows wait for weights from memory
constexpr int64_t FEW_ROWS = 12;   // up to this many: one pass over the weights, no blocking

// A packed matrix: `panels` panels of `steps` steps each, contiguous; with a form, coded panels.
struct Packed {
  const uint32_t* data;
  int64_t panels, steps;
  const Coding* form = nullptr;
  bool decoded = false;  // of a form: see `decodes`

  // Of a long K panels are decoded block by block.
  bool in_blocks() const { return decoded && steps > 2 * K_BLOCK; }
};

// Distance of panels of K elements, in units.
template <class T>
inline int64_t panel_units(int64_t k, const Coding* form) {
  return form ? form->panel_bytes(k) / 4 : packed_steps<T>(k) * LANES;
}

// The product of a matrix in blocks with `count` of its panels, from `coded` on.
template <class T>
void decoded_product(const void* x, int64_t ldx, int64_t m, int64_t k, const Packed& w, const char* coded,
                     int64_t count, const char* next, float* c, int64_t ldc) {
  uint32_t* decoded = scratch<uint32_t>(DECODED, w.form->parts * GROUP * K_BLOCK * LANES);
  const int64_t apart = w.form->panel_bytes(k);
  for (int64_t done = 0; done < w.steps; done += K_BLOCK)
    for (int64_t p = 0; p < count; p += GROUP) {
      const int64_t here = std::min(GROUP, count - p), steps = std::min(K_BLOCK, w.steps - done);
      const char* own = coded + p * apart;
      const char* later = done + steps < w.steps ? coded + apart / w.steps * steps : next;
      const char* then = p + GROUP < count ? own + GROUP * apart : later;
      decode_panels(*w.form, k, done, steps, own, here, then, decoded);
      for (int64_t part = 0; part < w.form->parts; part++)
        gemm<T>(static_cast<const char*>(x) + 4 * done, ldx, m, decoded + part * here * steps * LANES, steps * LANES, here,
                steps, c + p * LANES, ldc, done + part > 0);
    }
  scale_columns(*w.form, k, coded, count, c, ldc, m);
}

// c[m][16 * count] = rows of x times panels [first, first + count), over all of K. Panel `next` follows; `cached`: the
// panels are in the cache, where prefetches would only delay the loads of a plain matrix; `add`: c += the product.
template <class T>
INLINE void product(const void* x, int64_t ldx, int64_t m, int64_t k, const Packed& w, int64_t first, int64_t count,
                    int64_t next, float* c, int64_t ldc, bool cached = false, bool add = false) {
  if (w.form) {
    const char* data = reinterpret_cast<const char*>(w.data);
    const int64_t apart = w.form->panel_bytes(k);
    if (w.decoded)
      return decoded_product<T>(x, ldx, m, k, w, data + first * apart, count, data + next * apart, c, ldc);
    return coded_product<T>(*w.form, x, ldx, m, k, data + first * apart, count, data + next * apart, c, ldc);
  }
  const int64_t panel = w.steps * LANES, steps = steps_of<T>(k);
  const char* a = static_cast<const char*>(x);
  const uint32_t* b = w.data + first * panel;
  const int64_t block = m <= FEW_ROWS ? steps : K_BLOCK;
  for (int64_t done = 0; done < steps; done += block) {
    const uint32_t* following = done + block < steps ? b + (done + block) * LANES : w.data + next * panel;
    for (int64_t p = 0; p < count; p += GROUP) {
      const uint32_t* from = b + p * panel + done * LANES;
      gemm<T>(a + 4 * done, ldx, m, from, panel, std::min(GROUP, count - p), std::min(block, steps - done),
              c + p * LANES, ldc, add || done > 0, cached ? nullptr : p + GROUP < count ? from + GROUP * panel : following);
    }
  }
}

// out = x w + bias, then rounded.
template <class T>
INLINE void finish(const float* c, int64_t ldc, int64_t m, int64_t columns, const float* bias, T* out, int64_t ldo) {
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < columns; j += LANES) {
      const int64_t here = columns - j;
      F16 value = load(c + i * ldc + j);
      if (bias) value = value + load_some(bias + j, here);
      store_some(out + i * ldo + j, value, here);
    }
}

// Panels [first, first + count) of a matrix, to be multiplied with some blocks of rows; panel `next` follows.
template <class T>
class Columns {
 public:
  // Decoded panels are in this thread's memory until the next object of the same `slot`, 0 or 1.
  Columns(const Packed& w, int64_t k, int64_t first, int64_t count, int64_t next, int slot = 0)
      : w_(w), k_(k), first_(first), count_(count), next_(next) {
    if (!w.decoded || w.in_blocks()) return;
    const char* data = reinterpret_cast<const char*>(w.data);
    const int64_t apart = w.form->panel_bytes(k), units = w.form->parts * GROUP * w.steps * LANES;
    uint32_t* decoded = scratch<uint32_t>(DECODED, 2 * units) + slot * units;
    coded_ = data + first * apart;
    decode_panels(*w.form, k, 0, w.steps, coded_, count, data + next * apart, decoded);
    w_ = {decoded, count, w.steps};
    form_ = w.form, first_ = next_ = 0;
  }

  // out[m][columns] = rows of x times the panels, rounded, after adding a bias if there is one; `c` is for sums.
  INLINE void multiply_to(const void* x, int64_t ldx, int64_t m, int64_t columns, const float* bias, T* out,
                          int64_t ldo, float* c, int64_t ldc, bool cached = false) const {
    const char* rows = static_cast<const char*>(x);
    const int64_t steps = steps_of<T>(k_), panel = w_.steps * LANES;
    int64_t done = 0;
    if (!w_.form && !form_ && !bias && steps <= K_BLOCK && columns == GROUP * LANES)
      done = gemm_rounded<T>(rows, ldx, m, w_.data + first_ * panel, panel, steps, out, ldo,
                             cached ? nullptr : w_.data + next_ * panel);
    if (done == m) return;
    for (int64_t i = done; i < m; i++) touch<true>(out + i * ldo, columns);  // `finish` writes them
    multiply(rows + done * ldx, ldx, m - done, c, ldc, cached);
    finish(c, ldc, m - done, columns, bias, out + done * ldo, ldo);
  }

  // c[m][16 * count] = rows of x times the panels; `cached`: see `product`.
  INLINE void multiply(const void* x, int64_t ldx, int64_t m, float* c, int64_t ldc, bool cached = false) const {
    product<T>(x, ldx, m, k_, w_, first_, count_, next_, c, ldc, cached || form_);
    if (form_ && form_->parts == 2) product<T>(x, ldx, m, k_, w_, count_, count_, 0, c, ldc, true, true);
    if (form_) scale_columns(*form_, k_, coded_, count_, c, ldc, m);
  }

 private:
  Packed w_;
  int64_t k_, first_, count_, next_;
  const Coding* form_ = nullptr;
  const char* coded_ = nullptr;
};

// Calls body(row, rows) for the blocks of m rows that are multiplied together: of decoded panels some, so that their
// results stay in the L1 cache; else up to `most`.
template <class Body>
INLINE void each_block(const Packed& w, int64_t m, const Body& body, int64_t most = INT64_MAX) {
  const int64_t block = std::min(m, w.decoded && !w.in_blocks() ? ROW_BLOCK : most);
  for (int64_t row = 0; row < m; row += block) body(row, std::min(block, m - row));
}
// Rows of a task of `most` rows, or of more if it decodes panels.
inline int64_t task_rows(const Packed& w, int64_t most, int64_t m) {
  if (w.decoded) most = w.steps < 2 * K_BLOCK ? DECODED_BLOCK : LONG_BLOCK;
  return m <= most + ROW_BLOCK / 2 ? m : most;
}

// Panels whose products are computed together: of a long K, all of a task, so that each block of the rows is read from
// the L2 cache by all of them.
template <class T>
INLINE int64_t panels_together(const Packed& w, int64_t m, int64_t panels) {
  if (w.in_blocks()) return 4 * GROUP;
  return !w.form && m > FEW_ROWS && w.steps > K_BLOCK ? panels : GROUP;
}

// Rows in the kernel's format: x itself, or a copy padded with zeros if K is not a multiple of the read width.
template <class T>
struct Rows {
  const char* data;
  int64_t stride;  // bytes

  Rows(const T* x, int64_t ldx, int64_t m, int64_t k, Purpose purpose, const Coding* form) {
    const int64_t padded = padded_k<T>(k);
    data = reinterpret_cast<const char*>(x);
    stride = ldx * int64_t(sizeof(T));
    if (form) {
      data = coded_rows<T>(*form, x, &stride, m, k, purpose);
      return;
    }
    if (padded == k) return;
    T* copy = scratch<T>(purpose, m * padded);
    parallel_ranges(m, double(k) * 0.1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++) {
        std::memcpy(copy + i * padded, x + i * ldx, size_t(k) * sizeof(T));
        std::memset(copy + i * padded + k, 0, size_t(padded - k) * sizeof(T));
      }
    });
    data = reinterpret_cast<const char*>(copy);
    stride = padded * int64_t(sizeof(T));
  }
};

// The panel that a thread will probably read after panel `end` - 1 of a task with panels [first, last). If each range of
// panels has one task, other threads take the next ranges. Products of coded panels prefetch those in order.
inline int64_t panel_after(const Packed& w, int64_t end, int64_t first, int64_t last, int64_t row_tasks) {
  return end < last || row_tasks > 1 || w.form ? end : first + omp_get_max_threads() * (last - first);
}

// Panels per task so that `others` tasks become at least four per thread, and a task of few rows still streams a long
// range of memory.
inline int64_t panels_per_task(int64_t panels, int64_t panel_bytes, int64_t others) {
  const int64_t threads = omp_get_max_threads();
  int64_t wanted = ceil_div(4 * threads, std::max<int64_t>(others, 1));
  int64_t most = std::max<int64_t>(ceil_div(panels, wanted), 1);
  int64_t least = std::max<int64_t>((int64_t(48) << 10) / std::max<int64_t>(panel_bytes, 1), 1);
  if (others > 1) most = std::min(most, std::max<int64_t>(SHARED_PANELS / std::max<int64_t>(panel_bytes, 1), 1));
  return ceil_div(std::max(most, std::min(least, ceil_div(panels, threads))), GROUP) * GROUP;
}

}  // namespace moe
