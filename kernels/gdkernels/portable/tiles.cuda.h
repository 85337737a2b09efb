// The same products on tensor cores (PTX mma.m16n8k16 of bfloat16, R = 16). A float is the sum of PARTS bfloat16, each
// the rounding of what the ones before it left over; a product takes the pairs of parts that matter. Two parts hold 17
// bits, a relative error of about 4e-6; three hold 24, all of a float. A bfloat16 activation is one part, exactly.

// Two neighbours in one load.
METAL_FUNC float2 pair_of(const float* p) { return *(const float2*)p; }
METAL_FUNC float2 pair_of(const half* p) { return __half22float2(*(const __half2*)p); }
METAL_FUNC float2 unpack(unsigned bits) {
  return float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
METAL_FUNC float2 pair_of(const bfloat16_t* p) { return unpack(*(const unsigned*)p); }

template <typename E>
METAL_FUNC float2 pair_at(const Rows<E*>& m, int r, int c) {
  if (r >= m.rows) return float2(0.0f, 0.0f);
  const E* p = m.p + r * m.ld + c;
  return m.paired ? pair_of(p) : float2(float(p[0]), float(p[1]));
}
template <typename E>
METAL_FUNC float2 pair_at(const Staged<E*>& m, int r, int c) {
  return pair_of(m.p + r * m.ld + c);
}
template <typename E, int N>
METAL_FUNC float2 pair_at(const Planes<E*, N>& m, int r, int c) {
  float2 sum = float2(0.0f, 0.0f);
  UNROLL
  for (int n = 0; n < N; n++) {
    const float2 part = pair_of(m.p + n * m.plane + tiled(m.ld, r, c));
    sum = float2(sum.x + part.x, sum.y + part.y);
  }
  return sum;
}

// The next part of two floats, which keep what it leaves over.
METAL_FUNC unsigned take_part(float2& x) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x.y), "f"(x.x));
  const float2 taken = unpack(bits);
  x = float2(x.x - taken.x, x.y - taken.y);
  return bits;
}

// Four 8 x 8 matrices of shared memory; each lane names the row of one of them.
template <bool TRANSPOSED>
METAL_FUNC void load_matrices(unsigned (&to)[4], const bfloat16_t* row) {
  const unsigned address = unsigned(__cvta_generic_to_shared(row));
  if (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
  }
}
// An 8 x 8 matrix of 16-bit numbers, spread over the warp as a tile is, transposed.
METAL_FUNC unsigned transposed(unsigned bits) {
  unsigned result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(bits));
  return result;
}

// t(r', c') = m(c + c', r + r')
METAL_FUNC Tile tile_t(const Staged<const bfloat16_t*>& m, int r, int c, const Lane& lane) {
  unsigned pairs[2];
  const unsigned address =
      unsigned(__cvta_generic_to_shared(m.p + (c + (lane.id & 7)) * m.ld + r + (lane.id >> 3 & 1) * 8));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(pairs[0]), "=r"(pairs[1])
               : "r"(address));
  Tile t;
  UNROLL
  for (int i = 0; i < 2; i++) {
    const float2 pair = unpack(pairs[i]);
    t[2 * i] = pair.x;
    t[2 * i + 1] = pair.y;
  }
  return t;
}

// Left factor, 16 x 16, in N parts.
template <int N>
struct Left {
  unsigned part[N][4];
};
template <int N>
METAL_FUNC Left<N> left(const Tile& first, const Tile& second) {
  Left<N> a;
  UNROLL
  for (int i = 0; i < 4; i++) {
    const Tile& t = i < 2 ? first : second;
    float2 rest = float2(t[i % 2 * 2], t[i % 2 * 2 + 1]);
    UNROLL
    for (int n = 0; n < N; n++) a.part[n][i] = take_part(rest);
  }
  return a;
}
template <int N>
METAL_FUNC Left<N> left(const Planes<const bfloat16_t*, N>& m, int r, int k, const Lane& lane) {
  Left<N> a;
  UNROLL
  for (int n = 0; n < N; n++) {
    UNROLL
    for (int i = 0; i < 4; i++) {
      a.part[n][i] = *(const unsigned*)(m.p + n * m.plane + tiled(m.ld, r + i % 2 * 8, k + i / 2 * 8) + 2 * lane.id);
    }
  }
  return a;
}
// Its columns 8 h to 8 h + 7
template <int N>
METAL_FUNC Tile half_of(const Left<N>& a, int h) {
  Tile t = zero_tile();
  UNROLL
  for (int i = 0; i < 2; i++) {
    UNROLL
    for (int n = 0; n < N; n++) {
      const float2 pair = unpack(a.part[n][2 * h + i]);
      t[2 * i] += pair.x;
      t[2 * i + 1] += pair.y;
    }
  }
  return t;
}
template <typename M>
METAL_FUNC Left<ACTIVATION_PARTS> left_activations(const M& m, int r, int k, const Lane& lane) {
  return left<ACTIVATION_PARTS>(tile(m, r, k, lane), tile(m, r, k + 8, lane));
}
METAL_FUNC Left<1> left_activations(const Staged<const bfloat16_t*>& m, int r, int k, const Lane& lane) {
  Left<1> a;
  load_matrices<false>(a.part[0], m.p + (r + (lane.id >> 3 & 1) * 8 + (lane.id & 7)) * m.ld + k + (lane.id >> 4) * 8);
  return a;
}

// Writes a left factor as it is: p(r + r', k + k')
template <int N>
METAL_FUNC void store_left(bfloat16_t* p, int plane, int ld, int r, int k, const Left<N>& a, const Lane& lane) {
  UNROLL
  for (int n = 0; n < N; n++) {
    UNROLL
    for (int i = 0; i < 4; i++) {
      *(unsigned*)(p + n * plane + tiled(ld, r + i % 2 * 8, k + i / 2 * 8) + 2 * lane.id) = a.part[n][i];
    }
  }
}

// p(r + r', c + c') = t(r', c') into planes of factors (tiles.h), and p(c + c', r + r') = t(r', c')
METAL_FUNC void store_planes(bfloat16_t* p, int plane, int ld, int r, int c, const Tile& t, const Lane& lane) {
  UNROLL
  for (int i = 0; i < 2; i++) {
    float2 rest = float2(t[2 * i], t[2 * i + 1]);
    UNROLL
    for (int n = 0; n < PARTS; n++) {
      *(unsigned*)(p + n * plane + tiled(ld, r + 8 * i, c) + 2 * lane.id) = take_part(rest);
    }
  }
}
METAL_FUNC void store_planes_t(bfloat16_t* p, int plane, int ld, int r, int c, const Tile& t, const Lane& lane) {
  UNROLL
  for (int i = 0; i < 2; i++) {
    float2 rest = float2(t[2 * i], t[2 * i + 1]);
    UNROLL
    for (int n = 0; n < PARTS; n++) {
      *(unsigned*)(p + n * plane + tiled(ld, c, r + 8 * i) + 2 * lane.id) = transposed(take_part(rest));
    }
  }
}

// p(c + c', r + r') = t(r', c') for columns below `columns`, row-major, in the type E of p
template <typename E>
METAL_FUNC void store_t(E* p, int ld, int r, int c, int columns, const Tile& t, const Lane& lane) {
  UNROLL
  for (int i = 0; i < 2; i++) {
    UNROLL
    for (int j = 0; j < 2; j++) {
      if (c + lane.col + j < columns) p[(c + lane.col + j) * ld + r + 8 * i + lane.row] = E(t[2 * i + j]);
    }
  }
}
template <>
METAL_FUNC void store_t<bfloat16_t>(bfloat16_t* p, int ld, int r, int c, int columns, const Tile& t, const Lane& lane) {
  UNROLL
  for (int i = 0; i < 2; i++) {
    float2 pair = float2(t[2 * i], t[2 * i + 1]);
    const unsigned bits = transposed(take_part(pair));
    if (c + lane.row < columns) *(unsigned*)(p + (c + lane.row) * ld + r + 8 * i + lane.col) = bits;
  }
}

// Right factor, 16 x 8, in N parts: elements (lane.col + 8 i + j, lane.row).
template <int N>
struct Right {
  unsigned part[N][2];
};
template <int N>
struct Right2 {
  Right<N> r[2];
};

template <int N, typename M>
METAL_FUNC Right<N> right(const M& m, int k, int n, const Lane& lane) {
  Right<N> b;
  UNROLL
  for (int i = 0; i < 2; i++) {
    float2 rest = float2(at(m, k + 8 * i + lane.col, n + lane.row), at(m, k + 8 * i + lane.col + 1, n + lane.row));
    UNROLL
    for (int part = 0; part < N; part++) b.part[part][i] = take_part(rest);
  }
  return b;
}
template <int N, typename M>
METAL_FUNC Right<N> right_t(const M& m, int n, int k, const Lane& lane) {
  Right<N> b;
  UNROLL
  for (int i = 0; i < 2; i++) {
    float2 rest = pair_at(m, n + lane.row, k + 8 * i + lane.col);
    UNROLL
    for (int part = 0; part < N; part++) b.part[part][i] = take_part(rest);
  }
  return b;
}

// Activations, converted here, and read from device memory.
template <typename M>
METAL_FUNC Right2<ACTIVATION_PARTS> right2(const M& m, int k, int n, const Lane& lane) {
  Right2<ACTIVATION_PARTS> b;
  b.r[0] = right<ACTIVATION_PARTS>(m, k, n, lane);
  b.r[1] = right<ACTIVATION_PARTS>(m, k, n + 8, lane);
  return b;
}
template <typename M>
METAL_FUNC Right2<ACTIVATION_PARTS> right2_t(const M& m, int n, int k, const Lane& lane) {
  Right2<ACTIVATION_PARTS> b;
  b.r[0] = right_t<ACTIVATION_PARTS>(m, n, k, lane);
  b.r[1] = right_t<ACTIVATION_PARTS>(m, n + 8, k, lane);
  return b;
}

template <bool TRANSPOSED>
METAL_FUNC void load_part(unsigned (&first)[2], unsigned (&second)[2], const bfloat16_t* row) {
  unsigned matrices[4];
  load_matrices<TRANSPOSED>(matrices, row);
  first[0] = matrices[0], first[1] = matrices[1];
  second[0] = matrices[2], second[1] = matrices[3];
}
// Factors read from device memory.
template <typename E, int N>
METAL_FUNC Right2<N> right2(const Planes<E*, N>& m, int k, int n, const Lane& lane) {
  Right2<N> b;
  b.r[0] = right<N>(m, k, n, lane);
  b.r[1] = right<N>(m, k, n + 8, lane);
  return b;
}
template <typename E, int N>
METAL_FUNC Right2<N> right2_t(const Planes<E*, N>& m, int n, int k, const Lane& lane) {
  Right2<N> b;
  b.r[0] = right_t<N>(m, n, k, lane);
  b.r[1] = right_t<N>(m, n + 8, k, lane);
  return b;
}

METAL_FUNC Right2<1> right2(const Staged<const bfloat16_t*>& m, int k, int n, const Lane& lane) {
  Right2<1> b;
  const int row = k + (lane.id >> 3 & 1) * 8 + (lane.id & 7), column = n + (lane.id >> 4) * 8;
  load_part<true>(b.r[0].part[0], b.r[1].part[0], m.p + row * m.ld + column);
  return b;
}
METAL_FUNC Right2<1> right2_t(const Staged<const bfloat16_t*>& m, int n, int k, const Lane& lane) {
  Right2<1> b;
  const int row = n + (lane.id >> 4) * 8 + (lane.id & 7), column = k + (lane.id >> 3 & 1) * 8;
  load_part<false>(b.r[0].part[0], b.r[1].part[0], m.p + row * m.ld + column);
  return b;
}
template <int N>
METAL_FUNC Right2<N> right2(const StagedPlanes<const bfloat16_t*, N>& m, int k, int n, const Lane& lane) {
  Right2<N> b;
  const int at = tiled(m.ld, k + (lane.id >> 3 & 1) * 8 + (lane.id & 7), n + (lane.id >> 4) * 8);
  UNROLL
  for (int i = 0; i < N; i++) load_part<true>(b.r[0].part[i], b.r[1].part[i], m.p + i * m.plane + at);
  return b;
}
template <int N>
METAL_FUNC Right2<N> right2_t(const StagedPlanes<const bfloat16_t*, N>& m, int n, int k, const Lane& lane) {
  Right2<N> b;
  const int at = tiled(m.ld, n + (lane.id >> 4) * 8 + (lane.id & 7), k + (lane.id >> 3 & 1) * 8);
  UNROLL
  for (int i = 0; i < N; i++) load_part<false>(b.r[0].part[i], b.r[1].part[i], m.p + i * m.plane + at);
  return b;
}

template <int N>
METAL_FUNC float dot_lane(const Right<N>& a, const Right<N>& b) {
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < 2; i++) {
    float2 x = float2(0.0f, 0.0f), y = x;
    UNROLL
    for (int n = 0; n < N; n++) {
      const float2 x_part = unpack(a.part[n][i]), y_part = unpack(b.part[n][i]);
      x = float2(x.x + x_part.x, x.y + x_part.y);
      y = float2(y.x + y_part.x, y.y + y_part.y);
    }
    sum += x.x * y.x + x.y * y.y;
  }
  return sum;
}

METAL_FUNC void tensor_core(Tile& acc, const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <int N, int M>
METAL_FUNC void mma(Tile& acc, const Left<N>& a, const Right<M>& b) {
  UNROLL
  for (int i = N - 1; i >= 0; i--) {
    UNROLL
    for (int j = M - 1; j >= 0; j--) {
      if (i + j < (N > M ? N : M)) tensor_core(acc, a.part[i], b.part[j]);
    }
  }
}
