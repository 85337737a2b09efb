// Metal's names for a compiler that knows address spaces: clang's C++ for OpenCL. Declarations
// only; spaces.py reads nothing but the errors. device, threadgroup, constant and thread are OpenCL's four spaces.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define M_PI_F 3.14159265f

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
// What a bfloat may do is the emulator's business; here it must only be a scalar of its own size.
typedef half bfloat;
typedef bfloat bfloat16_t;
typedef half float16_t;

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// float2(x, y) of Metal is no expression of OpenCL: as a macro with arguments the name becomes a call.
template <class T>
struct Vector2 {
  template <class A>
  static vec<T, 2> make(A);
  template <class A, class B>
  static vec<T, 2> make(A, B);
};
template <class T>
struct Vector3 {
  template <class A>
  static vec<T, 3> make(A);
  template <class A, class B, class C>
  static vec<T, 3> make(A, B, C);
};
template <class T>
struct Vector4 {
  template <class A>
  static vec<T, 4> make(A);
  template <class A, class B>
  static vec<T, 4> make(A, B);
  template <class A, class B, class C, class D>
  static vec<T, 4> make(A, B, C, D);
};
#define VECTORS(T)            \
  typedef vec<T, 2> T##2;     \
  typedef vec<T, 3> T##3;     \
  typedef vec<T, 4> T##4;
VECTORS(float)
VECTORS(half)
VECTORS(bfloat)
VECTORS(int)
VECTORS(uint)
VECTORS(short)
VECTORS(ushort)
VECTORS(char)
VECTORS(uchar)
VECTORS(long)
VECTORS(ulong)

template <class To, class From>
To as_type(From);
template <class T>
threadgroup T& threadgroup_variable(const constant char*);

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define OF_ONE(name) \
  template <class T> \
  T name(T);
#define WITH_LANE(name) \
  template <class T>    \
  T name(T, ushort);
OF_ONE(simd_sum)
OF_ONE(simd_product)
OF_ONE(simd_max)
OF_ONE(simd_min)
OF_ONE(simd_or)
OF_ONE(simd_and)
OF_ONE(simd_xor)
OF_ONE(simd_prefix_inclusive_sum)
OF_ONE(simd_prefix_exclusive_sum)
OF_ONE(simd_broadcast_first)
WITH_LANE(simd_shuffle)
WITH_LANE(simd_shuffle_xor)
WITH_LANE(simd_shuffle_up)
WITH_LANE(simd_shuffle_down)
WITH_LANE(simd_shuffle_rotate_up)
WITH_LANE(simd_shuffle_rotate_down)
WITH_LANE(simd_broadcast)
WITH_LANE(quad_shuffle_xor)
bool simd_all(bool);
bool simd_any(bool);

// Of a float, unless the argument is a half or a vector.
#define FUNCTION(name) \
  float name(float);   \
  half name(half);     \
  template <class T, int N> \
  vec<T, N> name(vec<T, N>);
#define TRANSCENDENTALS                                                                                         \
  FUNCTION(exp) FUNCTION(exp2) FUNCTION(log) FUNCTION(log2) FUNCTION(log10) FUNCTION(sin) FUNCTION(cos)         \
  FUNCTION(tanh) FUNCTION(sqrt) FUNCTION(rsqrt) FUNCTION(fabs) FUNCTION(floor) FUNCTION(ceil) FUNCTION(trunc)   \
  FUNCTION(rint) FUNCTION(round)                                                                                \
  float pow(float, float);                                                                                      \
  float divide(float, float);
TRANSCENDENTALS
namespace precise {
TRANSCENDENTALS
}
namespace fast {
TRANSCENDENTALS
}
bool isnan(float);
bool isinf(float);
bool isfinite(float);
float fmin(float, float);
float fmax(float, float);
float sign(float);
int popcount(uint);
uint clz(uint);
uint ctz(uint);
template <class T>
T min(T, T);
template <class T>
T max(T, T);
template <class T>
T abs(T);
template <class T>
T clamp(T, T, T);
template <class T>
T select(T, T, bool);
float fma(float, float, float);
template <class T, int N>
vec<T, N> fma(vec<T, N>, vec<T, N>, vec<T, N>);
float mix(float, float, float);
template <class T, int N>
T dot(vec<T, N>, vec<T, N>);
template <class T, int N>
T length(vec<T, N>);

template <class T, int ROWS, int COLS>
struct simdgroup_matrix {
  vec<T, 2> own;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  thread vec<T, 2>& thread_elements();
  const thread vec<T, 2>& thread_elements() const;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int ROWS, int COLS>
simdgroup_matrix<T, ROWS, COLS> make_filled_simdgroup_matrix(T);
#define LOAD_AND_STORE(space)                                                                            \
  template <class T>                                                                                     \
  void simdgroup_load(                                                                                   \
      thread simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8, ulong2 = (ulong2)(0), bool = false); \
  template <class T>                                                                                     \
  void simdgroup_store(                                                                                  \
      const thread simdgroup_matrix<T, 8, 8>&, space T*, ulong = 8, ulong2 = (ulong2)(0), bool = false);
LOAD_AND_STORE(device)
LOAD_AND_STORE(threadgroup)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>&, const thread simdgroup_matrix<A, 8, 8>&,
                                   const thread simdgroup_matrix<B, 8, 8>&, const thread simdgroup_matrix<C, 8, 8>&);
template <class D, class A, class B>
void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>&, const thread simdgroup_matrix<A, 8, 8>&,
                        const thread simdgroup_matrix<B, 8, 8>&);

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
typedef atomic<float> atomic_float;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
#define ATOMICS(space)                                                      \
  template <class T, class U>                                               \
  T atomic_fetch_add_explicit(space atomic<T>*, U, memory_order);           \
  template <class T, class U>                                               \
  T atomic_fetch_sub_explicit(space atomic<T>*, U, memory_order);           \
  template <class T, class U>                                               \
  T atomic_fetch_max_explicit(space atomic<T>*, U, memory_order);           \
  template <class T, class U>                                               \
  T atomic_fetch_min_explicit(space atomic<T>*, U, memory_order);           \
  template <class T, class U>                                               \
  T atomic_exchange_explicit(space atomic<T>*, U, memory_order);            \
  template <class T, class U>                                               \
  void atomic_store_explicit(space atomic<T>*, U, memory_order);            \
  template <class T>                                                        \
  T atomic_load_explicit(const space atomic<T>*, memory_order);
ATOMICS(device)
ATOMICS(threadgroup)

}  // namespace metal
using namespace metal;

#define float2(...) Vector2<float>::make(__VA_ARGS__)
#define float3(...) Vector3<float>::make(__VA_ARGS__)
#define float4(...) Vector4<float>::make(__VA_ARGS__)
#define half2(...) Vector2<half>::make(__VA_ARGS__)
#define half4(...) Vector4<half>::make(__VA_ARGS__)
#define bfloat2(...) Vector2<bfloat>::make(__VA_ARGS__)
#define bfloat4(...) Vector4<bfloat>::make(__VA_ARGS__)
#define int2(...) Vector2<int>::make(__VA_ARGS__)
#define int4(...) Vector4<int>::make(__VA_ARGS__)
#define uint2(...) Vector2<uint>::make(__VA_ARGS__)
#define uint3(...) Vector3<uint>::make(__VA_ARGS__)
#define uint4(...) Vector4<uint>::make(__VA_ARGS__)
#define ushort2(...) Vector2<ushort>::make(__VA_ARGS__)
#define short2(...) Vector2<short>::make(__VA_ARGS__)
#define ulong2(...) Vector2<ulong>::make(__VA_ARGS__)
