// delta = M diag(beta) (V - diag(Gamma) K S^T) of every chunk, from the states at their starts. Chunks are independent.
  threadgroup float arena[ARENA];
  const Lane lane = make_lane(thread_index_in_simdgroup);
  const int chunk = threadgroup_position_in_grid.y;
  const int first = span[0], chunks = span[1], T = span[2], all_chunks = span[3];
  const int key_heads = span[4], value_heads = span[5];
  const int head = threadgroup_position_in_grid.z % value_heads, row = threadgroup_position_in_grid.z / value_heads;
  const int key_head = head / (value_heads / key_heads);
  const int group_v0 = threadgroup_position_in_grid.x * (GROUPS * R);
  const int own_v0 = int(simdgroup_index_in_threadgroup) * R, v0 = group_v0 + own_v0;
  const long bh = long(row) * value_heads + head;
  const long token0 = long(row) * T + long(first) * C;

  Source source;
  source.q = k;
  source.k = k + (token0 * key_heads + key_head) * DK;
  source.v = v + (token0 * value_heads + head) * DV + group_v0;
  source.M = M + bh * chunks * (PARTS * C * C);
  source.P = M;
  source.scales = scales + bh * chunks * (3 * C);
  source.tokens = T - first * C;
  source.key_row = key_heads * DK;
  source.value_row = value_heads * DV;
  fetch(arena, source, chunk, thread_index_in_threadgroup);
  arrived(false);
  const Operands o = operands(arena, source, chunk);

  const long cell = bh * all_chunks + first + chunk;
  const Planes<const device Factor*, PARTS> S = planes<PARTS>(starts + cell * (PARTS * DV * DK), DK, DV * DK);
  Tile x[C / 8], solved[C / 8];
  UNROLL
  for (int j = 0; j < C / 8; j++) x[j] = zero_tile();
  UNROLL
  for (int d = 0; d < DK; d += 16) {
    const auto rows = left(S, v0, d, lane);
    read_columns(x, rows, o.k, d, lane);
  }
  solve(x, solved, o, own_v0, lane);
  UNROLL
  for (int j = 0; j < C / 8; j++) {
    store_planes_t(delta + (bh * chunks + chunk) * (PARTS * C * DV), C * DV, DV, v0, 8 * j, solved[j], lane);
  }
