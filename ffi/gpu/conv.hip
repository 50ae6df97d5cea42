// The launch of the short convolution for one type (KDA_IO); compiled once for each, like driver.hip.
#include "conv.h"

#if defined(__CUDACC__)
#include "nvidia_tiles.h"
#else
#include "cdna_tiles.h"
#endif
#include "launches.h"

namespace kda {
inline namespace KDA_ISA {
namespace {

#if defined(__CUDACC__)
using ConvTiles = NvidiaTiles<KDA_IO>;
#else
using ConvTiles = CdnaTiles<KDA_IO>;
#endif

std::string run(ConvProblem p, void* on) {
  int64_t blocks = 0;
  for (int i = 0; i < p.num_parts; ++i) {
    p.parts[i].first_block = int32_t(blocks);
    blocks += conv_blocks(p, p.parts[i]);
    if (blocks * kConvThreads >= int64_t(1) << 31) return "too many tokens and channels for one launch";
  }
  if (blocks == 0) return "";
  Stream stream{static_cast<hipStream_t>(on), false};
  KDA_TRY(launch(conv_kernel<ConvTiles>, blocks, kConvThreads, 0, stream, ConvProblem(p)));
  return "";
}

}  // namespace
}  // namespace KDA_ISA

#define KDA_JOIN2(a, b) a##b
#define KDA_JOIN(a, b) KDA_JOIN2(a, b)
std::string gpu::KDA_JOIN(convolve_, KDA_IO)(const ConvProblem& p, void* stream) { return KDA_ISA::run(p, stream); }

}  // namespace kda
