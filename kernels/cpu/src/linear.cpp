// Linear layers over packed weights: x [M, K] -> [M, N], and the same for one small matrix per head.
#include "api.h"
#include "dense.h"

namespace moe {

template <class T>
static void pack(const T* weight, int64_t ldw, int64_t n, int64_t k, uint32_t* out) {
  const int64_t steps = packed_steps<T>(k);
  parallel_ranges(panels_of(n), double(k) * 4, [&](int64_t from, int64_t to) {
    for (int64_t p = from; p < to; p++) {
      const T* rows[LANES];
      int64_t count = std::min<int64_t>(LANES, n - p * LANES);
      for (int64_t i = 0; i < count; i++) rows[i] = weight + (p * LANES + i) * ldw;
      pack_rows(rows, count, k, steps, out + p * steps * LANES);
    }
  });
}

template <class T>
static void linear(const T* x, int64_t ldx, int64_t m, int64_t k, const uint32_t* weight, int64_t n, const float* bias,
                   T* out, int64_t ldo, const Coding* form) {
  if (m <= 0 || n <= 0) return;
  const bool decoded = decodes<T>(form, m);
  const Packed w{weight, panels_of(n), packed_steps<T>(k), form, decoded};
  const Rows<T> rows(x, ldx, m, k, SHARED_ROWS, decoded ? nullptr : form);
  const bool stripes = !form && m >= MANY_ROWS && w.steps <= 2 * K_BLOCK;
  const int64_t most = w.steps > K_BLOCK ? 2 * ROW_BLOCK : ROW_BLOCK;
  const int64_t row_block = task_rows(w, stripes ? std::min(most, stripe_rows(T{})) : most, m);
  const int64_t row_tasks = ceil_div(m, row_block);
  const int64_t whole = form ? form->panel_bytes(k) : w.steps * LANES * 4;
  const int64_t panel_bytes = form && !decoded ? whole : whole * std::min(w.steps, K_BLOCK) / w.steps;
  const int64_t width = panels_per_task(w.panels, panel_bytes, row_tasks), tasks = ceil_div(w.panels, width);
  parallel_products(row_tasks * tasks, [&](int64_t task) {
    // Adjacent tasks share their panels: the weights are read from memory once for all rows, by a thread's first task.
    const int64_t row = task % row_tasks * row_block, first = task / row_tasks * width;
    const bool cached = task % row_tasks >= omp_get_max_threads();
    const int64_t here = std::min(row_block, m - row), last = std::min(first + width, w.panels);
    const int64_t together = panels_together<T>(w, here, width), ldc = together * LANES;
    float* c = scratch<float>(PRODUCT, here * ldc);
    for (int64_t p = first; p < last; p += together) {
      const int64_t count = std::min(together, last - p), column = p * LANES, columns = std::min(count * LANES, n - column);
      const Columns<T> panels(w, k, p, count, panel_after(w, p + count, first, last, row_tasks));
      each_block(w, here, [&](int64_t start, int64_t some) {
        panels.multiply_to(rows.data + (row + start) * rows.stride, rows.stride, some, columns,
                           bias ? bias + column : nullptr, out + (row + start) * ldo + column, ldo, c, ldc, cached);
      });
    }
  });
}

// x [T, H, K] by strides -> out [T, H, N] by strides; weight: H packed matrices.
template <class T>
static void linear_heads(const T* x, int64_t x_token, int64_t x_head, int64_t tokens, int64_t heads, int64_t k,
                         const uint32_t* weight, int64_t n, T* out, int64_t out_token, int64_t out_head,
                         const Coding* form) {
  if (tokens <= 0 || n <= 0) return;
  const int64_t panels = panels_of(n), steps = packed_steps<T>(k), padded = padded_k<T>(k);
  const int64_t panel = panel_units<T>(k, form);
  const bool decoded = decodes<T>(form, tokens);
  const int64_t row_block = std::min<int64_t>(tokens, ROW_BLOCK), row_tasks = ceil_div(tokens, row_block);
  const int64_t width = panels_per_task(panels, 4 * panel, row_tasks * heads), parts = ceil_div(panels, width);
  parallel_products(heads * row_tasks * parts, [&](int64_t task) {
    const int64_t head = task / (row_tasks * parts), row = task / parts % row_tasks * row_block;
    const int64_t first = task % parts * width, last = std::min(first + width, panels);
    const int64_t here = std::min(row_block, tokens - row);
    const T* a = x + row * x_token + head * x_head;
    int64_t stride = x_token;
    if (form && !decoded) {
      int64_t apart = x_token * int64_t(sizeof(T));
      a = reinterpret_cast<const T*>(coded_rows<T>(*form, a, &apart, here, k, ROWS));
      stride = apart / int64_t(sizeof(T));
    } else if (padded != k) {
      T* copy = scratch<T>(ROWS, here * padded);
      for (int64_t i = 0; i < here; i++) {
        std::memcpy(copy + i * padded, a + i * x_token, size_t(k) * sizeof(T));
        std::memset(copy + i * padded + k, 0, size_t(padded - k) * sizeof(T));
      }
      a = copy;
      stride = padded;
    }
    const Packed w{weight + head * panels * panel, panels, steps, form, decoded};
    float* c = scratch<float>(PRODUCT, here * GROUP * LANES);
    for (int64_t p = first; p < last; p += GROUP) {
      const int64_t count = std::min(GROUP, last - p), column = p * LANES;
      const Columns<T> own(w, k, p, count, panel_after(w, p + count, first, last, row_tasks));
      own.multiply_to(a, stride * int64_t(sizeof(T)), here, std::min(count * LANES, n - column), nullptr,
                      out + row * out_token + head * out_head + column, out_token, c, GROUP * LANES);
    }
  });
}

}  // namespace moe

using namespace moe;

API int64_t moe_packed_bytes(int is_bf16, int64_t n, int64_t k) {
  return panels_of(n) * LANES * 4 * (is_bf16 ? packed_steps<bf16>(k) : packed_steps<float>(k));
}

API void moe_pack(int is_bf16, const void* weight, int64_t ldw, int64_t n, int64_t k, void* out) {
  if (is_bf16)
    pack(static_cast<const bf16*>(weight), ldw, n, k, static_cast<uint32_t*>(out));
  else
    pack(static_cast<const float*>(weight), ldw, n, k, static_cast<uint32_t*>(out));
}

API void moe_linear(int is_bf16, const void* x, int64_t ldx, int64_t m, int64_t k, const void* weight, int64_t n,
                    const float* bias, void* out, int64_t ldo, const Coding* form) {
  auto w = static_cast<const uint32_t*>(weight);
  if (is_bf16)
    linear(static_cast<const bf16*>(x), ldx, m, k, w, n, bias, static_cast<bf16*>(out), ldo, form);
  else
    linear(static_cast<const float*>(x), ldx, m, k, w, n, bias, static_cast<float*>(out), ldo, form);
}

API void moe_linear_heads(int is_bf16, const void* x, int64_t x_token, int64_t x_head, int64_t tokens, int64_t heads,
                          int64_t k, const void* weight, int64_t n, void* out, int64_t out_token, int64_t out_head,
                          const Coding* form) {
  auto w = static_cast<const uint32_t*>(weight);
  if (is_bf16)
    linear_heads(static_cast<const bf16*>(x), x_token, x_head, tokens, heads, k, w, n, static_cast<bf16*>(out),
                 out_token, out_head, form);
  else
    linear_heads(static_cast<const float*>(x), x_token, x_head, tokens, heads, k, w, n, static_cast<float*>(out),
                 out_token, out_head, form);
}
