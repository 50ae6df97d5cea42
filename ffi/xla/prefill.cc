#include "prefill.h"

#include <algorithm>

#include "checker.h"

namespace kda {
namespace {

// All but the states.
void convert(Checker& check, PrefillOperands in, PrefillResults res, PrefillAttributes at,
             Problem* p) {
  *p = Problem{};
  const auto q = in.q.dimensions(), v = in.v.dimensions();
  if (q.size() != 3 || v.size() != 3) {
    check.fail("q and v", "must have rank 3: [T, H, channels]");
    return;
  }
  const int64_t T = q[0], H = q[1], K = q[2], V = v[2];
  const int64_t N = in.seqs.dimensions().size() == 2 ? in.seqs.dimensions()[0] : -1;
  const int64_t NC = in.chunks.dimensions().size() == 2 ? in.chunks.dimensions()[0] : -1;
  const int64_t M = in.checkpoints.dimensions().size() == 2 ? in.checkpoints.dimensions()[0] : -1;

  p->q = check.tensor("q", in.q);
  p->k = check.tensor("k", in.k);
  p->v = check.tensor("v", in.v);
  p->g = check.tensor("g", in.g);
  p->beta = check.tensor("beta", in.beta);
  check.shape("k", in.k, {T, H, K});
  check.shape("v", in.v, {T, H, V});
  check.shape("g", in.g, {T, H, K});
  check.shape("beta", in.beta, {T, H});
  check.shape("seqs", in.seqs, {N, 4});
  check.shape("chunks", in.chunks, {NC, 4});
  check.shape("checkpoints", in.checkpoints, {M, 2});
  check.type("seqs", in.seqs, ffi::DataType::S32);
  check.type("chunks", in.chunks, ffi::DataType::S32);
  check.type("checkpoints", in.checkpoints, ffi::DataType::S32);
  check.type("A_log", in.A_log, ffi::DataType::F32);
  check.type("dt_bias", in.dt_bias, ffi::DataType::F32);
  if (at.gate < 0 || at.gate > 2) check.fail("gate", "must be 0, 1 or 2");
  if (at.gate != int32_t(Gate::kActivated)) {
    check.shape("A_log", in.A_log, {H});
    check.shape("dt_bias", in.dt_bias, {H, K});
  }
  check.shape("out", *res.out, {T, H, V});
  check.type("out", *res.out, in.v.element_type());

  p->A_log = optional<float>(in.A_log);
  p->dt_bias = optional<float>(in.dt_bias);
  p->seqs = optional<int32_t>(in.seqs);
  p->chunks = optional<int32_t>(in.chunks);
  p->checkpoints = optional<int32_t>(in.checkpoints);
  p->out = res.out->untyped_data();
  p->workspace = res.workspace->untyped_data();
  p->workspace_bytes = int64_t(res.workspace->size_bytes());
  p->T = T;
  p->N = N;
  p->NC = NC;
  p->M = M;
  p->H = int32_t(H);
  p->K = int32_t(K);
  p->V = int32_t(V);
  p->C = at.chunk_size;
  p->scale = at.scale;
  p->lower_bound = at.lower_bound;
  p->gate = Gate(at.gate);
  p->l2norm = at.l2norm;
  p->state_kv = at.state_kv;
  p->mixed = at.mixed;
  p->groups = at.groups;
  p->slab_chunks = at.slab_chunks;
}

}  // namespace

ffi::Error make_problem(const char* target, PrefillOperands in, PrefillStates states,
                        PrefillResults res, PrefillAttributes at, Problem* p) {
  Checker check(target);
  convert(check, in, res, at, p);
  const int64_t N = p->N, M = p->M, H = p->H;
  const int64_t rows = at.state_kv ? p->K : p->V, cols = at.state_kv ? p->V : p->K;
  check.type("initial_state", states.initial_state, ffi::DataType::F32);
  check.type("has_initial_state", states.has_initial_state, ffi::DataType::PRED);
  if (states.initial_state.element_count())
    check.shape("initial_state", states.initial_state, {N, H, rows, cols});
  if (states.has_initial_state.element_count())
    check.shape("has_initial_state", states.has_initial_state, {N});
  check.shape("final_state", *states.final_state, {N, H, rows, cols});
  check.type("final_state", *states.final_state, ffi::DataType::F32);
  check.shape("checkpoint_state", *states.checkpoint_state, {M, H, rows, cols});
  check.type("checkpoint_state", *states.checkpoint_state, ffi::DataType::F32);
  p->initial_state = optional<float>(states.initial_state);
  p->has_initial_state = optional<uint8_t>(states.has_initial_state);
  p->final_state = static_cast<float*>(states.final_state->untyped_data());
  p->checkpoint_state = static_cast<float*>(states.checkpoint_state->untyped_data());
  return check.verdict();
}

ffi::Error make_problem(const char* target, PrefillOperands in, PrefillPool pool,
                        PrefillResults res, PrefillAttributes at, Problem* p) {
  Checker check(target);
  convert(check, in, res, at, p);
  const int64_t rows = at.state_kv ? p->K : p->V, cols = at.state_kv ? p->V : p->K;
  const auto dims = pool.before.dimensions();
  const int64_t R = dims.size() ? dims[0] : -1;
  check.shape("state_cache", pool.before, {R, p->H, rows, cols});
  check.type("state_cache", pool.before, ffi::DataType::F32);
  check.shape("state_cache (result)", *pool.after, {R, p->H, rows, cols});
  check.type("state_cache (result)", *pool.after, ffi::DataType::F32);
  check.shape("state_indices", pool.state_indices, {p->N});
  check.type("state_indices", pool.state_indices, ffi::DataType::S32);
  check.shape("has_initial_state", pool.has_initial_state, {p->N});
  check.type("has_initial_state", pool.has_initial_state, ffi::DataType::PRED);
  check.shape("checkpoint_state_indices", pool.checkpoint_state_indices, {p->M});
  check.type("checkpoint_state_indices", pool.checkpoint_state_indices, ffi::DataType::S32);
  if (pool.before.untyped_data() != pool.after->untyped_data())
    check.fail("state_cache", "must be aliased to its result: rows are written in place");
  p->in_pool = true;
  p->pool_rows = uint32_t(std::clamp<int64_t>(R, 0, INT64_C(1) << 31));
  p->final_state = static_cast<float*>(pool.after->untyped_data());
  p->initial_state = p->checkpoint_state = p->final_state;
  p->has_initial_state = optional<uint8_t>(pool.has_initial_state);
  p->state_rows = optional<int32_t>(pool.state_indices);
  p->checkpoint_rows = optional<int32_t>(pool.checkpoint_state_indices);
  return check.verdict();
}

}  // namespace kda
