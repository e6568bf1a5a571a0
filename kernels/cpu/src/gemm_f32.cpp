// gemm.h for float.
#include "gemm_kernel.h"

namespace moe {

template <>
void gemm<float>(const void* a, int64_t lda, int64_t m, const uint32_t* b, int64_t panel, int64_t np, int64_t steps,
                 float* c, int64_t ldc, bool accumulate, const uint32_t* ahead) {
  tiles<float, false>(static_cast<const char*>(a), lda, m, b, panel, np, steps, c, ldc, accumulate, ahead);
}

template <>
void gemm_by_steps<float>(const uint32_t* a, int64_t lda, int64_t m, const uint32_t* b, int64_t panel, int64_t np,
                          int64_t steps, float* c, int64_t ldc, bool accumulate) {
  tiles<float, true>(reinterpret_cast<const char*>(a), 4 * lda, m, b, panel, np, steps, c, ldc, accumulate);
}

int64_t row_multiple(float) { return 16; }

template void pack_rows<float>(const float* const*, int64_t, int64_t, int64_t, uint32_t*);
template void pack_values<float>(const float* const*, int64_t, int64_t, int64_t, uint32_t*);

}  // namespace moe
