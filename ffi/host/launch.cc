// Checks a problem, picks the kernel for this CPU, provides scratch memory and threads.
#include "launch.h"

#include <memory>
#include <new>

#include "../check.h"
#include "denormals.h"
#include "driver.h"

namespace kda::host {
namespace {

const Driver& driver([[maybe_unused]] const Problem& p) {
#if defined(KDA_X86_DISPATCH)
  // Mixed operands reproduce a GPU's rounding; only the baseline build has them.
  if (!p.mixed) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      return driver_v4();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("bmi2"))
      return driver_v3();
  }
#endif
  return driver_base();
}

// A table that was not made by ChunkMetadata must not become an access out of bounds.
std::string check_tables(const Problem& p) {
  const auto* seqs = reinterpret_cast<const SeqRow*>(p.seqs);
  const auto* chunks = reinterpret_cast<const ChunkRow*>(p.chunks);
  int64_t row = 0, token = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const SeqRow& s = seqs[n];
    const std::string where = "metadata: sequence " + std::to_string(n);
    if (s.num_chunks < 0 || (s.num_chunks > 0 && s.first_chunk != row) || row + s.num_chunks > p.NC)
      return where + " has chunks outside of the chunk table";
    for (int64_t end = row + s.num_chunks; row < end; ++row) {
      const ChunkRow& c = chunks[row];
      if (c.sequence != n || c.first != token || c.valid < 1 || c.valid > p.C ||
          token + c.valid > p.T || c.checkpoint < -1 || c.checkpoint >= p.M)
        return where + " has a chunk row that does not fit (row " + std::to_string(row) + ")";
      token += c.valid;
    }
  }
  if (row < p.NC && chunks[row].sequence >= 0)
    return "metadata: chunk row " + std::to_string(row) + " belongs to no sequence";
  return "";
}

}  // namespace

int64_t workspace_bytes(const Problem& p) { return driver(p).workspace_bytes(p); }

const char* instruction_set() {
#if defined(KDA_X86_DISPATCH)
  const Driver* d = &driver(Problem{});
  if (d == &driver_v4()) return "x86-64-v4";
  if (d == &driver_v3()) return "x86-64-v3";
#endif
  return "baseline";
}

std::string prefill(const Problem& p, const Parallel& parallel) {
  if (std::string error = check_width(p); !error.empty()) return error;
  if (std::string error = check_sizes(p, 16, workspace_bytes(p)); !error.empty()) return error;
  if (std::string error = check_tables(p); !error.empty()) return error;
  const Driver& d = driver(p);
  struct Free {
    void operator()(char* m) const { ::operator delete(m, std::align_val_t(64)); }
  };
  const size_t bytes = size_t(d.scratch_bytes(p)) * size_t(parallel.workers);
  std::unique_ptr<char, Free> scratch(
      static_cast<char*>(::operator new(bytes, std::align_val_t(64), std::nothrow)));
  if (!scratch) return "out of memory: " + std::to_string(bytes) + " bytes of scratch";
  const TaskRunner tasks{
      const_cast<Parallel*>(&parallel),
      [](void* context, int64_t n, void (*task)(void*, int, int64_t), void* argument) {
        static_cast<Parallel*>(context)->run(n, [=](int worker, int64_t i) {
          const FlushDenormals flush;
          task(argument, worker, i);
        });
      }};
  d.prefill(p, tasks, parallel.workers, scratch.get());
  return "";
}

}  // namespace kda::host
