  // Tokens [first, last) of one value head from last to first. A SIMD group carries LANE_ROWS rows of the state and of
  // its gradient in registers; a threadgroup, one of BLOCKS, adds what its rows give to dq, dk and the gates.
  // span: T, B, C (chunk_tokens), first, last, Hk, Hv. first is the start of a chunk. `starts` holds the chunks of all
  // tokens.
  //
  // A chunk is replayed twice. First token by token, to keep the state before every STEPS tokens in `saved`, where each
  // thread finds again what it wrote itself, and what each row of v was off by in `errors`, so that the second replay
  // reads no state. It takes STEPS tokens at a time, the decayed state of each in registers, ready for the way back.
  constexpr int WIDTH = KEY_DIM / 32, THREADS = 32 * SIMD_GROUPS;
  const int key_heads = span[5], value_heads = span[6];
  const int key_step = key_heads * KEY_DIM, value_step = value_heads * VALUE_DIM;
  constexpr int KEY_SUMS = 2 * KEY_DIM, GATE_SUMS = 2 * STEPS;
  const int key_sums_step = value_heads * BLOCKS * KEY_SUMS, gate_sums_step = value_heads * BLOCKS * 2;
  constexpr int SAVED = LANE_ROWS * WIDTH * THREADS;
  threadgroup float arena[ARENA];
  // Two tokens' dq and dk of every SIMD group, so that one barrier a token is enough; then the gates of STEPS tokens.
  const auto key_arena = arena;
  const auto gate_arena = arena + 2 * SIMD_GROUPS * KEY_SUMS;

  const int lane = int(thread_index_in_simdgroup), thread_id = int(thread_index_in_threadgroup);
  const int simd_group = int(simdgroup_index_in_threadgroup);
  const int block = int(threadgroup_position_in_grid.x);
  const int row = (block * SIMD_GROUPS + simd_group) * LANE_ROWS, rows = VALUE_DIM - row;
  const int head = int(threadgroup_position_in_grid.y), batch = int(threadgroup_position_in_grid.z);
  const int tokens = span[0], batches = span[1], chunk_tokens = span[2], first = span[3], length = span[4] - span[3];

  const size_t token = size_t(batch) * tokens + first, out_token = size_t(batch) * length;
  const size_t key = (token * key_heads + head / (value_heads / key_heads)) * KEY_DIM + lane;
  const auto q_at = q + key;
  const auto k_at = k + key;
  const auto v_at = v + (token * value_heads + head) * VALUE_DIM + row;
  const auto dy_at = dy + (token * value_heads + head) * VALUE_DIM + row;
  const auto log_decay_at = log_decay + token * value_heads + head;
  const auto beta_at = beta + token * value_heads + head;
  const auto dv_at = dv + (out_token * value_heads + head) * VALUE_DIM + row;
  const auto key_sums_at = key_sums + ((out_token * value_heads + head) * BLOCKS + block) * KEY_SUMS;
  const auto gate_sums_at = gate_sums + ((out_token * value_heads + head) * BLOCKS + block) * 2;
  const size_t owner = size_t(batch) * value_heads + head;
  const size_t state_at = (owner * VALUE_DIM + row) * KEY_DIM + lane;
  const auto saved_at = saved + (owner * BLOCKS + block) * ((chunk_tokens + STEPS - 1) / STEPS) * SAVED + thread_id;
  const auto errors_at = errors + owner * chunk_tokens * VALUE_DIM + row;

  float S[LANE_ROWS][WIDTH], dS[LANE_ROWS][WIDTH];
  load_state(dS, d_state + state_at, KEY_DIM, rows);
  for (int chunk = (length - 1) / chunk_tokens; chunk >= 0; chunk--) {
    const int begin = chunk * chunk_tokens, end = min(begin + chunk_tokens, length);
    const size_t start = size_t(first / chunk_tokens + chunk) * batches * value_heads * VALUE_DIM * KEY_DIM;
    load_state(S, starts + start + state_at, KEY_DIM, rows);

    simdgroup_barrier(mem_flags::mem_device);  // the errors of the chunk after this one have been read
    // First replay: the inputs of the next token are on their way while this one is computed.
    float k_next[WIDTH], v_next[LANE_ROWS];
    load_columns(k_next, k_at + begin * key_step);
    load_rows(v_next, v_at + begin * value_step, rows);
    float log_decay_next = log_decay_at[begin * value_heads], beta_next = beta_at[begin * value_heads];
    for (int t = begin; t < end; t++) {
      if ((t - begin) % STEPS == 0) {
        const int stretch = (t - begin) / STEPS;
        UNROLL
        for (int r = 0; r < LANE_ROWS; r++) {
          UNROLL
          for (int i = 0; i < WIDTH; i++) saved_at[stretch * SAVED + (r * WIDTH + i) * THREADS] = S[r][i];
        }
      }
      float k_t[WIDTH], v_t[LANE_ROWS], read[LANE_ROWS];
      UNROLL
      for (int i = 0; i < WIDTH; i++) k_t[i] = k_next[i];
      UNROLL
      for (int r = 0; r < LANE_ROWS; r++) v_t[r] = v_next[r];
      const float g = decay_exp(log_decay_next), beta_t = beta_next;
      const int next = min(t + 1, end - 1);
      load_columns(k_next, k_at + next * key_step);
      load_rows(v_next, v_at + next * value_step, rows);
      log_decay_next = log_decay_at[next * value_heads];
      beta_next = beta_at[next * value_heads];
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
        const float error = v_t[r] - read[r], delta = beta_t * error;
        if (lane == r && r < rows) errors_at[(t - begin) * VALUE_DIM + r] = error;
        UNROLL
        for (int i = 0; i < WIDTH; i++) S[r][i] += delta * k_t[i];
      }
    }
    simdgroup_barrier(mem_flags::mem_device);  // one lane wrote an error, all lanes read it

    for (int stretch = (end - begin - 1) / STEPS; stretch >= 0; stretch--) {
      // Second replay. What lies past the chunk's end does nothing: g = 1, beta = 0, dy = 0.
      UNROLL
      for (int r = 0; r < LANE_ROWS; r++) {
        UNROLL
        for (int i = 0; i < WIDTH; i++) S[r][i] = saved_at[stretch * SAVED + (r * WIDTH + i) * THREADS];
      }
      float decayed[STEPS][LANE_ROWS][WIDTH], g[STEPS];
      UNROLL
      for (int step = 0; step < STEPS; step++) {
        const int t = begin + stretch * STEPS + step, held = min(t, end - 1);
        float k_t[WIDTH], error[LANE_ROWS];
        load_columns(k_t, k_at + held * key_step);
        load_rows(error, errors_at + (held - begin) * VALUE_DIM, rows);
        g[step] = t < end ? decay_exp(log_decay_at[held * value_heads]) : 1.0f;
        const float beta_t = t < end ? beta_at[held * value_heads] : 0.0f;
        UNROLL
        for (int r = 0; r < LANE_ROWS; r++) {
          const float delta = beta_t * error[r];
          UNROLL
          for (int i = 0; i < WIDTH; i++) {
            decayed[step][r][i] = g[step] * S[r][i];
            S[r][i] = decayed[step][r][i] + delta * k_t[i];
          }
        }
      }

      float d_log_decay[STEPS];
      UNROLL
      for (int back = 0; back < STEPS; back++) {
        const int step = STEPS - 1 - back;
        const int t = begin + stretch * STEPS + step, held = min(t, end - 1);
        // Loaded again: beside the decayed states there is no room to keep them.
        float k_t[WIDTH], q_t[WIDTH], dy_t[LANE_ROWS], error[LANE_ROWS], d_delta[LANE_ROWS];
        load_columns(k_t, k_at + held * key_step);
        load_columns(q_t, q_at + held * key_step);
        load_rows(dy_t, dy_at + held * value_step, t < end ? rows : 0);
        load_rows(error, errors_at + (held - begin) * VALUE_DIM, rows);
        const float beta_t = t < end ? beta_at[held * value_heads] : 0.0f;
        float along_k = 0.0f;
        UNROLL
        for (int r = 0; r < LANE_ROWS; r++) {
          d_delta[r] = 0.0f;
          along_k += dy_t[r] * (beta_t * error[r]);
          UNROLL
          for (int i = 0; i < WIDTH; i++) {
            dS[r][i] += dy_t[r] * q_t[i];
            d_delta[r] += dS[r][i] * k_t[i];
          }
        }
        const auto mine = key_arena + (step % 2 * SIMD_GROUPS + simd_group) * KEY_SUMS + lane;
        UNROLL
        for (int i = 0; i < WIDTH; i++) {
          float dq = along_k * k_t[i];  // the state after the token is the decayed one and delta k^T
          UNROLL
          for (int r = 0; r < LANE_ROWS; r++) dq += dy_t[r] * decayed[step][r][i];
          mine[32 * i] = dq;
        }
        simd_sums(d_delta, lane);

        float dk[WIDTH], d_beta = 0.0f;
        UNROLL
        for (int i = 0; i < WIDTH; i++) dk[i] = 0.0f;
        d_log_decay[step] = 0.0f;
        UNROLL
        for (int r = 0; r < LANE_ROWS; r++) {
          const float delta = beta_t * error[r], d_error = beta_t * d_delta[r];
          if (lane == r && r < rows && t < end) dv_at[t * value_step + r] = ELEMENT(d_error);
          d_beta += d_delta[r] * error[r];
          UNROLL
          for (int i = 0; i < WIDTH; i++) {
            dk[i] += dS[r][i] * delta - decayed[step][r][i] * d_error;
            dS[r][i] -= d_error * k_t[i];
            d_log_decay[step] += dS[r][i] * decayed[step][r][i];
            dS[r][i] *= g[step];
          }
        }
        UNROLL
        for (int i = 0; i < WIDTH; i++) mine[KEY_DIM + 32 * i] = dk[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // After the barrier: before it the gates of the stretch before may still be read.
        if (lane == 0) gate_arena[simd_group * GATE_SUMS + 2 * step + 1] = d_beta;
        for (int e = thread_id; e < KEY_SUMS; e += THREADS) {
          float sum = 0.0f;
          UNROLL
          for (int s = 0; s < SIMD_GROUPS; s++) sum += key_arena[(step % 2 * SIMD_GROUPS + s) * KEY_SUMS + e];
          if (t < end) key_sums_at[t * key_sums_step + e] = sum;
        }
      }

      simd_sums(d_log_decay, lane);
      UNROLL
      for (int step = 0; step < STEPS; step++) {
        if (lane == 0) gate_arena[simd_group * GATE_SUMS + 2 * step] = d_log_decay[step];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (thread_id < GATE_SUMS) {
        const int t = begin + stretch * STEPS + thread_id / 2;
        float sum = 0.0f;
        UNROLL
        for (int s = 0; s < SIMD_GROUPS; s++) sum += gate_arena[s * GATE_SUMS + thread_id];
        if (t < end) gate_sums_at[t * gate_sums_step + thread_id % 2] = sum;
      }
    }
  }
  store_state(dS, d_start + state_at, KEY_DIM, rows);
