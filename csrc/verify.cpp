#include "verify.hpp"

#include <nanobind/nanobind.h>

namespace forerun {

void register_verify(nanobind::module_&) {}

}  // namespace forerun
