// Names of Metal that the kernel texts use, and what the machines must name alike.
#include <metal_simdgroup_matrix>
using namespace metal;
#define UNROLL _Pragma("clang loop unroll(full)")

// What a float is stored as for matrix products: itself, in one part.
typedef float Factor;
// Whether two elements at p, or an even number of elements from it, can be read at once; here the compiler's business.
template <typename P>
METAL_FUNC bool aligned_pair(P) {
  return true;
}

// p[0] and p[1], in their type E
template <typename E, typename P>
METAL_FUNC void put_pair(P p, float x, float y) {
  p[0] = E(x);
  p[1] = E(y);
}

// N floats, 2 or 4, that are copied like a number.
template <int N>
using Floats = vec<float, N>;

// Two neighbouring columns of an 8 x 8 matrix lie in one lane, at (row, col) and (row, col + 1).
struct Lane {
  int id, row, col;
};

METAL_FUNC Lane make_lane(uint id) {
  const int row = int((id >> 4 & 1) * 4 + (id >> 2 & 1) * 2 + (id >> 1 & 1));
  return Lane{int(id), row, int((id >> 3 & 1) * 4 + (id & 1) * 2)};
}

// Sum over the lanes that share a row of such a matrix; every one of them gets it.
METAL_FUNC float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  x += simd_shuffle_xor(x, 8);
  return x;
}

// exp of a log-decay, never positive; what would be a denormal is 0 on every machine.
METAL_FUNC float decay_exp(float x) { return x < -87.0f ? 0.0f : metal::precise::exp(x); }

// Copies ROWS x COLS into threadgroup memory; rows from `rows` on become zero. A barrier must follow stage_wait.
template <int ROWS, int COLS, int THREADS, typename E, typename P>
METAL_FUNC void stage(threadgroup E* to, int to_ld, P from, int from_ld, int rows, int thread_id) {
  for (int e = thread_id; e < ROWS * COLS; e += THREADS) {
    const int r = e / COLS, c = e % COLS;
    to[r * to_ld + c] = r < rows ? E(from[r * from_ld + c]) : E(0.0f);
  }
}

METAL_FUNC void stage_commit() {}
template <int LATER>
METAL_FUNC void stage_wait() {}
