// Decays between the tokens of a chunk. Each is the exponential of its own sum of log_decay, put together from sums
// that run away from the diagonal: to the end of j's block of 8 tokens, over the blocks between, from the start of i's
// block. Nothing is ever subtracted, so -inf is welcome and a strong decay costs its neighbours no digits.

// In threadgroup memory, DECAY_FLOATS in all: C floats each but for the last, C / 8.
template <typename P>
struct Decays {
  P log_decay;
  P before;  // from the start of the block to the token, inclusive
  P after;   // from the token, exclusive, to the end of the block
  P block;   // of a whole block
};

template <typename P>
METAL_FUNC Decays<P> decays_at(P p) {
  return Decays<P>{p, p + C, p + 2 * C, p + 3 * C};
}

// Call by all threads; log_decay points at the chunk's first token, of which `valid` exist; stride between tokens.
template <typename P, typename L>
METAL_FUNC void load_decays(const thread Decays<P>& d, L log_decay, int stride, int valid, int thread_id) {
  if (thread_id < C) d.log_decay[thread_id] = thread_id < valid ? log_decay[thread_id * stride] : 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_id < C) {
    const int first = thread_id / 8 * 8;
    float before = 0.0f, after = 0.0f, block = 0.0f;
    for (int l = first; l < first + 8; l++) {
      const float x = d.log_decay[l];
      if (l <= thread_id) before += x;
      if (l > thread_id) after += x;
      block += x;
    }
    d.before[thread_id] = before;
    d.after[thread_id] = after;
    if (thread_id == first) d.block[first / 8] = block;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// From the chunk's start to token i, inclusive; from token i, exclusive, to the chunk's end.
template <typename P>
METAL_FUNC float decay_from_start(const thread Decays<P>& d, int i) {
  float sum = d.before[i];
  for (int b = i / 8 - 1; b >= 0; b--) sum += d.block[b];
  return decay_exp(sum);
}
template <typename P>
METAL_FUNC float decay_to_end(const thread Decays<P>& d, int i) {
  float sum = d.after[i];
  for (int b = i / 8 + 1; b < C / 8; b++) sum += d.block[b];
  return decay_exp(sum);
}

// D of rows r0... and columns 8 j..., zero above the diagonal. Take j from high to low, with `between` zero at first.
template <typename P>
METAL_FUNC Tile decay_tile(const thread Decays<P>& d, int r0, int j, thread float* between, const thread Lane& lane) {
  Tile t;
  UNROLL
  for (int i = 0; i < R / 8; i++) {
    const int b = r0 / 8 + i;
    UNROLL
    for (int c = 0; c < 2; c++) {
      const int col = lane.col + c;
      float sum = 0.0f;
      if (b == j) {
        UNROLL
        for (int l = 1; l < 8; l++) sum += col < l && l <= lane.row ? d.log_decay[8 * j + l] : 0.0f;
      } else {
        sum = d.after[8 * j + col] + between[i] + d.before[r0 + 8 * i + lane.row];
      }
      const bool below = j < b || (j == b && col <= lane.row);
      t[2 * i + c] = below ? decay_exp(sum) : 0.0f;
    }
    if (j < b) between[i] += d.block[j];
  }
  return t;
}
