// Decodes whose contexts begin with the same slots: that prefix is read, packed and multiplied once, with the columns
// of all of them, and each continues its own sums behind it. Every chain of additions is that of Attention::whole, and
// so are the bits.
//
// Legend: a *run* is adjacent requests of one query token each with a prefix of whole blocks; a part is some of them.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"

namespace moe {

constexpr int64_t PART_COLUMNS = 256;  // of a unit over a prefix

// The runs of a step, as requests whose query tokens are outside the context.
struct PrefixRuns {
  std::vector<int32_t> rows, starts, contexts, members;
  std::vector<int32_t> run_of;  // of each request; -1: none
  int32_t most = 0;             // members of a run

  PrefixRuns(const Queries& q, int64_t block) : run_of(size_t(q.requests), -1) {
    for (int64_t r = 0, next; r < q.requests; r = next) {
      int64_t shared = INT64_MAX;
      for (next = r + 1; next < q.requests && q.tokens(r) == 1 && q.tokens(next) == 1; next++) {
        const int64_t common = common_slots(q, r, next) / block * block;
        if (common == 0 || (shared < INT64_MAX && common < shared / 2)) break;
        shared = std::min(shared, common);
      }
      if (next == r + 1) continue;
      std::fill(run_of.begin() + r, run_of.begin() + next, int32_t(rows.size()));
      rows.push_back(q.rows[r]), starts.push_back(q.starts[r]), contexts.push_back(int32_t(shared));
      members.push_back(int32_t(next - r));
      most = std::max(most, members.back());
    }
  }
  int64_t count() const { return int64_t(rows.size()); }
  Queries queries(const Queries& q) const {
    return {count(), rows.data(), starts.data(), contexts.data(), q.slots, q.slots_row, nullptr, 0, nullptr, 1};
  }

 private:
  // Slots that two contexts begin with in common, before the last position of each.
  static int64_t common_slots(const Queries& q, int64_t a, int64_t b) {
    const int32_t *one = q.slots + q.rows[a] * q.slots_row, *other = q.slots + q.rows[b] * q.slots_row;
    return std::mismatch(one, one + std::min(q.contexts[a], q.contexts[b]) - 1, other).first - one;
  }
};

// Sums of a part's columns over its prefix.
template <class T, class Source>
void sum_prefix(const Attention<T, Source>& shared, const Unit& u, const Begun& sums) {
  const uint32_t* panels = shared.packed_queries(u);
  const int32_t* last = shared.last_positions(u);
  const int64_t context = shared.queries.contexts[u.request];
  for (int64_t s = 0; s < u.splits; s++) {
    const bool first = s == 0 && context >= SPLIT;
    shared.split(u, s, panels, last, first ? sums.whole : sums.open);
    if (!first && (s + 1) * SPLIT <= context) shared.merge(sums.whole, sums.open, u.columns);
  }
}

// False: no prefix is common to neighbors, or the units are too few for all threads.
template <class T, class Source>
bool run_behind_prefix(const Attention<T, Source>& whole, Unit* units, int64_t count, int64_t threads) {
  const Queries& q = whole.queries;
  if (q.visible || q.window || q.first || q.outside || count < 2 * threads) return false;
  const PrefixRuns runs(q, whole.block);
  if (runs.count() == 0) return false;
  const Queries prefixes = runs.queries(q);
  const Source source = whole.source.with(prefixes);
  const Attention<T, Source> shared(prefixes, whole.heads, source);
  const int64_t groups = whole.heads.groups, heads = whole.heads.group_heads;
  const int64_t wanted = ceil_div(runs.most, ceil_div(2 * threads, runs.count() * groups));
  const int64_t members = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(PART_COLUMNS / heads, 1));
  const int64_t parts = ceil_div(runs.most, members), floats = whole.running_floats(members * heads);
  float* memory = scratch<float>(SHARED_OUT, 2 * floats * runs.count() * groups * parts);
  auto sums_at = [&](int64_t run, int64_t group, int64_t part) {
    float* at = memory + 2 * floats * ((run * groups + group) * parts + part);
    const int64_t padded = panels_of(members * heads) * LANES;
    return Begun{running_at(at, padded), running_at(at + floats, padded)};
  };
  parallel_products(runs.count() * groups * parts, [&](int64_t task) {
    const int64_t part = task % parts, group = task / parts % groups, run = task / parts / groups;
    const int64_t here = std::min(members, runs.members[size_t(run)] - part * members);
    if (here <= 0) return;
    const int64_t splits = ceil_div(prefixes.contexts[run], SPLIT);
    sum_prefix(shared, {run, group, part * members * heads, here * heads, splits, 0, 0}, sums_at(run, group, part));
  });
  for (int64_t i = 0; i < count; i++) {
    const int32_t run = runs.run_of[size_t(units[i].request)];
    if (run < 0) continue;
    units[i].from = prefixes.contexts[run];
    units[i].splits -= units[i].from / SPLIT;
  }
  parallel_products(count, [&](int64_t task) {
    const Unit &u = units[task], *next = task + threads < count ? &units[task + threads] : nullptr;
    const int32_t run = runs.run_of[size_t(u.request)];
    if (run < 0) return whole.whole(u, next);
    const int64_t member = q.starts[u.request] - prefixes.starts[run];
    const Begun begun = sums_at(run, u.group, member / members).from(member % members * heads, whole.value);
    whole.whole(u, next, nullptr, &begun);
  });
  return true;
}

}  // namespace moe
