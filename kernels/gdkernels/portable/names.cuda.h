// The same names on CUDA. A SIMD group is a warp, threadgroup memory is shared memory; the words for
// address spaces are taken out of the texts (program.py).
#define METAL_FUNC __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)
#define thread_index_in_simdgroup (threadIdx.x & 31)
#define thread_index_in_threadgroup threadIdx.x
#define threadgroup_position_in_grid blockIdx
#define threadgroup_barrier(flags) __syncthreads()
#define simdgroup_barrier(flags) __syncwarp()
#define float2(x, y) make_float2(x, y)
typedef unsigned int uint;
typedef __nv_bfloat16 bfloat16_t;

// A float is stored as PARTS of these (tiles.cuda.h).
typedef bfloat16_t Factor;
template <typename E>
METAL_FUNC bool aligned_pair(const E* p) {
  return size_t(p) % (2 * sizeof(E)) == 0;
}

// p[0] and p[1], in their type E; where they are 16 bits wide they must be aligned as a pair
template <typename E>
METAL_FUNC void put_pair(E* p, float x, float y) {
  p[0] = E(x);
  p[1] = E(y);
}
template <>
METAL_FUNC void put_pair<bfloat16_t>(bfloat16_t* p, float x, float y) {
  *(__nv_bfloat162*)p = __floats2bfloat162_rn(x, y);
}
template <>
METAL_FUNC void put_pair<half>(half* p, float x, float y) {
  *(__half2*)p = __floats2half2_rn(x, y);
}

template <int N>
struct Floats {
  float x[N];
  METAL_FUNC float& operator[](int i) { return x[i]; }
  METAL_FUNC float operator[](int i) const { return x[i]; }
};

struct Lane {
  int id, row, col;
};

METAL_FUNC Lane make_lane(uint id) {
  return Lane{int(id), int(id & 31) >> 2, int(id & 3) * 2};
}

METAL_FUNC float simd_shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

METAL_FUNC float simd_sum(float x) {
  for (int mask = 1; mask < 32; mask <<= 1) x += simd_shuffle_xor(x, mask);
  return x;
}

METAL_FUNC float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  x += simd_shuffle_xor(x, 2);
  return x;
}

METAL_FUNC float decay_exp(float x) { return x < -87.0f ? 0.0f : expf(x); }

METAL_FUNC void copy_16_bytes(void* to, const void* from, bool valid) {
  const unsigned address = unsigned(__cvta_generic_to_shared(to));
  const int bytes = valid ? 16 : 0;  // the rest is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}

template <int ROWS, int COLS, int THREADS, typename E>
METAL_FUNC void stage(E* to, int to_ld, const E* from, int from_ld, int rows, int thread_id) {
  constexpr int WIDE = 16 / sizeof(E);
  if (COLS % WIDE == 0 && from_ld % WIDE == 0 && to_ld % WIDE == 0 && size_t(from) % 16 == 0) {
    for (int e = thread_id; e < ROWS * (COLS / WIDE); e += THREADS) {
      const int r = e / (COLS / WIDE), c = e % (COLS / WIDE) * WIDE;
      const bool valid = r < rows;
      copy_16_bytes(to + r * to_ld + c, from + (valid ? r * from_ld + c : 0), valid);
    }
  } else {
    for (int e = thread_id; e < ROWS * COLS; e += THREADS) {
      const int r = e / COLS, c = e % COLS;
      to[r * to_ld + c] = r < rows ? from[r * from_ld + c] : E(0.0f);
    }
  }
}

METAL_FUNC void stage_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER>
METAL_FUNC void stage_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
