#include <algorithm>
#include <cstring>

#include "kernels.hpp"
#include "repack.hpp"

#if defined(__AVX512VNNI__)
#include <immintrin.h>

#define FR_ISA 3

namespace forerun {
namespace isa_avx512 {
namespace {
#include "simd.hpp"
#include "linear.inc"
#include "attention.inc"
#include "pointwise.inc"
#include "table.inc"
}  // namespace
}  // namespace isa_avx512

const KernelTable* kernels_avx512() {
  static const KernelTable table = isa_avx512::make_table("avx512");
  return &table;
}
}  // namespace forerun

#else
namespace forerun {
const KernelTable* kernels_avx512() { return nullptr; }
}  // namespace forerun
#endif
