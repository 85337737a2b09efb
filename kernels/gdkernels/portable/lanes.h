// A row spread over a SIMD group: lane L holds columns L, L + 32, L + 64, ...; pointers come in at column L.
template <int N, typename P>
METAL_FUNC void load_columns(thread float (&to)[N], P from) {
  UNROLL
  for (int i = 0; i < N; i++) to[i] = float(from[32 * i]);
}

// Values that all lanes share, one a row; rows from `rows` on read as zero.
template <int N, typename P>
METAL_FUNC void load_rows(thread float (&to)[N], P from, int rows) {
  UNROLL
  for (int r = 0; r < N; r++) to[r] = r < rows ? float(from[r]) : 0.0f;
}

// N rows of such columns, `ld` elements apart; rows from `rows` on read as zero, and are not written.
template <int N, int M, typename P>
METAL_FUNC void load_state(thread float (&to)[N][M], P from, int ld, int rows) {
  UNROLL
  for (int r = 0; r < N; r++) {
    UNROLL
    for (int i = 0; i < M; i++) to[r][i] = r < rows ? float(from[r * ld + 32 * i]) : 0.0f;
  }
}
template <int N, int M, typename P>
METAL_FUNC void store_state(const thread float (&from)[N][M], P to, int ld, int rows) {
  UNROLL
  for (int r = 0; r < N; r++) {
    UNROLL
    for (int i = 0; i < M; i++) {
      if (r < rows) to[r * ld + 32 * i] = from[r][i];
    }
  }
}

// Sums over the lanes of N values at once, N a power of two up to 32; every lane gets all N, the same bits.
// Each exchange halves what a lane still has to add: 2 N + 3 - log2 N shuffles, against 5 N of N separate sums.
template <int N>
METAL_FUNC void simd_sums(thread float (&x)[N], int lane) {
  UNROLL
  for (int level = 0; level < 5; level++) {
    const int half_n = N >> (level + 1), mask = 16 >> level;
    const bool upper = (lane & mask) != 0;
    UNROLL
    for (int i = 0; i < N / 2; i++) {
      if (i < half_n) {
        const float mine = upper ? x[i + half_n] : x[i];
        const float other = upper ? x[i] : x[i + half_n];
        x[i] = mine + simd_shuffle_xor(other, mask);
      }
    }
    if (half_n == 0) x[0] += simd_shuffle_xor(x[0], mask);
  }
  UNROLL
  for (int back = 0; back < 5; back++) {
    const int half_n = N >> (5 - back), mask = 1 << back;
    const bool upper = (lane & mask) != 0;
    UNROLL
    for (int i = 0; i < N / 2; i++) {
      if (i < half_n) {
        const float other = simd_shuffle_xor(x[i], mask);
        x[i + half_n] = upper ? x[i] : other;
        x[i] = upper ? other : x[i];
      }
    }
  }
}
