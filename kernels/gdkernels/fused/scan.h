// A SIMD group owns R value rows of one head and all of Dk. Every matrix is held transposed, value rows down, so that
// an accumulator is at once the left factor of the next product and nothing passes between SIMD groups.

// One head of one batch row, from the first chunk on.
struct Source {
  const device Activation *q, *k;  // rows of key_row elements
  const device Activation* v;      // or dY: rows of value_row, from the threadgroup's first value row on
  const device Factor *M, *P;      // PARTS * C * C a chunk
  const device float* scales;      // a chunk: Gamma, E and beta, C floats each
  int tokens, key_row, value_row;
};

METAL_FUNC Source from_chunk(const thread Source& s, int chunk) {
  const long token = long(chunk) * C;
  return Source{
      s.q + token * s.key_row,
      s.k + token * s.key_row,
      s.v + token * s.value_row,
      s.M + token * (PARTS * C),
      s.P + token * (PARTS * C),
      s.scales + token * 3,
      s.tokens - chunk * C,
      s.key_row,
      s.value_row};
}

struct Operands {
  NearActivations k, v;
  NearFactors M;
  NearFloats scales;
#if WITH_QUERIES
  NearActivations q;
  NearFactors P;
#endif
};

// Call by all threads; nothing happens where operands are not staged.
METAL_FUNC void fetch(threadgroup float* place, const thread Source& source, int chunk, int thread_id) {
  const Source s = from_chunk(source, chunk);
  fetch_activations<C, DK>(place + AT_K, K_LD, s.k, s.key_row, s.tokens, thread_id);
  fetch_activations<C, GROUPS * R>(place + AT_V, V_LD, s.v, s.value_row, s.tokens, thread_id);
  fetch_factors<C, C>(place + AT_M, s.M, C, C * C, thread_id);
#if WITH_QUERIES
  fetch_activations<C, DK>(place + AT_Q, Q_LD, s.q, s.key_row, s.tokens, thread_id);
  fetch_factors<C, C>(place + AT_P, s.P, C, C * C, thread_id);
#endif
#if STAGED
  stage<1, 3 * C, 32 * GROUPS>(place + AT_SCALES, 3 * C, s.scales, 3 * C, 1, thread_id);
  stage_commit();
#endif
}

METAL_FUNC Operands operands(threadgroup float* place, const thread Source& source, int chunk) {
  const Source s = from_chunk(source, chunk);
  return Operands{
      near_activations(place + AT_K, K_LD, s.k, s.key_row, s.tokens),
      near_activations(place + AT_V, V_LD, s.v, s.value_row, s.tokens),
      near_factors<C, C>(place + AT_M, s.M, C, C * C),
#if STAGED
      place + AT_SCALES,
#else
      s.scales,
#endif
#if WITH_QUERIES
      near_activations(place + AT_Q, Q_LD, s.q, s.key_row, s.tokens),
      near_factors<C, C>(place + AT_P, s.P, C, C * C),
#endif
  };
}

// x += rows K^T for 16 columns of the state from d on, or with Q
template <typename L>
METAL_FUNC void read_columns(
    thread Tile* x, const thread L& rows, const thread NearActivations& keys, int d, const thread Lane& lane) {
  UNROLL
  for (int j = 0; j < C / 16; j++) {
    const auto columns = right2_t(keys, 16 * j, d, lane);
    mma(x[2 * j], rows, columns.r[0]);
    mma(x[2 * j + 1], rows, columns.r[1]);
  }
}

// S += x K, or with Q
METAL_FUNC void write_state(
    thread Tile* S, const thread Tile* x, const thread NearActivations& keys, const thread Lane& lane) {
  UNROLL
  for (int j = 0; j < C / 16; j++) {
    const auto rows = left<PARTS>(x[2 * j], x[2 * j + 1]);
    UNROLL
    for (int d = 0; d < DK / 16; d++) {
      const auto columns = right2(keys, 16 * j, 16 * d, lane);
      mma(S[2 * d], rows, columns.r[0]);
      mma(S[2 * d + 1], rows, columns.r[1]);
    }
  }
}

// y += x A^T for a lower triangular A
METAL_FUNC void multiply_t(thread Tile* y, const thread Tile* x, const thread NearFactors& A, const thread Lane& lane) {
  UNROLL
  for (int j = 0; j < C / 16; j++) {
    const auto rows = left<PARTS>(x[2 * j], x[2 * j + 1]);
    UNROLL
    for (int i = j; i < C / 16; i++) {
      const auto columns = right2_t(A, 16 * i, 16 * j, lane);
      mma(y[2 * i], rows, columns.r[0]);
      mma(y[2 * i + 1], rows, columns.r[1]);
    }
  }
}

// y += x A for a lower triangular A; x has N parts
template <int N>
METAL_FUNC void multiply(thread Tile* y, const thread Tile* x, const thread NearFactors& A, const thread Lane& lane) {
  UNROLL
  for (int i = 0; i < C / 16; i++) {
    const auto rows = left<N>(x[2 * i], x[2 * i + 1]);
    UNROLL
    for (int j = 0; j <= i; j++) {
      const auto columns = right2(A, 16 * i, 16 * j, lane);
      mma(y[2 * j], rows, columns.r[0]);
      mma(y[2 * j + 1], rows, columns.r[1]);
    }
  }
}

// delta^T = ((V - diag(Gamma) K S^T)^T diag(beta)) M^T of R value rows from v0 on, from S K^T in x, which is spent.
METAL_FUNC void solve(thread Tile* x, thread Tile* delta, const thread Operands& o, int v0, const thread Lane& lane) {
  UNROLL
  for (int j = 0; j < C / 8; j++) {
    const Tile values = tile_t(o.v, v0, 8 * j, lane);
    UNROLL
    for (int i = 0; i < R / 8; i++) {
      UNROLL
      for (int c = 0; c < 2; c++) {
        const int token = 8 * j + lane.col + c;
        x[j][2 * i + c] = o.scales[2 * C + token] * (values[2 * i + c] - o.scales[token] * x[j][2 * i + c]);
      }
    }
    delta[j] = zero_tile();
  }
  multiply_t(delta, x, o.M, lane);
}
