// The chunks of a span one after another: y, the states at their starts and the state at the end.
//   delta = M diag(beta) (V - diag(Gamma) K S^T)      Y = P delta + diag(Gamma) Q S^T
//   S <- Gamma_C S + delta^T diag(E) K
  threadgroup float arena[ARENA];
  const Lane lane = make_lane(thread_index_in_simdgroup);
  const int thread_id = thread_index_in_threadgroup;
  const int first = span[0], chunks = span[1], T = span[2], key_heads = span[4], value_heads = span[5];
  const int head = threadgroup_position_in_grid.y % value_heads, row = threadgroup_position_in_grid.y / value_heads;
  const int key_head = head / (value_heads / key_heads);
  const int group_v0 = threadgroup_position_in_grid.x * (GROUPS * R);
  const int own_v0 = int(simdgroup_index_in_threadgroup) * R, v0 = group_v0 + own_v0;
  const int span_tokens = min(chunks * C, T - first * C);
  const long bh = long(row) * value_heads + head;
  const long token0 = long(row) * T + long(first) * C;

  Source source;
  source.q = q + (token0 * key_heads + key_head) * DK;
  source.k = k + (token0 * key_heads + key_head) * DK;
  source.v = v + (token0 * value_heads + head) * DV + group_v0;
  source.M = M + bh * chunks * (PARTS * C * C);
  source.P = P + bh * chunks * (PARTS * C * C);
  source.scales = scales + bh * chunks * (3 * C);
  source.tokens = span_tokens;
  source.key_row = key_heads * DK;
  source.value_row = value_heads * DV;
  device Activation* y_row = y + (long(row) * span_tokens * value_heads + head) * DV + v0;
  device Factor* starts_row = starts + bh * chunks * (PARTS * DV * DK);

  const auto initial = rows_of(state + bh * (DV * DK), DK, DV);
  Tile S[DK / 8], x[C / 8], delta[C / 8], readout[C / 8];
  UNROLL
  for (int d = 0; d < DK / 8; d++) S[d] = tile(initial, v0, 8 * d, lane);

  fetch(arena, source, 0, thread_id);
  for (int chunk = 0; chunk < chunks; chunk++) {
    const bool more = chunk + 1 < chunks;
    if (STAGES == 2 && more) fetch(arena + (chunk + 1) % 2 * STAGE_FLOATS, source, chunk + 1, thread_id);
    arrived(STAGES == 2 && more);
    const Operands o = operands(arena + chunk % STAGES * STAGE_FLOATS, source, chunk);
    UNROLL
    for (int j = 0; j < C / 8; j++) x[j] = readout[j] = zero_tile();
    UNROLL
    for (int d = 0; d < DK; d += 16) {
      const auto rows = left<PARTS>(S[d / 8], S[d / 8 + 1]);
      store_left(starts_row + long(chunk) * (PARTS * DV * DK), DV * DK, DK, v0, d, rows, lane);
      read_columns(x, rows, o.k, d, lane);
      read_columns(readout, rows, o.q, d, lane);
    }
    solve(x, delta, o, own_v0, lane);

    UNROLL
    for (int i = 0; i < C / 8; i++) scale_columns(readout[i], o.scales, 8 * i, lane);
    multiply_t(readout, delta, o.P, lane);
    UNROLL
    for (int i = 0; i < C / 8; i++) {
      device Activation* to = y_row + long(chunk) * C * (value_heads * DV);
      store_t<Activation>(to, value_heads * DV, 0, 8 * i, span_tokens - chunk * C, readout[i], lane);
    }

    UNROLL
    for (int j = 0; j < C / 8; j++) scale_columns(delta[j], o.scales + C, 8 * j, lane);
    UNROLL
    for (int d = 0; d < DK / 8; d++) scale(S[d], o.scales[C - 1]);
    write_state(S, delta, o.k, lane);
    released();
    if (STAGES == 1 && more) fetch(arena, source, chunk + 1, thread_id);
  }
  UNROLL
  for (int d = 0; d < DK / 8; d++) store<float>(final_state + bh * (DV * DK), DK, v0, 8 * d, DV, S[d], lane);
