#include <cstring>

#include "kernels.hpp"

namespace forerun {

namespace {

bool cpu_has(const char* name) {
  if (!std::strcmp(name, "portable")) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!std::strcmp(name, "avx2")) return avx2;
  if (!std::strcmp(name, "avxvnni")) {
    uint32_t a = 7, b, c = 1, d;
    asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return avx2 && ((a >> 4) & 1);
  }
  if (!std::strcmp(name, "avx512"))
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#endif
  return false;
}

}  // namespace

const KernelTable* select_kernels(const char* name, const char** why) {
  struct Choice { const char* name; const KernelTable* (*get)(); };
  static constexpr Choice choices[] = {
      {"avx512", kernels_avx512}, {"avxvnni", kernels_avxvnni}, {"avx2", kernels_avx2}, {"portable", kernels_portable}};
  const bool any = name == nullptr || !*name;
  *why = "unknown instruction set";
  for (const Choice& c : choices) {
    if (!any && std::strcmp(c.name, name)) continue;
    // The CPU first: even fetching a table runs code that was compiled for its instruction set.
    if (!cpu_has(c.name)) { *why = "not supported by this CPU"; continue; }
    if (const KernelTable* table = c.get()) return table;
    *why = "not part of this build";
  }
  return nullptr;
}

}  // namespace forerun
