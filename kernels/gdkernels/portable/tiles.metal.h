// Products of tiles by 8 x 8 SIMD group matrices, float32 throughout: factors are plain floats in one plane.

template <typename M>
METAL_FUNC float2 pair_at(const thread M& m, int r, int c) {
  return float2(at(m, r, c), at(m, r, c + 1));
}

// p(c + c', r + r') = t(r', c') for columns below `columns`, row-major, in the type E of p
template <typename E, typename P>
METAL_FUNC void store_t(P p, int ld, int r, int c, int columns, const thread Tile& t, const thread Lane& lane) {
  UNROLL
  for (int i = 0; i < R / 8; i++) {
    UNROLL
    for (int j = 0; j < 2; j++) {
      if (c + lane.col + j < columns) p[(c + lane.col + j) * ld + r + 8 * i + lane.row] = E(t[2 * i + j]);
    }
  }
}

// The same into planes of factors (tiles.h): p(r + r', c + c') = t(r', c'), and p(c + c', r + r') = t(r', c')
template <typename P>
METAL_FUNC void store_planes(P p, int plane, int ld, int r, int c, const thread Tile& t, const thread Lane& lane) {
  UNROLL
  for (int i = 0; i < R / 8; i++) {
    put_pair<float>(p + tiled(ld, r + 8 * i + lane.row, c + lane.col), t[2 * i], t[2 * i + 1]);
  }
}
template <typename P>
METAL_FUNC void store_planes_t(P p, int plane, int ld, int r, int c, const thread Tile& t, const thread Lane& lane) {
  UNROLL
  for (int i = 0; i < R / 8; i++) {
    UNROLL
    for (int j = 0; j < 2; j++) p[tiled(ld, c + lane.col + j, r + 8 * i + lane.row)] = t[2 * i + j];
  }
}

// Left factor, R x 16. N, here and below, is for machines that split floats.
struct Left {
  Tile t[2];
};
template <int N>
METAL_FUNC Left left(Tile first, Tile second) {
  return Left{{first, second}};
}
// A(r', k') = m(r + r', k + k')
template <typename P, int N>
METAL_FUNC Left left(const thread Planes<P, N>& m, int r, int k, const thread Lane& lane) {
  return left<N>(tile(m, r, k, lane), tile(m, r, k + 8, lane));
}

// Its columns 8 h to 8 h + 7
METAL_FUNC Tile half_of(const thread Left& a, int h) { return a.t[h]; }
template <typename M>
METAL_FUNC Left left_activations(const thread M& m, int r, int k, const thread Lane& lane) {
  return left<1>(tile(m, r, k, lane), tile(m, r, k + 8, lane));
}
// Writes a left factor as it is: p(r + r', k + k')
template <typename P>
METAL_FUNC void store_left(P p, int plane, int ld, int r, int k, const thread Left& a, const thread Lane& lane) {
  store_planes(p, plane, ld, r, k, a.t[0], lane);
  store_planes(p, plane, ld, r, k + 8, a.t[1], lane);
}

// Right factor, 16 x 8: element (lane.row + 8 i, lane.col + j).
struct Right {
  float2 e[2];
};
struct Right2 {
  Right r[2];  // columns n and n + 8
};

// B(k', n') = m(k + k', n + n')
template <int N, typename M>
METAL_FUNC Right right(const thread M& m, int k, int n, const thread Lane& lane) {
  return Right{{pair_at(m, k + lane.row, n + lane.col), pair_at(m, k + 8 + lane.row, n + lane.col)}};
}
template <typename M>
METAL_FUNC Right2 right2(const thread M& m, int k, int n, const thread Lane& lane) {
  return Right2{{right<1>(m, k, n, lane), right<1>(m, k, n + 8, lane)}};
}

// B(k', n') = m(n + n', k + k')
template <typename M>
METAL_FUNC float2 pair_down(const thread M& m, int r, int c) {
  return float2(at(m, r, c), at(m, r + 1, c));
}
template <typename M>
METAL_FUNC Right right_t(const thread M& m, int n, int k, const thread Lane& lane) {
  return Right{{pair_down(m, n + lane.col, k + lane.row), pair_down(m, n + lane.col, k + 8 + lane.row)}};
}
template <typename M>
METAL_FUNC Right2 right2_t(const thread M& m, int n, int k, const thread Lane& lane) {
  return Right2{{right_t(m, n, k, lane), right_t(m, n + 8, k, lane)}};
}

// Sum of this lane's products of elements.
METAL_FUNC float dot_lane(const thread Right& a, const thread Right& b) {
  return a.e[0][0] * b.e[0][0] + a.e[0][1] * b.e[0][1] + a.e[1][0] * b.e[1][0] + a.e[1][1] * b.e[1][1];
}

// acc += a b
METAL_FUNC void mma(thread Tile& acc, const thread Left& a, const thread Right& b) {
  simdgroup_matrix<float, 8, 8> x, y, z;
  UNROLL
  for (int i = 0; i < R / 8; i++) {
    z.thread_elements()[0] = acc[2 * i];
    z.thread_elements()[1] = acc[2 * i + 1];
    UNROLL
    for (int h = 0; h < 2; h++) {
      x.thread_elements()[0] = a.t[h][2 * i];
      x.thread_elements()[1] = a.t[h][2 * i + 1];
      y.thread_elements()[0] = b.e[h][0];
      y.thread_elements()[1] = b.e[h][1];
      simdgroup_multiply_accumulate(z, x, y, z);
    }
    acc[2 * i] = z.thread_elements()[0];
    acc[2 * i + 1] = z.thread_elements()[1];
  }
}
