// Gradients of log_decay and beta of a chunk from what the other stages found for them:
//   dlog_decay_l = its part from the pairs + sum of u_i, i >= l + sum of e_j, j < l + Gamma_C <S, dS>
  threadgroup float arena[ARENA];
  const int i = thread_index_in_threadgroup;
  const int chunk = threadgroup_position_in_grid.x;
  const int first = span[0], chunks = span[1], T = span[2], value_heads = span[5];
  const int head = threadgroup_position_in_grid.y % value_heads, row = threadgroup_position_in_grid.y / value_heads;
  const int span_tokens = min(chunks * C, T - first * C);
  const long cell = (long(row) * value_heads + head) * chunks + chunk;
  threadgroup float* u = arena;
  threadgroup float* e = arena + C;

  float through_gamma = 0.0f;
  if (i < C) {
    float u_sum = 0.0f, e_sum = 0.0f;
    for (int block = 0; block < BLOCKS; block++) {
      const device float* sums = row_sums + (cell * BLOCKS + block) * (3 * C) + i;
      u_sum += sums[0];
      e_sum += sums[C];
      through_gamma += sums[2 * C];
    }
    u[i] = u_sum;
    e[i] = e_sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = i < C ? d_decay_pairs[cell * C + i] : 0.0f;
  for (int block = 0; block < BLOCKS * SUMS; block++) sum += state_sums[cell * (BLOCKS * SUMS) + block];
  for (int j = 0; j < C; j++) sum += j < i ? e[j] : u[j];
  if (i < C && chunk * C + i < span_tokens) {
    const long to = (long(row) * span_tokens + chunk * C + i) * value_heads + head;
    d_log_decay[to] = sum;
    d_beta[to] = d_beta_pairs[cell * C + i] - through_gamma;
  }
