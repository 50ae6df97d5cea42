// Runs host tasks on XLA's intra-op thread pool.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "../host/launch.h"
#include "xla/ffi/api/ffi.h"

namespace kda {

// The caller takes tasks like every helper and never waits for a helper that has not begun, so a call
// that itself runs on the pool's last free thread still ends.
class PoolRun {
 public:
  static void run(xla::ffi::ThreadPool& pool, int workers, int64_t n,
                  const std::function<void(int, int64_t)>& task) {
    auto state = std::make_shared<PoolRun>(n, &task);
    const int64_t helpers = std::min<int64_t>(workers, n) - 1;
    for (int64_t h = 1; h <= helpers; ++h)
      pool.Schedule([state, h] { state->help(int(h)); });
    state->work(0);
    std::unique_lock<std::mutex> lock(state->mutex_);
    state->closed_ = true;
    state->idle_.wait(lock, [&] { return state->helping_ == 0; });
  }

  PoolRun(int64_t n, const std::function<void(int, int64_t)>* task) : n_(n), task_(task) {}

 private:
  void help(int worker) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) return;  // too late: the caller has gone, and `task_` with it
      ++helping_;
    }
    work(worker);
    std::lock_guard<std::mutex> lock(mutex_);
    if (--helping_ == 0) idle_.notify_one();
  }
  void work(int worker) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < n_;) (*task_)(worker, i);
  }

  const int64_t n_;
  const std::function<void(int, int64_t)>* const task_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable idle_;
  int helping_ = 0;
  bool closed_ = false;
};

}  // namespace kda
