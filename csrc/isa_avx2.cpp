#include <algorithm>
#include <cstring>

#include "kernels.hpp"
#include "repack.hpp"

#if defined(__AVX2__)
#include <immintrin.h>

#define FR_ISA 1

namespace forerun {
namespace isa_avx2 {
namespace {
#include "simd.hpp"
#include "linear.inc"
#include "attention.inc"
#include "pointwise.inc"
#include "table.inc"
}  // namespace
}  // namespace isa_avx2

const KernelTable* kernels_avx2() {
  static const KernelTable table = isa_avx2::make_table("avx2");
  return &table;
}
}  // namespace forerun

#else
namespace forerun {
const KernelTable* kernels_avx2() { return nullptr; }
}  // namespace forerun
#endif
