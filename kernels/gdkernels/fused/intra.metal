// What the tokens of a chunk do to each other, for HEADS value heads of one key head:
//   A_ij = beta_i D_ij (k_i . k_j), j < i      M = (I + A)^-1      P_ij = D_ij (q_i . k_j), j <= i
// A SIMD group owns R tokens; q.k and k.k stay in its registers for all of them.
  threadgroup float arena[ARENA];
  const Lane lane = make_lane(thread_index_in_simdgroup);
  const int thread_id = thread_index_in_threadgroup;
  const int group = simdgroup_index_in_threadgroup;
  const int chunk = threadgroup_position_in_grid.x;
  const int first = span[0], chunks = span[1], T = span[2], key_heads = span[4], value_heads = span[5];
  const int first_head = int(threadgroup_position_in_grid.y) * HEADS, head = first_head / (value_heads / key_heads);
  const int row = threadgroup_position_in_grid.z;
  const int key_row = key_heads * DK;
  const int token = (first + chunk) * C;
  const int valid = min(C, T - token);
  const int r0 = group * R;

  Decays<threadgroup float*> decays = decays_at(arena + AT_DECAYS);
  threadgroup float* A = arena + AT_A;
  threadgroup float* temporary = arena + AT_TEMPORARY;
  const auto inverse = staged(A, A_LD);

  const long key = ((long(row) * T + token) * key_heads + head) * DK;
  const NearActivations qs = bring_activations<C, DK>(arena + AT_Q, Q_LD, q + key, key_row, valid, thread_id);
  const NearActivations ks = bring_activations<C, DK>(arena + AT_K, K_LD, k + key, key_row, valid, thread_id);
  stage_commit();
  arrived(false);
  Tile qk[C / 8], kk[C / 8];
  UNROLL
  for (int j = 0; j < C / 8; j++) qk[j] = zero_tile(), kk[j] = zero_tile();
  for (int d = 0; d < DK; d += 16) {
    const auto q_rows = left_activations(qs, r0, d, lane), k_rows = left_activations(ks, r0, d, lane);
    UNROLL
    for (int j = 0; j < C / 16; j++) {
      if (16 * j < r0 + R) {
        const auto columns = right2_t(ks, 16 * j, d, lane);
        UNROLL
        for (int h = 0; h < 2; h++) {
          mma(qk[2 * j + h], q_rows, columns.r[h]);
          mma(kk[2 * j + h], k_rows, columns.r[h]);
        }
      }
    }
  }
#if PAIRS
  if (first_head % (value_heads / key_heads) == 0) {
    const long pair = ((long(row) * key_heads + head) * chunks + chunk) * (C * C);
    UNROLL
    for (int j = 0; j < C / 8; j++) {
      store<float>(QK + pair, C, r0, 8 * j, C, qk[j], lane);
      store<float>(KK + pair, C, r0, 8 * j, C, kk[j], lane);
    }
  }
#endif

  for (int value_head = first_head; value_head < first_head + HEADS; value_head++) {
    const long gate = (long(row) * T + token) * value_heads + value_head;
    const long cell = (long(row) * value_heads + value_head) * chunks + chunk;
    load_decays(decays, log_decay + gate, value_heads, valid, thread_id);
    for (int i = thread_id; i < C; i += 32 * GROUPS) {
      const float b = i < valid ? beta[gate + i * value_heads] : 0.0f;
      scales[cell * 3 * C + i] = decay_from_start(decays, i);
      scales[cell * 3 * C + C + i] = decay_to_end(decays, i);
      scales[cell * 3 * C + 2 * C + i] = b;
    }
    float betas[R / 8], between[R / 8];
    UNROLL
    for (int i = 0; i < R / 8; i++) {
      const int r = r0 + 8 * i + lane.row;
      betas[i] = r < valid ? beta[gate + r * value_heads] : 0.0f;
      between[i] = 0.0f;
    }
    UNROLL
    for (int j = C / 8 - 1; j >= 0; j--) {
      Tile decay = decay_tile(decays, r0, j, between, lane);
      Tile a;
      UNROLL
      for (int i = 0; i < R / 8; i++) {
        UNROLL
        for (int c = 0; c < 2; c++) {
          const bool below = 8 * j + lane.col + c < r0 + 8 * i + lane.row;
          a[2 * i + c] = below ? betas[i] * decay[2 * i + c] * kk[j][2 * i + c] : 0.0f;
          decay[2 * i + c] *= qk[j][2 * i + c];
        }
      }
      store_planes(P + cell * (PARTS * C * C), C * C, C, r0, 8 * j, decay, lane);
      store<float>(A, A_LD, r0, 8 * j, C, a, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    invert(A, temporary, group, thread_id, lane);
    UNROLL
    for (int j = 0; j < C / 8; j++) {
      const Tile t = tile(inverse, r0, 8 * j, lane);
      store_planes(M + cell * (PARTS * C * C), C * C, C, r0, 8 * j, t, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
