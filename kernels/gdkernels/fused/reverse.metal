// The chunks of a span from last to first: the adjoint x of the triangular solve, the state's gradient at their ends.
//   x = M^T (P^T dY + diag(E) K dS^T)      dS <- Gamma_C dS + dY^T diag(Gamma) Q - x^T diag(beta Gamma) K
  threadgroup float arena[ARENA];
  const Lane lane = make_lane(thread_index_in_simdgroup);
  const int thread_id = thread_index_in_threadgroup;
  const int first = span[0], chunks = span[1], T = span[2], key_heads = span[4], value_heads = span[5];
  const int head = threadgroup_position_in_grid.y % value_heads, row = threadgroup_position_in_grid.y / value_heads;
  const int key_head = head / (value_heads / key_heads);
  const int group_v0 = threadgroup_position_in_grid.x * (GROUPS * R);
  const int own_v0 = int(simdgroup_index_in_threadgroup) * R, v0 = group_v0 + own_v0;
  const long bh = long(row) * value_heads + head;
  const long token0 = long(row) * T + long(first) * C;

  Source source;
  source.q = q + (token0 * key_heads + key_head) * DK;
  source.k = k + (token0 * key_heads + key_head) * DK;
  source.v = dy + (token0 * value_heads + head) * DV + group_v0;
  source.M = M + bh * chunks * (PARTS * C * C);
  source.P = P + bh * chunks * (PARTS * C * C);
  source.scales = scales + bh * chunks * (3 * C);
  source.tokens = T - first * C;
  source.key_row = key_heads * DK;
  source.value_row = value_heads * DV;

  const auto last = rows_of(d_final + bh * (DV * DK), DK, DV);
  Tile dS[DK / 8], d_y[C / 8], sum[C / 8];
  UNROLL
  for (int d = 0; d < DK / 8; d++) dS[d] = tile(last, v0, 8 * d, lane);

  fetch(arena, source, chunks - 1, thread_id);
  for (int chunk = chunks - 1; chunk >= 0; chunk--) {
    const long cell = bh * chunks + chunk;
    const bool more = chunk > 0;
    if (STAGES == 2 && more) fetch(arena + (chunks - chunk) % 2 * STAGE_FLOATS, source, chunk - 1, thread_id);
    arrived(STAGES == 2 && more);
    const Operands o = operands(arena + (chunks - 1 - chunk) % STAGES * STAGE_FLOATS, source, chunk);
    UNROLL
    for (int j = 0; j < C / 8; j++) sum[j] = zero_tile();
    UNROLL
    for (int d = 0; d < DK; d += 16) {
      const auto rows = left<PARTS>(dS[d / 8], dS[d / 8 + 1]);
      store_left(d_ends + cell * (PARTS * DV * DK), DV * DK, DK, v0, d, rows, lane);
      read_columns(sum, rows, o.k, d, lane);
    }
    UNROLL
    for (int j = 0; j < C / 8; j++) {
      scale_columns(sum[j], o.scales + C, 8 * j, lane);
      d_y[j] = tile_t(o.v, own_v0, 8 * j, lane);
    }
    multiply<ACTIVATION_PARTS>(sum, d_y, o.P, lane);

    UNROLL
    for (int i = 0; i < C / 8; i++) scale_columns(d_y[i], o.scales, 8 * i, lane);
    UNROLL
    for (int d = 0; d < DK / 8; d++) scale(dS[d], o.scales[C - 1]);
    write_state(dS, d_y, o.q, lane);

    // x takes the place of dY
    UNROLL
    for (int j = 0; j < C / 8; j++) d_y[j] = zero_tile();
    multiply<PARTS>(d_y, sum, o.M, lane);
    UNROLL
    for (int j = 0; j < C / 8; j++) {
      store_planes_t(x + cell * (PARTS * C * DV), C * DV, DV, v0, 8 * j, d_y[j], lane);
      scale_columns(d_y[j], o.scales, 8 * j, lane);
      scale_columns(d_y[j], o.scales + 2 * C, 8 * j, lane);
      scale(d_y[j], -1.0f);
    }
    write_state(dS, d_y, o.k, lane);
    released();
    if (STAGES == 1 && more) fetch(arena, source, chunk - 1, thread_id);
  }
  UNROLL
  for (int d = 0; d < DK / 8; d++) store<float>(d_state + bh * (DV * DK), DK, v0, 8 * d, DV, dS[d], lane);
