// Metal's language as the kernel texts use it, in C++20. One thread runs at a time (machine.h); what threads do
// together is in simd.h. Address spaces mean nothing here: spaces.py checks them. No <cmath>: Metal has no double, and
// its ::exp(double) would compete with metal::exp.
#pragma once
#include <concepts>
#include <cstdint>
#include <type_traits>

#include "machine.h"

#define INLINE inline __attribute__((always_inline))
#define METAL_FUNC INLINE
#define kernel
#define device
#define constant
#define thread
#define threadgroup

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef _Float16 half;
typedef half float16_t;

template <class T>
concept number = std::is_arithmetic_v<T> || std::same_as<T, half>;

// Converts to float by itself, from integers by itself, from other floats only when asked: then `c ? x : 0` is a bfloat
// and `c ? x : 0.0f` a float, as with the type built into Metal.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <std::integral I>
  INLINE bfloat(I x) : bfloat(float(x)) {}
  template <number F>
    requires(!std::integral<F>)
  INLINE explicit bfloat(F x) {
    const uint32_t u = __builtin_bit_cast(uint32_t, float(x));
    // To nearest, ties to even; a NaN stays one.
    bits = (u & 0x7fffffff) > 0x7f800000 ? uint16_t(u >> 16 | 64) : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  template <std::same_as<float> F>
  INLINE operator F() const {
    return __builtin_bit_cast(float, uint32_t(bits) << 16);
  }
  template <number A>
    requires(!std::same_as<A, float>)
  INLINE explicit operator A() const {
    return A(float(*this));
  }
  template <number A>
  INLINE bfloat& operator=(A x) {
    return *this = bfloat(x);
  }
  INLINE bfloat operator-() const { return bfloat(-float(*this)); }
};
typedef bfloat bfloat16_t;

// The type of an operation on a bfloat and A: bfloat unless A is a wider float.
template <class A>
using with_bfloat = std::conditional_t<std::integral<A> || std::same_as<A, bfloat>, bfloat, float>;
#define BFLOAT_OPERATOR(op)                                                                                    \
  INLINE bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); }                       \
  template <number A>                                                                                          \
  INLINE with_bfloat<A> operator op(bfloat a, A b) { return with_bfloat<A>(float(a) op float(b)); }            \
  template <number A>                                                                                          \
  INLINE with_bfloat<A> operator op(A a, bfloat b) { return with_bfloat<A>(float(a) op float(b)); }            \
  template <class A>                                                                                           \
    requires(number<A> || std::same_as<A, bfloat>)                                                             \
  INLINE bfloat& operator op##=(bfloat& a, A b) { return a = bfloat(float(a) op float(b)); }
BFLOAT_OPERATOR(+)
BFLOAT_OPERATOR(-)
BFLOAT_OPERATOR(*)
BFLOAT_OPERATOR(/)
#define BFLOAT_COMPARISON(op)                                                           \
  INLINE bool operator op(bfloat a, bfloat b) { return float(a) op float(b); }          \
  template <number A>                                                                   \
  INLINE bool operator op(bfloat a, A b) { return float(a) op float(b); }               \
  template <number A>                                                                   \
  INLINE bool operator op(A a, bfloat b) { return float(a) op float(b); }
BFLOAT_COMPARISON(<)
BFLOAT_COMPARISON(>)
BFLOAT_COMPARISON(<=)
BFLOAT_COMPARISON(>=)
BFLOAT_COMPARISON(==)
BFLOAT_COMPARISON(!=)

template <class T>
concept scalar = number<T> || std::same_as<T, bfloat>;

template <class T, int N>
struct Elements;
template <class T>
struct Elements<T, 2> {
  T x, y;
};
template <class T>
struct Elements<T, 3> {
  T x, y, z, unused;  // as large as a vector of 4
};
template <class T>
struct Elements<T, 4> {
  T x, y, z, w;
};

template <class T, int N>
struct alignas(sizeof(T) * (N == 2 ? 2 : 4)) vec : Elements<T, N> {
  vec() = default;
  template <scalar A>
  INLINE vec(A all) {
    for (int i = 0; i < N; i++) (*this)[i] = T(all);
  }
  template <scalar... A>
    requires(sizeof...(A) == N)
  INLINE vec(A... each) {
    const T list[N] = {T(each)...};
    for (int i = 0; i < N; i++) (*this)[i] = list[i];
  }
  template <class U>
    requires(!std::same_as<U, T>)
  INLINE explicit vec(const vec<U, N>& other) {
    for (int i = 0; i < N; i++) (*this)[i] = T(other[i]);
  }
  INLINE T& operator[](int i) { return (&this->x)[i]; }
  INLINE const T& operator[](int i) const { return (&this->x)[i]; }
  INLINE vec operator-() const {
    vec out;
    for (int i = 0; i < N; i++) out[i] = -(*this)[i];
    return out;
  }
#define VECTOR_OPERATOR(op)                                     \
  friend INLINE vec operator op(const vec& a, const vec& b) {   \
    vec out;                                                    \
    for (int i = 0; i < N; i++) out[i] = T(a[i] op b[i]);       \
    return out;                                                 \
  }                                                             \
  INLINE vec& operator op##=(const vec& b) { return *this = *this op b; }
  VECTOR_OPERATOR(+)
  VECTOR_OPERATOR(-)
  VECTOR_OPERATOR(*)
  VECTOR_OPERATOR(/)
};
#define VECTORS(T)             \
  typedef vec<T, 2> T##2;      \
  typedef vec<T, 3> T##3;      \
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
INLINE To as_type(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, x);
}

// emulator.py writes `threadgroup float s[8];` as `auto& s = threadgroup_variable<float[8]>("s");`.
template <class T>
INLINE T& threadgroup_variable(const char* name, machine::Place place = machine::Place::current()) {
  // Pieces of a float array are often used as 16-bit floats.
  constexpr size_t grain = sizeof(std::remove_all_extents_t<T>) % 2 ? 1 : 2;
  return *static_cast<T*>(machine::shared(name, sizeof(T), grain, place));
}

#include "metal_math.h"
#include "simd.h"

using namespace metal;
