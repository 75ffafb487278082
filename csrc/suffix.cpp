#include "suffix.hpp"

#include <nanobind/nanobind.h>

namespace forerun {

void register_suffix(nanobind::module_&) {}

}  // namespace forerun
