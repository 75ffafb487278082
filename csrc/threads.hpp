// One pool of threads for the whole process: several engines share it and take turns, so that cores are never
// oversubscribed. A job runs on every member at once; members meet at barriers inside it.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>

namespace forerun {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// What a running job sees of its team.
class Team {
 public:
  // `patience`: looks at the other members before a waiting one lets other threads run.
  Team(int size, int patience) : size_(size), patience_(patience) {}
  int size() const { return size_; }
  // All members arrive before any leaves. Spins, since the wait is microseconds, with spin() between two looks; yields if
  // it lasts, because then a member has no core, and spinning would only keep it waiting.
  template <class Spin>
  void barrier(Spin spin) {
    if (size_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (spins < patience_) spin();
      else yield();
    }
  }
  void barrier() { barrier(cpu_relax); }

 private:
  static void yield();
  const int size_, patience_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// Runs job(member, team) on `threads` members (the caller is member 0) and returns when all are done. Calls from
// several threads are served one after another.
void run_team(int threads, const std::function<void(int, Team&)>& job);

int physical_cores();  // that this process may use

}  // namespace forerun
