// Routed experts: out = down(silu(gate(x)) * up(x)), every row by its own expert.
//
// Legend: T tokens, K experts per token, D hidden, I width, E experts, M rows (T*K when routed).
// One expert's weights are contiguous: gate panels, up panels [I/16 each, of D], then down panels [D/16, of I].
// Rows are sorted by expert. Two passes, gate/up and down, each a list of tasks (rows of one expert, some panels) that
// threads take in order; a hidden row is complete before any task of the second pass reads it.
#include "api.h"
#include "dense.h"
#include "permutation.h"

namespace moe {

// Biases of the products and a clamped activation: (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up
// within +-limit. With a beta: `situ`, without biases. squared: relu(x)^2 of both, which are the halves of one matrix, and
// so of the columns of a hidden row; without biases.
struct ExpertBiases {
  const float *gate_up, *down;  // [E, 2I], gate first, and [E, D]; both null: the activation without biases
  float alpha, limit, beta;
  int32_t squared;

  const float* of_gate(int64_t expert, int64_t width, int64_t column) const {
    return gate_up ? gate_up + expert * 2 * width + column : nullptr;
  }
  const float* of_down(int64_t expert, int64_t hidden, int64_t column) const {
    return down ? down + expert * hidden + column : nullptr;
  }
};

struct Shape {
  int64_t experts, hidden, width;
  int64_t half;  // columns of gate, and of up: the width, or its half
  int64_t width_panels, hidden_panels, hidden_steps, width_steps;
  int64_t hidden_panel, width_panel;  // units of a panel of gate or up, and of down. width_panels: of gate
  int64_t expert_units;
  const Coding *up_form, *down_form;  // null: plain panels
  bool up_decoded, down_decoded;  // see `decodes`
  const ExpertBiases* biases = nullptr;
  float limit = 0;  // of the activation without biases (`clamped_silu`)

  const Coding* form_of_rows() const { return up_decoded ? nullptr : up_form; }
};

template <class T>
static Shape shape_of(int64_t experts, int64_t hidden, int64_t width, const Coding* up_form, const Coding* down_form,
                      const ExpertBiases* biases = nullptr, float limit = 0, bool squared = false) {
  const int64_t half = squared || (biases && biases->squared) ? width / 2 : width;
  Shape s{experts, hidden, width, half, panels_of(half), panels_of(hidden), packed_steps<T>(hidden), packed_steps<T>(width),
          panel_units<T>(hidden, up_form), panel_units<T>(width, down_form), 0, up_form, down_form,
          false, false, biases, limit};
  s.expert_units = 2 * s.width_panels * s.hidden_panel + s.hidden_panels * s.width_panel;
  return s;
}

// Sets how rows are multiplied, by their mean number of an expert.
template <class T>
static void choose_products(Shape* s, int64_t mean_rows) {
  s->up_decoded = decodes<T>(s->up_form, mean_rows), s->down_decoded = decodes<T>(s->down_form, mean_rows);
}

// Elements between rows of hidden [M, I]: padded for the kernel, and not a power of two: rows share no cache set.
template <class T>
static int64_t hidden_stride(const Shape& s) {
  return padded_k<T>(s.width) + 64 / int64_t(sizeof(T));
}

// Some rows of one expert. `begin` counts rows in expert order; `source` is their start in x.
struct Unit {
  int64_t expert, begin, rows, source;
};

// Rows of one task: enough to reuse weights, few enough that the hidden rows stay in cache. Of a large expert more: each
// task reads its weights from memory, and not from the L2 cache.
constexpr int64_t UNIT_ROWS = 96, LARGE_EXPERT = (2 << 20) / 4;

static int64_t unit_rows(const Shape& s) {
  if (s.up_decoded || s.down_decoded) return DECODED_BLOCK;
  return s.expert_units > LARGE_EXPERT ? 2 * UNIT_ROWS : UNIT_ROWS;
}

// Parts of an expert's rows are similar in size, and all but the last fill the kernel's row blocks.
template <class T>
static int64_t add_units(const Shape& s, Unit* units, int64_t count, int64_t expert, int64_t begin, int64_t rows,
                         int64_t source) {
  const int64_t parts = ceil_div(rows, unit_rows(s)), block = row_multiple(T{});
  for (int64_t p = 0, from = 0; p < parts; p++) {
    const int64_t to = std::min(ceil_div(rows * (p + 1) / parts, block) * block, rows);
    if (to > from) units[count++] = {expert, begin + from, to - from, source + from};
    from = to;
  }
  return count;
}

// hidden[row][I] = silu(gate) * up of two product groups, clamped if there is a limit.
template <class T>
static INLINE void activate(const float* gate, const float* up, int64_t ldc, int64_t rows, int64_t columns, float limit,
                            T* out, int64_t ldo) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j += LANES) {
      const F16 g = load(gate + i * ldc + j), u = load(up + i * ldc + j);
      store_some(out + i * ldo + j, clamped_silu(g, limit, u), columns - j);
    }
}

// The same with biases and their activation.
template <class T>
static INLINE void activate_biased(const float* gate, const float* up, int64_t ldc, int64_t rows, int64_t columns,
                                    const ExpertBiases& b, const float* bias, int64_t width, T* out, int64_t ldo) {
  const F16 limit = set1(b.limit), alpha = set1(b.alpha), one = set1(1.f);
  if (b.squared) {
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j += LANES) {
        store_some(out + i * ldo + j, squared_relu(load(gate + i * ldc + j)), columns - j);
        store_some(out + i * ldo + width + j, squared_relu(load(up + i * ldc + j)), columns - j);
      }
    return;
  }
  if (b.beta > 0) {
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j += LANES)
        store_some(out + i * ldo + j, situ(load(gate + i * ldc + j), load(up + i * ldc + j), b.beta, b.limit),
                   columns - j);
    return;
  }
  for (int64_t j = 0; j < columns; j += LANES) {
    const F16 gate_bias = bias ? load_some(bias + j, columns - j) : zero();
    const F16 up_bias = bias ? load_some(bias + width + j, columns - j) : zero();
    for (int64_t i = 0; i < rows; i++) {
      const F16 g = min(load(gate + i * ldc + j) + gate_bias, limit);
      const F16 u = max(min(load(up + i * ldc + j) + up_bias, limit), zero() - limit);
      store_some(out + i * ldo + j, (u + one) * (g * sigmoid(g * alpha)), columns - j);
    }
  }
}

// Where the panels of experts begin; those of the next expert are `apart` units later.
struct Panels {
  const uint32_t *up, *down;
  int64_t apart;

  static Panels of(const uint32_t* weights, const Shape& s) {
    return {weights, weights + 2 * s.width_panels * s.hidden_panel, s.expert_units};
  }
};

// The tasks of both passes over some units. `rows_of(unit, &stride)` returns the unit's rows of x, padded for the
// kernel; `out_of(unit)` is the place of its results.
template <class T, class RowsOf, class Out>
class Passes {
 public:
  Passes(const Unit* units, int64_t count, const Shape& shape, const Panels& panels, T* hidden, int64_t hidden_stride,
         const RowsOf& rows_of, const Out& out_of)
      : units_(units), count_(count), s_(shape), panels_(panels), hidden_(hidden), stride_(hidden_stride),
        rows_of_(rows_of), out_of_(out_of), up_width_(panels_per_task(s_.width_panels, 2 * s_.hidden_panel * 4, count)),
        down_width_(panels_per_task(s_.hidden_panels, s_.width_panel * 4, count)),
        up_parts_(ceil_div(s_.width_panels, up_width_)), down_parts_(ceil_div(s_.hidden_panels, down_width_)),
        up_tasks(count * up_parts_), down_tasks(count * down_parts_) {}

  void up(int64_t task) const {
    const Unit& unit = units_[task / up_parts_];
    const int64_t first = task % up_parts_ * up_width_, last = std::min(first + up_width_, s_.width_panels);
    int64_t stride = 0;
    const char* x = static_cast<const char*>(rows_of_(unit, &stride));
    const Packed w{panels_.up + unit.expert * panels_.apart, 2 * s_.width_panels, s_.hidden_steps, s_.up_form,
                   s_.up_decoded};
    float* gate = scratch<float>(PRODUCT, 2 * unit.rows * GROUP * LANES);
    float* up = gate + unit.rows * GROUP * LANES;
    for (int64_t p = first; p < last; p += GROUP) {
      const int64_t here = std::min(GROUP, last - p), column = p * LANES;
      const Columns<T> gates(w, s_.hidden, p, here, s_.width_panels + p, 0);
      const int64_t next = panel_behind(w, p + here, last, task, up_parts_, up_width_);
      const Columns<T> ups(w, s_.hidden, s_.width_panels + p, here, next, 1);
      const int64_t columns = std::min(here * LANES, s_.half - column);
      each_block(w, unit.rows, [&](int64_t row, int64_t rows) {
        gates.multiply(x + row * stride, stride, rows, gate, GROUP * LANES);
        ups.multiply(x + row * stride, stride, rows, up, GROUP * LANES);
        T* to = hidden_ + (unit.begin + row) * stride_ + column;
        if (s_.biases)
          activate_biased(gate, up, GROUP * LANES, rows, columns, *s_.biases,
                          s_.biases->of_gate(unit.expert, s_.width, column), s_.half, to, stride_);
        else
          activate(gate, up, GROUP * LANES, rows, columns, s_.limit, to, stride_);
      });
    }
    if (last == s_.width_panels)  // the padding that the second pass reads
      for (int64_t i = 0; i < unit.rows; i++)
        std::memset(hidden_ + (unit.begin + i) * stride_ + s_.width, 0, size_t(stride_ - s_.width) * sizeof(T));
  }

  void down(int64_t task) const {
    const Unit& unit = units_[task / down_parts_];
    const int64_t first = task % down_parts_ * down_width_, last = std::min(first + down_width_, s_.hidden_panels);
    const Packed w{panels_.down + unit.expert * panels_.apart, s_.hidden_panels, s_.width_steps, s_.down_form,
                   s_.down_decoded};
    // The results of a step are larger than the caches: stripes write whole lines that were asked for before.
    const int64_t stripe = w.form ? INT64_MAX : stripe_rows(T{});
    const bool stripes = stripe < INT64_MAX;
    const int64_t together = stripes ? 4 * GROUP : GROUP, ldc = together * LANES;
    float* c = scratch<float>(PRODUCT, unit.rows * ldc);
    T* out = out_of_(unit);
    int64_t stride = stride_ * int64_t(sizeof(T));
    const char* x = reinterpret_cast<const char*>(hidden_ + unit.begin * stride_);
    if (s_.down_form && !s_.down_decoded) x = coded_rows<T>(*s_.down_form, x, &stride, unit.rows, s_.width, ROWS);
    for (int64_t p = first; p < last; p += together) {
      const int64_t here = std::min(together, last - p), column = p * LANES;
      const Columns<T> panels(w, s_.width, p, here, panel_behind(w, p + here, last, task, down_parts_, down_width_));
      const int64_t columns = std::min(here * LANES, s_.hidden - column);
      const float* bias = s_.biases ? s_.biases->of_down(unit.expert, s_.hidden, column) : nullptr;
      each_block(w, unit.rows, [&](int64_t row, int64_t rows) {
        panels.multiply_to(x + row * stride, stride, rows, columns, bias, out + row * s_.hidden + column, s_.hidden, c,
                           ldc, stripes && row > 0);
      }, stripe);
    }
  }

 private:
  // See `panel_after`, with `parts` tasks of `width` panels for each unit. Panels count from the first one of the
  // task's expert.
  int64_t panel_behind(const Packed& w, int64_t end, int64_t last, int64_t task, int64_t parts, int64_t width) const {
    const Unit& own = units_[task / parts];
    if (end < last || w.form || own.rows > FEW_ROWS) return end;
    const int64_t next = std::min(task + omp_get_max_threads(), count_ * parts - 1);
    return (units_[next / parts].expert - own.expert) * panels_.apart / (w.steps * LANES) + next % parts * width;
  }

  const Unit* const units_;
  const int64_t count_;
  const Shape& s_;
  const Panels panels_;
  T* const hidden_;
  const int64_t stride_;
  const RowsOf& rows_of_;
  const Out& out_of_;
  const int64_t up_width_, down_width_, up_parts_, down_parts_;

 public:
  const int64_t up_tasks, down_tasks;
};

// Rows [source, source + rows) of x, in place if the kernel can read them.
template <class T>
static INLINE const void* own_rows(const T* x, int64_t ldx, const int32_t* index, int64_t rows, int64_t k,
                                   int64_t* stride, const Coding* form) {
  const int64_t padded = padded_k<T>(k);
  if (form) {
    *stride = ldx * int64_t(sizeof(T));
    return coded_rows<T>(*form, x, stride, rows, k, ROWS);
  }
  if (padded == k && (!index || rows == 1)) {
    *stride = ldx * int64_t(sizeof(T));
    return x + (index ? index[0] : 0) * ldx;
  }
  const int64_t apart = padded + 64 / int64_t(sizeof(T));  // not a power of two: rows share no cache set
  T* copy = scratch<T>(ROWS, rows * apart);
  for (int64_t i = 0; i < rows; i++) {
    std::memcpy(copy + i * apart, x + (index ? index[i] : i) * ldx, size_t(k) * sizeof(T));
    std::memset(copy + i * apart + k, 0, size_t(padded - k) * sizeof(T));
  }
  *stride = apart * int64_t(sizeof(T));
  return copy;
}

// Rows `index` of tokens in a form, of coded_rows; `bytes` of a row.
static INLINE const void* coded_tokens(const char* x, int64_t apart, const int32_t* index, int64_t rows, int64_t bytes,
                                       int64_t* stride) {
  *stride = apart;
  if (rows == 1) return x + index[0] * apart;
  *stride = bytes;
  char* copy = scratch<char>(ROWS, rows * bytes);
  for (int64_t i = 0; i < rows; i++) std::memcpy(copy + i * bytes, x + index[i] * apart, size_t(bytes));
  return copy;
}

template <class T>
static void batch(const T* x, const int32_t* offsets, const int32_t* counts, int64_t capacity, Shape s,
                  const uint32_t* weights, T* out) {
  int64_t rows = 0;
  for (int64_t e = 0; e < s.experts; e++) rows += offsets ? offsets[e + 1] - offsets[e] : counts[e];
  choose_products<T>(&s, rows / std::max<int64_t>(s.experts, 1));
  Unit* units = scratch<Unit>(SHARED_UNITS, rows / UNIT_ROWS + s.experts + 1);
  int64_t count = 0, begin = 0;
  for (int64_t e = 0; e < s.experts; e++) {
    int64_t here = offsets ? offsets[e + 1] - offsets[e] : counts[e];
    count = add_units<T>(s, units, count, e, begin, here, offsets ? offsets[e] : e * capacity);
    begin += here;
  }
  const int64_t stride = hidden_stride<T>(s);
  T* hidden = scratch<T>(SHARED_HIDDEN, rows * stride);
  const auto rows_of = [&](const Unit& unit, int64_t* apart) {
    return own_rows<T>(x + unit.source * s.hidden, s.hidden, nullptr, unit.rows, s.hidden, apart, s.form_of_rows());
  };
  const auto out_of = [&](const Unit& unit) { return out + unit.source * s.hidden; };
  const Passes passes(units, count, s, Panels::of(weights, s), hidden, stride, rows_of, out_of);
  parallel_products(passes.up_tasks, [&](int64_t task) { passes.up(task); });
  parallel_products(passes.down_tasks, [&](int64_t task) { passes.down(task); });
}

// Entries (token, k) sorted by expert, then by token. An id outside [0, E) (an expert of another rank, or none)
// contributes nothing. A shared expert, if any, has its tasks in the same passes; its rounded result is `out` before
// the others are added.
template <class T>
static void routed(const T* x, int64_t ldx, int64_t tokens, int64_t top_k, const float* topk, const int32_t* ids,
                   Shape s, const uint32_t* weights, const SharedExpert* shared, const T* sum, int64_t lds,
                   T* out) {
  const int64_t entries = tokens * top_k;
  if (entries == 0 || s.hidden == 0) return;
  int32_t* offsets = scratch<int32_t>(SHARED_INDEX, 2 * s.experts + 1 + 2 * entries);
  int32_t *next = offsets + s.experts + 1, *positions = next + s.experts, *token_of = positions + entries;
  sort_pairs(ids, top_k, tokens, top_k, s.experts, offsets, next, positions, token_of);
  const int64_t rows = offsets[s.experts];
  choose_products<T>(&s, rows / std::max<int64_t>(s.experts, 1));
  Unit* units = scratch<Unit>(SHARED_UNITS, rows / UNIT_ROWS + s.experts + tokens / UNIT_ROWS + 2);
  int64_t count = 0;
  for (int64_t e = 0; e < s.experts; e++)
    count = add_units<T>(s, units, count, e, offsets[e], offsets[e + 1] - offsets[e], offsets[e]);
  Shape one = shared ? shape_of<T>(1, s.hidden, shared->width, shared->up_form, shared->down_form, nullptr, s.limit) : s;
  choose_products<T>(&one, tokens);
  const int64_t stride = hidden_stride<T>(s), one_stride = hidden_stride<T>(one);
  T* hidden = scratch<T>(SHARED_HIDDEN, rows * stride + (shared ? tokens * one_stride : 0));
  T* partial = scratch<T>(SHARED_OUT, rows * s.hidden);
  // A token has several experts, and the same integers for each.
  int64_t distance = ldx * int64_t(sizeof(T));
  const char* coded = reinterpret_cast<const char*>(x);
  const Coding* form = s.form_of_rows();
  if (form) coded = coded_rows<T>(*form, x, &distance, tokens, s.hidden, SHARED_ROWS);
  const int64_t bytes = static_cast<const void*>(coded) == x ? s.hidden * int64_t(sizeof(T)) : distance;
  const auto rows_of = [&](const Unit& unit, int64_t* apart) {
    const int32_t* index = token_of + unit.begin;
    if (form) return coded_tokens(coded, distance, index, unit.rows, bytes, apart);
    return own_rows<T>(x, ldx, index, unit.rows, s.hidden, apart, nullptr);
  };
  const auto out_of = [&](const Unit& unit) { return partial + unit.begin * s.hidden; };
  const Passes own(units, count, s, Panels::of(weights, s), hidden, stride, rows_of, out_of);
  const auto token_rows = [&](const Unit& unit, int64_t* apart) {
    return own_rows<T>(x + unit.source * ldx, ldx, nullptr, unit.rows, s.hidden, apart, one.form_of_rows());
  };
  const auto token_out = [&](const Unit& unit) { return out + unit.source * s.hidden; };
  Panels panels{};
  if (shared) panels = {static_cast<const uint32_t*>(shared->up), static_cast<const uint32_t*>(shared->down), 0};
  const int64_t shared_count = shared ? add_units<T>(one, units + count, 0, 0, 0, tokens, 0) : 0;
  const Passes common(units + count, shared_count, one, panels, hidden + rows * stride, one_stride, token_rows,
                      token_out);
  parallel_products(own.up_tasks + common.up_tasks,
                    [&](int64_t task) { task < own.up_tasks ? own.up(task) : common.up(task - own.up_tasks); });
  parallel_products(own.down_tasks + common.down_tasks,
                    [&](int64_t task) { task < own.down_tasks ? own.down(task) : common.down(task - own.down_tasks); });
  combine_rows<T>(partial, s.hidden, positions, top_k, topk, top_k, shared ? out : sum, shared ? s.hidden : lds, out,
                  tokens, s.hidden);
}

// A dense gated MLP from the packed weights of two linear layers, gate_up [2I, D] with I a multiple of 16.
template <class T>
static void mlp(const T* x, int64_t ldx, int64_t m, int64_t hidden, int64_t width, const uint32_t* gate_up,
                const uint32_t* down, int64_t out_features, T* out, int64_t ldo, const Coding* up_form,
                const Coding* down_form, float limit) {
  if (m <= 0) return;
  const int64_t in_steps = packed_steps<T>(hidden), mid_steps = packed_steps<T>(width);
  const bool up_decoded = decodes<T>(up_form, m), down_decoded = decodes<T>(down_form, m);
  const Packed first{gate_up, 2 * panels_of(width), in_steps, up_form, up_decoded};
  const Packed second{down, panels_of(out_features), mid_steps, down_form, down_decoded};
  const Rows<T> rows(x, ldx, m, hidden, SHARED_ROWS, up_decoded ? nullptr : up_form);
  const int64_t stride = padded_k<T>(width) + 64 / int64_t(sizeof(T)), width_panels = panels_of(width);
  T* middle = scratch<T>(SHARED_HIDDEN, m * stride);
  const int64_t row_block = task_rows(up_decoded ? first : second, ROW_BLOCK, m), row_tasks = ceil_div(m, row_block);
  const int64_t up_width = panels_per_task(width_panels, 8 * panel_units<T>(hidden, up_form), row_tasks);
  parallel_products(row_tasks * ceil_div(width_panels, up_width), [&](int64_t task) {
    const int64_t row = task % row_tasks * row_block, begin = task / row_tasks * up_width;
    const int64_t here = std::min(row_block, m - row), end = std::min(begin + up_width, width_panels);
    float* gate = scratch<float>(PRODUCT, 2 * here * GROUP * LANES);
    float* up = gate + here * GROUP * LANES;
    for (int64_t p = begin; p < end; p += GROUP) {
      const int64_t count = std::min(GROUP, end - p), column = p * LANES;
      const Columns<T> gates(first, hidden, p, count, width_panels + p, 0);
      const int64_t next = panel_after(first, p + count, begin, end, row_tasks);
      const Columns<T> ups(first, hidden, width_panels + p, count, next, 1);
      each_block(first, here, [&](int64_t start, int64_t some) {
        const char* x_rows = rows.data + (row + start) * rows.stride;
        gates.multiply(x_rows, rows.stride, some, gate, GROUP * LANES);
        ups.multiply(x_rows, rows.stride, some, up, GROUP * LANES);
        activate(gate, up, GROUP * LANES, some, std::min(count * LANES, width - column), limit,
                 middle + (row + start) * stride + column, stride);
      });
    }
    if (end == width_panels)
      for (int64_t i = 0; i < here; i++)
        std::memset(middle + (row + i) * stride + width, 0, size_t(stride - width) * sizeof(T));
  });
  const int64_t down_width = panels_per_task(second.panels, 4 * panel_units<T>(width, down_form), row_tasks);
  parallel_products(row_tasks * ceil_div(second.panels, down_width), [&](int64_t task) {
    const int64_t row = task % row_tasks * row_block, begin = task / row_tasks * down_width;
    const int64_t here = std::min(row_block, m - row), end = std::min(begin + down_width, second.panels);
    float* c = scratch<float>(PRODUCT, here * GROUP * LANES);
    int64_t apart = stride * int64_t(sizeof(T));
    const char* a = reinterpret_cast<const char*>(middle + row * stride);
    if (down_form && !down_decoded) a = coded_rows<T>(*down_form, a, &apart, here, width, ROWS);
    for (int64_t p = begin; p < end; p += GROUP) {
      const int64_t count = std::min(GROUP, end - p), column = p * LANES;
      const Columns<T> panels(second, width, p, count, panel_after(second, p + count, begin, end, row_tasks));
      each_block(second, here, [&](int64_t start, int64_t some) {
        panels.multiply_to(a + start * apart, apart, some, std::min(count * LANES, out_features - column), nullptr,
                           out + (row + start) * ldo + column, ldo, c, GROUP * LANES);
      });
    }
  });
}

}  // namespace moe

using namespace moe;

API int64_t moe_expert_bytes(int is_bf16, int64_t hidden, int64_t width, const Coding* up_form,
                             const Coding* down_form, int squared) {
  return 4 * (is_bf16 ? shape_of<bf16>(1, hidden, width, up_form, down_form, nullptr, 0, squared)
                      : shape_of<float>(1, hidden, width, up_form, down_form, nullptr, 0, squared))
                 .expert_units;
}

// Exactly one of offsets [E + 1] (contiguous rows) and counts [E] (`capacity` rows per expert) is given.
API void moe_experts(int is_bf16, const void* x, const int32_t* offsets, const int32_t* counts, int64_t capacity,
                     int64_t experts, int64_t hidden, int64_t width, const void* weights, void* out,
                     const Coding* up_form, const Coding* down_form, const ExpertBiases* biases, float limit) {
  auto run = [&](auto a) {
    using T = decltype(a);
    batch(static_cast<const T*>(x), offsets, counts, capacity,
          shape_of<T>(experts, hidden, width, up_form, down_form, biases, limit),
          static_cast<const uint32_t*>(weights), static_cast<T*>(out));
  };
  is_bf16 ? run(bf16()) : run(float());
}

API void moe_routed(int is_bf16, const void* x, int64_t ldx, int64_t tokens, int64_t top_k, const float* topk,
                    const int32_t* ids, int64_t experts, int64_t hidden, int64_t width, const void* weights,
                    const void* sum, int64_t lds, void* out, const Coding* up_form, const Coding* down_form,
                    const ExpertBiases* biases, float limit) {
  auto run = [&](auto a) {
    using T = decltype(a);
    routed(static_cast<const T*>(x), ldx, tokens, top_k, topk, ids,
           shape_of<T>(experts, hidden, width, up_form, down_form, biases, limit),
           static_cast<const uint32_t*>(weights), nullptr, static_cast<const T*>(sum), lds, static_cast<T*>(out));
  };
  is_bf16 ? run(bf16()) : run(float());
}

API void moe_mixture(int is_bf16, const void* x, int64_t ldx, int64_t tokens, int64_t top_k, const float* topk,
                     const int32_t* ids, int64_t experts, int64_t hidden, int64_t width, const void* weights,
                     const Coding* up_form, const Coding* down_form, const SharedExpert* shared, float limit,
                     void* out) {
  auto run = [&](auto a) {
    using T = decltype(a);
    const T* none = nullptr;
    routed(static_cast<const T*>(x), ldx, tokens, top_k, topk, ids,
           shape_of<T>(experts, hidden, width, up_form, down_form, nullptr, limit),
           static_cast<const uint32_t*>(weights), shared, none, 0, static_cast<T*>(out));
  };
  is_bf16 ? run(bf16()) : run(float());
}

API void moe_mlp(int is_bf16, const void* x, int64_t ldx, int64_t m, int64_t hidden, int64_t width, const void* gate_up,
                 const void* down, int64_t out_features, void* out, int64_t ldo, const Coding* up_form,
                 const Coding* down_form, float limit) {
  auto run = [&](auto a) {
    using T = decltype(a);
    mlp(static_cast<const T*>(x), ldx, m, hidden, width, static_cast<const uint32_t*>(gate_up),
        static_cast<const uint32_t*>(down), out_features, static_cast<T*>(out), ldo, up_form, down_form, limit);
  };
  is_bf16 ? run(bf16()) : run(float());
}
