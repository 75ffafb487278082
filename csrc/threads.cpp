#include "threads.hpp"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <fstream>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace forerun {

void Team::yield() { sched_yield(); }

namespace {

class Pool {
 public:
  void run(int threads, const std::function<void(int, Team&)>& job) {
    std::lock_guard<std::mutex> turn(turn_);
    // Tens of microseconds where each member can have a core; none at all where members must share them.
    const int patience = threads <= cores_ ? 1000 : 0;
    Team team(threads, patience);
    if (threads > 1) {
      grow(threads - 1);
      job_ = &job;
      team_ = &team;
      running_.store(threads - 1, std::memory_order_relaxed);
      {
        std::lock_guard<std::mutex> lock(sleep_);
        const uint64_t generation = (signal_.load(std::memory_order_relaxed) >> 16) + 1;
        signal_.store(generation << 16 | uint64_t(threads), std::memory_order_release);
      }
      wake_.notify_all();
    }
    job(0, team);
    if (threads > 1) {
      for (int spins = 0; running_.load(std::memory_order_acquire) != 0; spins++) {
        if (spins < patience) cpu_relax();
        else sched_yield();
      }
    }
  }

 private:
  void grow(int workers) {
    while (int(workers_.size()) < workers) {
      const int member = int(workers_.size()) + 1;
      const uint64_t seen = signal_.load(std::memory_order_relaxed);
      workers_.emplace_back([this, member, seen] { work(member, seen); });
      workers_.back().detach();  // they live as long as the process
    }
  }

  void work(int member, uint64_t seen) {
    for (;;) {
      // A step follows the last one within a fraction of a millisecond while a model generates: spin that long
      // before sleeping, since waking costs more than the spin.
      const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(300);
      bool ready = false;
      do {
        for (int i = 0; i < 200 && !ready; i++) {
          ready = signal_.load(std::memory_order_acquire) != seen;
          cpu_relax();
        }
      } while (!ready && std::chrono::steady_clock::now() < until);
      if (!ready) {
        std::unique_lock<std::mutex> lock(sleep_);
        wake_.wait(lock, [&] { return signal_.load(std::memory_order_acquire) != seen; });
      }
      // One load tells both the generation and the team's size. A member of that team may then read the job: the
      // caller can't return, nor a later generation begin, before the member has reported. Others must not touch it.
      seen = signal_.load(std::memory_order_acquire);
      if (member >= int(seen & 0xffff)) continue;
      Team* team = team_;
      (*job_)(member, *team);
      running_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  const int cores_ = physical_cores();
  std::mutex turn_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> signal_{0};  // generation << 16 | members of its team
  std::atomic<int> running_{0};
  const std::function<void(int, Team&)>* job_ = nullptr;
  Team* team_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace

void run_team(int threads, const std::function<void(int, Team&)>& job) {
  // Leaked on purpose: worker threads may outlive static destruction. A forked child has no workers, so it gets a
  // pool of its own.
  static std::mutex guard;
  static Pool* pool = nullptr;
  static pid_t owner = 0;
  Pool* mine;
  {
    std::lock_guard<std::mutex> lock(guard);
    if (pool == nullptr || owner != getpid()) {
      pool = new Pool;
      owner = getpid();
    }
    mine = pool;
  }
  mine->run(threads, job);
}

int physical_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  std::set<std::pair<int, int>> cores;
  int logical = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    logical++;
    const std::string base = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    int package = 0, core = cpu;
    std::ifstream(base + "physical_package_id") >> package;
    std::ifstream core_file(base + "core_id");
    if (!(core_file >> core)) core = cpu;
    cores.insert({package, core});
  }
  int n = int(cores.size());
  // A container's CPU quota counts as well: more threads than quota only wait for each other.
  std::ifstream quota_file("/sys/fs/cgroup/cpu.max");
  long quota = 0, period = 0;
  if (quota_file >> quota >> period && quota > 0 && period > 0) {
    const int limit = int((quota + period - 1) / period);
    if (limit < n) n = limit;
  }
  return n > 0 ? n : (logical > 0 ? logical : 1);
}

}  // namespace forerun
