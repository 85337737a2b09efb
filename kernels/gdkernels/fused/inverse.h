// (I + A)^-1 in place, for the strictly lower triangular C x C matrix A in threadgroup memory: blocks of 16 by
// substitution, then pairs of blocks by X21 = -X22 (A21 X11). Float32 everywhere: with equal keys the powers of A reach
// 1e18, and a rounded inverse is not near the inverse.

// Call by all threads. `temporary` holds C / 2 rows of TEMPORARY_LD floats.
template <typename P>
METAL_FUNC void invert(P A, P temporary, int group, int thread_id, const thread Lane& lane) {
  // A thread solves one column of one block.
  float x[16];
  if (thread_id < C) {
    const int first = thread_id / 16 * 16;
    UNROLL
    for (int i = 0; i < 16; i++) {
      float sum = first + i == thread_id ? 1.0f : 0.0f;
      UNROLL
      for (int l = 0; l < 16; l++) {
        if (l < i) sum -= A[(first + i) * A_LD + first + l] * x[l];
      }
      x[i] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_id < C) {
    UNROLL
    for (int i = 0; i < 16; i++) A[(thread_id / 16 * 16 + i) * A_LD + thread_id] = x[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const Staged<P> whole = staged(A, A_LD);
  const Staged<P> product = staged(temporary, TEMPORARY_LD);
  UNROLL
  for (int size = 16; size < C; size *= 2) {
    const int tiles = C / 2 / R * (size / 8);  // of the lower left blocks of all pairs
    for (int step = 0; step < 2; step++) {
      for (int t = group; t < tiles; t += GROUPS) {
        const int row = t / (size / 8) * R;  // among the rows of all lower left blocks
        const int column = t % (size / 8) * 8;
        const int lower = row / size * 2 * size + size + row % size, left_column = row / size * 2 * size;
        Tile sum = zero_tile();
        for (int l = 0; l < size; l += 16) {
          const int from = step == 0 ? left_column : left_column + size;
          const Tile first = tile(whole, lower, from + l, lane), second = tile(whole, lower, from + l + 8, lane);
          const auto rows = left<EXACT_PARTS>(first, second);
          if (step == 0) {
            const auto columns = right<EXACT_PARTS>(whole, left_column + l, left_column + column, lane);
            mma(sum, rows, columns);
          } else {
            const auto columns = right<EXACT_PARTS>(product, row / size * size + l, column, lane);
            mma(sum, rows, columns);
          }
        }
        if (step == 0) {
          store<float>(temporary, TEMPORARY_LD, row, column, C, sum, lane);
        } else {
          scale(sum, -1.0f);
          store<float>(A, A_LD, lower, left_column + column, C, sum, lane);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}
