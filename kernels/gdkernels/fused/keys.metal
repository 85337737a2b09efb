// Gradients of q and k in BLOCK columns of one key head, summed over its value heads; a SIMD group owns R tokens.
//   dQ = d(q.k) K + sum over value heads of diag(Gamma) dY S
//   dK = d(q.k)^T Q + (d(k.k) + d(k.k)^T) K + sum of diag(E) delta dS - diag(beta Gamma) x S
// and, for every value head and this block of columns, what Gamma, E and beta get from the products with S and dS:
//   u_i = Gamma_i q_i . (dY S)_i - beta_i Gamma_i k_i . (x S)_i      e_j = E_j k_j . (delta dS)_j
//   Gamma_i k_i . (x S)_i
//   and Gamma_C <S, dS>
  threadgroup float arena[ARENA];
  const Lane lane = make_lane(thread_index_in_simdgroup);
  const int thread_id = thread_index_in_threadgroup;
  const int group = simdgroup_index_in_threadgroup, r0 = group * R;
  const int chunk = threadgroup_position_in_grid.x;
  const int block = threadgroup_position_in_grid.y, d0 = block * BLOCK;
  const int first = span[0], chunks = span[1], T = span[2], all_chunks = span[3];
  const int key_heads = span[4], value_heads = span[5];
  const int head = threadgroup_position_in_grid.z % key_heads, row = threadgroup_position_in_grid.z / key_heads;
  const int key_row = key_heads * DK, value_row = value_heads * DV;
  const int token = (first + chunk) * C;
  const int valid = min(C, T - token);
  const int span_tokens = min(chunks * C, T - first * C);

  const long key = ((long(row) * T + token) * key_heads + head) * DK;
  const Rows<const device Activation*> qs = rows_of(q + key, key_row, valid), ks = rows_of(k + key, key_row, valid);
  Tile dq_tile[BLOCK / 8], dk_tile[BLOCK / 8];
  UNROLL
  for (int n = 0; n < BLOCK / 8; n++) dq_tile[n] = zero_tile(), dk_tile[n] = zero_tile();

  for (int g = 0; g < value_heads / key_heads; g++) {
    const int value_head = head * (value_heads / key_heads) + g;
    const long bh = long(row) * value_heads + value_head;
    const long cell = bh * chunks + chunk;
    const Rows<const device Activation*> dys =
        rows_of(dy + ((long(row) * T + token) * value_heads + value_head) * DV, value_row, valid);
    const Planes<const device Factor*, PARTS> xs = planes<PARTS>(x + cell * (PARTS * C * DV), DV, C * DV);
    const Planes<const device Factor*, PARTS> deltas = planes<PARTS>(delta + cell * (PARTS * C * DV), DV, C * DV);
    const device Factor* start = starts + (bh * all_chunks + first + chunk) * (PARTS * DV * DK) + 8 * d0;
    const device Factor* d_end = d_ends + cell * (PARTS * DV * DK) + 8 * d0;
    released();
    const NearFactors S = bring_factors<DV, BLOCK>(arena + AT_S, start, DK, DV * DK, thread_id);
    const NearFactors dS = bring_factors<DV, BLOCK>(arena + AT_DS, d_end, DK, DV * DK, thread_id);
    stage_commit();
    auto next_dy = left_activations(dys, r0, 0, lane);
    auto next_x = left(xs, r0, 0, lane), next_delta = left(deltas, r0, 0, lane);
    arrived(false);
    const device float* scale_of = scales + cell * (3 * C);

    Tile dy_S[BLOCK / 8], x_S[BLOCK / 8], delta_dS[BLOCK / 8];
    UNROLL
    for (int n = 0; n < BLOCK / 8; n++) dy_S[n] = zero_tile(), x_S[n] = zero_tile(), delta_dS[n] = zero_tile();
    float S_dS = 0.0f;
    for (int value = 0; value < DV; value += 16) {
      const auto dy_rows = next_dy;
      const auto x_rows = next_x, delta_rows = next_delta;
      if (value + 16 < DV) {  // on their way while these are multiplied
        const auto fetched_dy = left_activations(dys, r0, value + 16, lane);
        const auto fetched_x = left(xs, r0, value + 16, lane), fetched_delta = left(deltas, r0, value + 16, lane);
        next_dy = fetched_dy, next_x = fetched_x, next_delta = fetched_delta;
      }
      UNROLL
      for (int n = 0; n < BLOCK / 16; n++) {
        const auto state = right2(S, value, 16 * n, lane), d_state = right2(dS, value, 16 * n, lane);
        UNROLL
        for (int h = 0; h < 2; h++) {
          mma(dy_S[2 * n + h], dy_rows, state.r[h]);
          mma(x_S[2 * n + h], x_rows, state.r[h]);
          mma(delta_dS[2 * n + h], delta_rows, d_state.r[h]);
          if (value / 16 % GROUPS == group) S_dS += dot_lane(state.r[h], d_state.r[h]);
        }
      }
    }
    UNROLL
    for (int i = 0; i < R / 8; i++) {
      const int r = r0 + 8 * i + lane.row;
      const float gamma = scale_of[r], to_end = scale_of[C + r], beta_gamma = scale_of[2 * C + r] * gamma;
      float q_dy_S = 0.0f, k_x_S = 0.0f, k_delta_dS = 0.0f;
      UNROLL
      for (int n = 0; n < BLOCK / 8; n++) {
        UNROLL
        for (int c = 0; c < 2; c++) {
          const float q_here = at(qs, r, d0 + 8 * n + lane.col + c), k_here = at(ks, r, d0 + 8 * n + lane.col + c);
          q_dy_S += q_here * dy_S[n][2 * i + c];
          k_x_S += k_here * x_S[n][2 * i + c];
          k_delta_dS += k_here * delta_dS[n][2 * i + c];
          dq_tile[n][2 * i + c] += gamma * dy_S[n][2 * i + c];
          dk_tile[n][2 * i + c] += to_end * delta_dS[n][2 * i + c] - beta_gamma * x_S[n][2 * i + c];
        }
      }
      q_dy_S = row_sum(q_dy_S);
      k_x_S = row_sum(k_x_S);
      k_delta_dS = row_sum(k_delta_dS);
      if (lane.col == 0) {
        device float* sums = row_sums + (cell * (DK / BLOCK) + block) * (3 * C) + r;
        sums[0] = gamma * q_dy_S - beta_gamma * k_x_S;
        sums[C] = to_end * k_delta_dS;
        sums[2 * C] = gamma * k_x_S;
      }
    }
    S_dS = simd_sum(S_dS);
    if (lane.id == 0) state_sums[(cell * (DK / BLOCK) + block) * GROUPS + group] = scale_of[C - 1] * S_dS;
  }

  const long pair = ((long(row) * key_heads + head) * chunks + chunk) * (4 * PARTS * C * C);
  const auto qk_down = planes<PARTS>(d_pairs + pair, C, C * C);
  const auto qk_up = planes<PARTS>(d_pairs + pair + PARTS * C * C, C, C * C);
  const auto kk_down = planes<PARTS>(d_pairs + pair + 2 * PARTS * C * C, C, C * C);
  const auto kk_up = planes<PARTS>(d_pairs + pair + 3 * PARTS * C * C, C, C * C);
  released();
  const NearActivations near_ks = bring_activations<C, BLOCK>(arena + AT_K, K_LD, ks.p + d0, key_row, valid, thread_id);
  const NearActivations near_qs =
      bring_activations<C, BLOCK>(arena + AT_Q, Q_LD, qs.p + d0, key_row, valid, thread_id);
  stage_commit();
  arrived(false);
  for (int j = 0; j < C; j += 16) {
    const auto qk_rows = left(qk_down, r0, j, lane), qk_columns = left(qk_up, r0, j, lane);
    const auto kk_rows = left(kk_down, r0, j, lane), kk_columns = left(kk_up, r0, j, lane);
    UNROLL
    for (int n = 0; n < BLOCK / 16; n++) {
      const auto k_block = right2(near_ks, j, 16 * n, lane), q_block = right2(near_qs, j, 16 * n, lane);
      UNROLL
      for (int h = 0; h < 2; h++) {
        mma(dq_tile[2 * n + h], qk_rows, k_block.r[h]);
        mma(dk_tile[2 * n + h], qk_columns, q_block.r[h]);
        mma(dk_tile[2 * n + h], kk_rows, k_block.r[h]);
        mma(dk_tile[2 * n + h], kk_columns, k_block.r[h]);
      }
    }
  }
  const long out = ((long(row) * span_tokens + chunk * C) * key_heads + head) * DK + d0;
  UNROLL
  for (int n = 0; n < BLOCK / 8; n++) {
    store<Activation>(dq + out, key_row, r0, 8 * n, valid, dq_tile[n], lane);
    store<Activation>(dk + out, key_row, r0, 8 * n, valid, dk_tile[n], lane);
  }
