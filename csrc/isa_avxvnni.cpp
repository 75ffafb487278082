#include <algorithm>
#include <cstring>

#include "kernels.hpp"
#include "repack.hpp"

#if defined(__AVXVNNI__)
#include <immintrin.h>

#define FR_ISA 2

namespace forerun {
namespace isa_avxvnni {
namespace {
#include "simd.hpp"
#include "linear.inc"
#include "attention.inc"
#include "pointwise.inc"
#include "table.inc"
}  // namespace
}  // namespace isa_avxvnni

const KernelTable* kernels_avxvnni() {
  static const KernelTable table = isa_avxvnni::make_table("avxvnni");
  return &table;
}
}  // namespace forerun

#else
namespace forerun {
const KernelTable* kernels_avxvnni() { return nullptr; }
}  // namespace forerun
#endif
