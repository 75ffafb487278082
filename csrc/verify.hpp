// Rejection sampling at a node of a draft tree.
#pragma once

namespace nanobind {
class module_;
}

namespace forerun {

void register_verify(nanobind::module_& m);

}  // namespace forerun
