#include <algorithm>
#include <cstring>

#include "kernels.hpp"
#include "repack.hpp"


#define FR_ISA 0

namespace forerun {
namespace isa_portable {
namespace {
#include "simd.hpp"
#include "linear.inc"
#include "attention.inc"
#include "pointwise.inc"
#include "table.inc"
}  // namespace
}  // namespace isa_portable

const KernelTable* kernels_portable() {
  static const KernelTable table = isa_portable::make_table("portable");
  return &table;
}
}  // namespace forerun

