// Gradients of what the tokens of a chunk do to each other, for every value head of one key head; a SIMD group owns R
// tokens.  dP = dY delta^T, dA = -x delta^T, and
//   dV = diag(beta) x                             dbeta_i, its part    x_i . v_i + sum_j dA_ij D_ij (k_i . k_j)
//   d(q.k) = sum of dP D over the value heads     d(k.k) = sum of diag(beta) dA D, each and its transpose in d_pairs
//   dlog_decay_l, its part: sum over i >= l > j of R_ij,  R = dP P + dA A
  threadgroup float arena[ARENA];
  const Lane lane = make_lane(thread_index_in_simdgroup);
  const int thread_id = thread_index_in_threadgroup;
  const int r0 = int(simdgroup_index_in_threadgroup) * R;
  const int chunk = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y;
  const int row = threadgroup_position_in_grid.z;
  const int first = span[0], chunks = span[1], T = span[2], key_heads = span[4], value_heads = span[5];
  const int value_row = value_heads * DV;
  const int token = (first + chunk) * C;
  const int valid = min(C, T - token);
  const int span_tokens = min(chunks * C, T - first * C);

  Decays<threadgroup float*> decays = decays_at(arena + AT_DECAYS);
  threadgroup float* spanned = arena + AT_SPANNED;

  const long pair = ((long(row) * key_heads + head) * chunks + chunk) * (C * C);
  const auto qks = rows_of(QK + pair, C, C), kks = rows_of(KK + pair, C, C);
  Tile through_P[C / 8], through_A[C / 8];
  UNROLL
  for (int j = 0; j < C / 8; j++) through_P[j] = zero_tile(), through_A[j] = zero_tile();

  for (int g = 0; g < value_heads / key_heads; g++) {
    const int value_head = head * (value_heads / key_heads) + g;
    const long gate = (long(row) * T + token) * value_heads + value_head;
    const long cell = (long(row) * value_heads + value_head) * chunks + chunk;
    load_decays(decays, log_decay + gate, value_heads, valid, thread_id);

    const Rows<const device Activation*> dys = rows_of(dy + gate * DV, value_row, valid);
    const Rows<const device Activation*> values = rows_of(v + gate * DV, value_row, valid);
    const Planes<const device Factor*, PARTS> xs = planes<PARTS>(x + cell * (PARTS * C * DV), DV, C * DV);
    const NearFactors deltas =
        bring_factors<C, DV>(arena + AT_DELTA, delta + cell * (PARTS * C * DV), DV, C * DV, thread_id);
    stage_commit();
    auto next_dy = left_activations(dys, r0, 0, lane), next_v = left_activations(values, r0, 0, lane);
    auto next_x = left(xs, r0, 0, lane);
    arrived(false);
    device Activation* dv_rows = dv + ((long(row) * span_tokens + chunk * C) * value_heads + value_head) * DV;

    float betas[R / 8], between[R / 8], d_beta[R / 8];
    UNROLL
    for (int i = 0; i < R / 8; i++) {
      const int r = r0 + 8 * i + lane.row;
      betas[i] = r < valid ? beta[gate + r * value_heads] : 0.0f;
      between[i] = d_beta[i] = 0.0f;
    }
    Tile dP[C / 8], dA[C / 8];
    UNROLL
    for (int j = 0; j < C / 8; j++) dP[j] = zero_tile(), dA[j] = zero_tile();
    for (int d = 0; d < DV; d += 16) {
      const auto dy_rows = next_dy, v_rows = next_v;
      const auto x_rows = next_x;
      if (d + 16 < DV) {  // on their way while these are multiplied
        const auto fetched_dy = left_activations(dys, r0, d + 16, lane);
        const auto fetched_v = left_activations(values, r0, d + 16, lane);
        const auto fetched_x = left(xs, r0, d + 16, lane);
        next_dy = fetched_dy, next_v = fetched_v, next_x = fetched_x;
      }
      UNROLL
      for (int j = 0; j < C / 16; j++) {
        if (16 * j < r0 + R) {
          const auto columns = right2_t(deltas, 16 * j, d, lane);
          UNROLL
          for (int h = 0; h < 2; h++) {
            mma(dP[2 * j + h], dy_rows, columns.r[h]);
            mma(dA[2 * j + h], x_rows, columns.r[h]);
          }
        }
      }
      UNROLL
      for (int h = 0; h < 2; h++) {
        const Tile v_tile = half_of(v_rows, h);
        Tile x_tile = half_of(x_rows, h);
        UNROLL
        for (int i = 0; i < R / 8; i++) {
          UNROLL
          for (int c = 0; c < 2; c++) {
            d_beta[i] += x_tile[2 * i + c] * v_tile[2 * i + c];
            x_tile[2 * i + c] *= betas[i];
          }
        }
        store<Activation>(dv_rows, value_row, r0, d + 8 * h, valid, x_tile, lane);
      }
    }

    UNROLL
    for (int j = C / 8 - 1; j >= 0; j--) {
      const Tile decay = decay_tile(decays, r0, j, between, lane);
      const Tile qk = tile(qks, r0, 8 * j, lane), kk = tile(kks, r0, 8 * j, lane);
      Tile both;
      UNROLL
      for (int i = 0; i < R / 8; i++) {
        UNROLL
        for (int c = 0; c < 2; c++) {
          const bool below = 8 * j + lane.col + c < r0 + 8 * i + lane.row;
          const float through_decay_P = dP[j][2 * i + c] * decay[2 * i + c];
          const float through_decay_A = below ? -dA[j][2 * i + c] * decay[2 * i + c] : 0.0f;
          through_P[j][2 * i + c] += through_decay_P;
          through_A[j][2 * i + c] += betas[i] * through_decay_A;
          d_beta[i] += through_decay_A * kk[2 * i + c];
          both[2 * i + c] = through_decay_P * qk[2 * i + c] + betas[i] * through_decay_A * kk[2 * i + c];
        }
      }
      store<float>(spanned, SPANNED_LD, r0, 8 * j, C, both, lane);
    }
    UNROLL
    for (int i = 0; i < R / 8; i++) {
      const float sum = row_sum(d_beta[i]);
      if (lane.col == 0) d_beta_pairs[cell * C + r0 + 8 * i + lane.row] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_id < C) {  // along i: the sum over j < l
      float sum = 0.0f;
      for (int l = 0; l < C; l++) {
        const float here = spanned[thread_id * SPANNED_LD + l];
        spanned[thread_id * SPANNED_LD + l] = sum;
        sum += here;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_id < C) {
      float sum = 0.0f;
      for (int i = thread_id; i < C; i++) sum += spanned[i * SPANNED_LD + thread_id];
      d_decay_pairs[cell * C + thread_id] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  UNROLL
  for (int j = 0; j < C / 8; j++) {
    device Factor* to = d_pairs + pair * (4 * PARTS);
    store_planes(to, C * C, C, r0, 8 * j, through_P[j], lane);
    store_planes_t(to + PARTS * C * C, C * C, C, r0, 8 * j, through_P[j], lane);
    store_planes(to + 2 * PARTS * C * C, C * C, C, r0, 8 * j, through_A[j], lane);
    store_planes_t(to + 3 * PARTS * C * C, C * C, C, r0, 8 * j, through_A[j], lane);
  }
