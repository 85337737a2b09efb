// Functions of metal_stdlib on floats, halves, bfloats, integers and vectors. Included by metal_on_cpu.h.
#pragma once

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define M_PI_F 3.14159265358979323846f

namespace metal {

template <class T>
concept narrow = std::same_as<T, half> || std::same_as<T, bfloat>;

// Of one float; a half or bfloat is computed in float and rounded back.
#define FUNCTION(name, value)                                                       \
  INLINE float name(float x) { return value; }                                      \
  template <narrow T>                                                               \
  INLINE T name(T x) { return T(name(float(x))); }                                  \
  template <class T, int N>                                                         \
  INLINE vec<T, N> name(vec<T, N> x) {                                              \
    for (int i = 0; i < N; i++) x[i] = name(x[i]);                                  \
    return x;                                                                       \
  }
#define TRANSCENDENTALS                         \
  FUNCTION(exp, __builtin_expf(x))              \
  FUNCTION(exp2, __builtin_exp2f(x))            \
  FUNCTION(log, __builtin_logf(x))              \
  FUNCTION(log2, __builtin_log2f(x))            \
  FUNCTION(log10, __builtin_log10f(x))          \
  FUNCTION(sin, __builtin_sinf(x))              \
  FUNCTION(cos, __builtin_cosf(x))              \
  FUNCTION(tanh, __builtin_tanhf(x))            \
  FUNCTION(sqrt, __builtin_sqrtf(x))            \
  FUNCTION(rsqrt, 1.0f / __builtin_sqrtf(x))    \
  FUNCTION(fabs, __builtin_fabsf(x))            \
  FUNCTION(floor, __builtin_floorf(x))          \
  FUNCTION(ceil, __builtin_ceilf(x))            \
  FUNCTION(trunc, __builtin_truncf(x))          \
  FUNCTION(rint, __builtin_rintf(x))            \
  FUNCTION(round, __builtin_roundf(x))          \
  INLINE float pow(float x, float y) { return __builtin_powf(x, y); }
TRANSCENDENTALS
namespace precise {
TRANSCENDENTALS
INLINE float divide(float x, float y) { return x / y; }
}  // namespace precise
namespace fast {
TRANSCENDENTALS
INLINE float divide(float x, float y) { return x / y; }
}  // namespace fast

INLINE bool isnan(float x) { return x != x; }
INLINE bool isfinite(float x) { return __builtin_fabsf(x) < INFINITY; }
INLINE bool isinf(float x) { return __builtin_fabsf(x) == INFINITY; }
INLINE float fmin(float x, float y) { return __builtin_fminf(x, y); }
INLINE float fmax(float x, float y) { return __builtin_fmaxf(x, y); }
INLINE float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
INLINE int popcount(uint x) { return __builtin_popcount(x); }
INLINE uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32; }
INLINE uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32; }

// Both operands of one type, as in Metal, where mixed ones are ambiguous. Of floats fmin and fmax: a NaN gives way.
template <scalar T>
INLINE T min(T x, T y) {
  if constexpr (std::integral<T>) return y < x ? y : x;
  return T(fmin(float(x), float(y)));
}
template <scalar T>
INLINE T max(T x, T y) {
  if constexpr (std::integral<T>) return x < y ? y : x;
  return T(fmax(float(x), float(y)));
}
template <scalar T>
INLINE T abs(T x) { return x < T(0) ? T(-x) : x; }
template <scalar T>
INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T>
INLINE T select(T no, T yes, bool choice) { return choice ? yes : no; }
INLINE float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
INLINE float mix(float x, float y, float a) { return x + (y - x) * a; }

template <class T, int N>
INLINE vec<T, N> fma(vec<T, N> x, const vec<T, N>& y, const vec<T, N>& z) {
  for (int i = 0; i < N; i++) x[i] = T(fma(float(x[i]), float(y[i]), float(z[i])));
  return x;
}
template <class T, int N>
INLINE vec<T, N> min(vec<T, N> x, const vec<T, N>& y) {
  for (int i = 0; i < N; i++) x[i] = min(x[i], y[i]);
  return x;
}
template <class T, int N>
INLINE vec<T, N> max(vec<T, N> x, const vec<T, N>& y) {
  for (int i = 0; i < N; i++) x[i] = max(x[i], y[i]);
  return x;
}
template <class T, int N>
INLINE T dot(const vec<T, N>& x, const vec<T, N>& y) {
  T sum = x[0] * y[0];
  for (int i = 1; i < N; i++) sum += x[i] * y[i];
  return sum;
}
template <int N>
INLINE float length(const vec<float, N>& x) { return sqrt(dot(x, x)); }

}  // namespace metal
