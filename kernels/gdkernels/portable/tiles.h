// Structs go by reference and are returned as the expression that makes them: clang's C++ for OpenCL, which checks the
// address spaces of these texts, copies them into no argument and no result unless it may use a space that Metal lacks.

// Tiles of R x 8 floats, spread over a SIMD group: lane L holds the elements (L.row + 8 i, L.col + j), j = 0, 1, at
// 2 i + j.
typedef Floats<R / 4> Tile;

// A matrix of an input, in device memory, row-major; rows from `rows` on read as zero.
template <typename P>
struct Rows {
  P p;
  int ld, rows;
  bool paired;  // two neighbours from an even column on are aligned
};
template <typename P>
METAL_FUNC Rows<P> rows_of(P p, int ld, int rows) {
  return Rows<P>{p, ld, rows, ld % 2 == 0 && aligned_pair(p)};
}
template <typename P>
METAL_FUNC float at(const thread Rows<P>& m, int r, int c) {
  return r < m.rows ? float(m.p[r * m.ld + c]) : 0.0f;
}

// A row-major matrix in threadgroup memory.
template <typename P>
struct Staged {
  P p;
  int ld;
};
template <typename P>
METAL_FUNC Staged<P> staged(P p, int ld) {
  return Staged<P>{p, ld};
}
template <typename P>
METAL_FUNC float at(const thread Staged<P>& m, int r, int c) {
  return float(m.p[r * m.ld + c]);
}

// A matrix of ours as a factor of products: the sum of N planes `plane` apart, each cut into 8 x 8 tiles that lie one
// after another, row-major in themselves, so that a SIMD group reads and writes whole tiles. `ld` columns lie side by
// side. In device memory, and in threadgroup memory.
template <typename P, int N>
struct Planes {
  P p;
  int ld, plane;
};
template <typename P, int N>
struct StagedPlanes {
  P p;
  int ld, plane;
};
template <int N, typename P>
METAL_FUNC Planes<P, N> planes(P p, int ld, int plane) {
  return Planes<P, N>{p, ld, plane};
}
template <int N, typename P>
METAL_FUNC StagedPlanes<P, N> staged_planes(P p, int ld, int plane) {
  return StagedPlanes<P, N>{p, ld, plane};
}
METAL_FUNC int tiled(int ld, int r, int c) { return (r & -8) * ld + (c & -8) * 8 + (r & 7) * 8 + (c & 7); }
template <typename P, int N>
METAL_FUNC float at(const thread Planes<P, N>& m, int r, int c) {
  float sum = 0.0f;
  UNROLL
  for (int n = 0; n < N; n++) sum += float(m.p[n * m.plane + tiled(m.ld, r, c)]);
  return sum;
}
template <typename P, int N>
METAL_FUNC float at(const thread StagedPlanes<P, N>& m, int r, int c) {
  float sum = 0.0f;
  UNROLL
  for (int n = 0; n < N; n++) sum += float(m.p[n * m.plane + tiled(m.ld, r, c)]);
  return sum;
}

METAL_FUNC Tile zero_tile() {
  Tile t;
  UNROLL
  for (int i = 0; i < R / 4; i++) t[i] = 0.0f;
  return t;
}

// t(r', c') = m(r + r', c + c')
template <typename M>
METAL_FUNC Tile tile(const thread M& m, int r, int c, const thread Lane& lane) {
  Tile t;
  UNROLL
  for (int i = 0; i < R / 8; i++) {
    const float2 pair = pair_at(m, r + 8 * i + lane.row, c + lane.col);
    t[2 * i] = pair.x;
    t[2 * i + 1] = pair.y;
  }
  return t;
}

// t(r', c') = m(c + c', r + r')
template <typename M>
METAL_FUNC Tile tile_t(const thread M& m, int r, int c, const thread Lane& lane) {
  Tile t;
  UNROLL
  for (int i = 0; i < R / 8; i++) {
    t[2 * i] = at(m, c + lane.col, r + 8 * i + lane.row);
    t[2 * i + 1] = at(m, c + lane.col + 1, r + 8 * i + lane.row);
  }
  return t;
}

// p(r + r', c + c') = t(r', c') for rows below `rows`, row-major, in the type E of p
template <typename E, typename P>
METAL_FUNC void store(P p, int ld, int r, int c, int rows, const thread Tile& t, const thread Lane& lane) {
  UNROLL
  for (int i = 0; i < R / 8; i++) {
    const int row = r + 8 * i + lane.row;
    if (row < rows) put_pair<E>(p + row * ld + c + lane.col, t[2 * i], t[2 * i + 1]);
  }
}

// t(r', c') *= factors[c + c'], and the same along rows
template <typename P>
METAL_FUNC void scale_columns(thread Tile& t, P factors, int c, const thread Lane& lane) {
  UNROLL
  for (int i = 0; i < R / 8; i++) {
    UNROLL
    for (int j = 0; j < 2; j++) t[2 * i + j] *= factors[c + lane.col + j];
  }
}
METAL_FUNC void scale(thread Tile& t, float factor) {
  UNROLL
  for (int i = 0; i < R / 4; i++) t[i] *= factor;
}
