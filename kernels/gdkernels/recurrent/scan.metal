  // Tokens [first, last) of one value head. A SIMD group carries LANE_ROWS rows of the state in registers; rows never
  // meet.
  // span: T, B, C (chunk_tokens), first, last, Hk, Hv. first is the start of a chunk.
  constexpr int WIDTH = KEY_DIM / 32;
  const int key_heads = span[5], value_heads = span[6];
  const int key_step = key_heads * KEY_DIM, value_step = value_heads * VALUE_DIM;
  const int lane = int(thread_index_in_simdgroup);
  const int row =
      (int(threadgroup_position_in_grid.x) * SIMD_GROUPS + int(simdgroup_index_in_threadgroup)) * LANE_ROWS;
  const int rows = VALUE_DIM - row;
  const int head = int(threadgroup_position_in_grid.y), batch = int(threadgroup_position_in_grid.z);
  const int tokens = span[0], batches = span[1], chunk_tokens = span[2], first = span[3], length = span[4] - span[3];

  const size_t token = size_t(batch) * tokens + first;
  const size_t key = (token * key_heads + head / (value_heads / key_heads)) * KEY_DIM + lane;
  const auto q_at = q + key;
  const auto k_at = k + key;
  const auto v_at = v + (token * value_heads + head) * VALUE_DIM + row;
  const auto log_decay_at = log_decay + token * value_heads + head;
  const auto beta_at = beta + token * value_heads + head;
  const auto y_at = y + (size_t(batch) * length * value_heads + head) * VALUE_DIM + row;
  const size_t owner = size_t(batch) * value_heads + head;
  const size_t state_at = (owner * VALUE_DIM + row) * KEY_DIM + lane;

  float S[LANE_ROWS][WIDTH];
  load_state(S, state + state_at, KEY_DIM, rows);
  // The inputs of the next token are on their way while this one is computed.
  float k_next[WIDTH], q_next[WIDTH], v_next[LANE_ROWS];
  load_columns(k_next, k_at);
  load_columns(q_next, q_at);
  load_rows(v_next, v_at, rows);
  float log_decay_next = log_decay_at[0], beta_next = beta_at[0];
  int chunk = 0;
  for (int t = 0; t < length; t++) {
    if (t == chunk * chunk_tokens) {
      store_state(S, starts + size_t(chunk) * batches * value_heads * VALUE_DIM * KEY_DIM + state_at, KEY_DIM, rows);
      chunk += 1;
    }
    float k_t[WIDTH], q_t[WIDTH], v_t[LANE_ROWS];
    UNROLL
    for (int i = 0; i < WIDTH; i++) {
      k_t[i] = k_next[i];
      q_t[i] = q_next[i];
    }
    UNROLL
    for (int r = 0; r < LANE_ROWS; r++) v_t[r] = v_next[r];
    const float g = decay_exp(log_decay_next), beta_t = beta_next;
    const int next = min(t + 1, length - 1);
    load_columns(k_next, k_at + next * key_step);
    load_columns(q_next, q_at + next * key_step);
    load_rows(v_next, v_at + next * value_step, rows);
    log_decay_next = log_decay_at[next * value_heads];
    beta_next = beta_at[next * value_heads];

    float read[LANE_ROWS], out[LANE_ROWS];
    UNROLL
    for (int r = 0; r < LANE_ROWS; r++) {
      read[r] = 0.0f;
      UNROLL
      for (int i = 0; i < WIDTH; i++) {
        S[r][i] *= g;
        read[r] += S[r][i] * k_t[i];
      }
    }
    simd_sums(read, lane);
    UNROLL
    for (int r = 0; r < LANE_ROWS; r++) {
      const float delta = beta_t * (v_t[r] - read[r]);
      out[r] = 0.0f;
      UNROLL
      for (int i = 0; i < WIDTH; i++) {
        S[r][i] += delta * k_t[i];
        out[r] += S[r][i] * q_t[i];
      }
    }
    simd_sums(out, lane);
    UNROLL
    for (int r = 0; r < LANE_ROWS; r++) {
      if (lane == r && r < rows) y_at[t * value_step + r] = ELEMENT(out[r]);
    }
  }
  store_state(S, last_state + state_at, KEY_DIM, rows);
