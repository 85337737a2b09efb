// What threads do together: barriers, SIMD operations, 8 x 8 matrices, atomics. Included by metal_on_cpu.h.
#pragma once

namespace metal {

using machine::Place;

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
INLINE void threadgroup_barrier(mem_flags flags, Place place = Place::current()) {
  machine::threadgroup_barrier(uint(flags), place);
}
INLINE void simdgroup_barrier(mem_flags flags, Place place = Place::current()) {
  machine::simd_barrier(uint(flags), place);
}

// Not compiled into calls of the watch: what it does to the lanes' stacks is the emulator's own business.
#define UNWATCHED __attribute__((no_sanitize("thread"), noinline))

template <class T>
struct Exchange : machine::Meeting {
  T value;
  int lane;  // to take the value of, or an amount
  T result;
};

// `act(values, all)` runs once for the SIMD group and sets every lane's result.
template <class T, class Act>
UNWATCHED T exchange(const char* what, Place place, T value, int lane, Act) {
  Exchange<T> mine{{what, place, nullptr}, value, lane, value};
  mine.act = [](machine::Meeting* const* meetings) {
    Exchange<T>* all[32];
    for (int i = 0; i < 32; i++) all[i] = static_cast<Exchange<T>*>(meetings[i]);
    Act()(all);
  };
  machine::meet(mine);
  return mine.result;
}

// The butterfly over 1, 2, 4, 8 and 16, whose order of additions Apple's simd_sum has.
template <class T, class Combine>
INLINE T butterfly(const char* what, Place place, T x, Combine) {
  return exchange(what, place, x, 0, [](Exchange<T>** all) {
    for (int mask = 1; mask < 32; mask <<= 1) {
      for (int i = 0; i < 32; i++) all[i]->result = Combine()(all[i]->value, all[i ^ mask]->value);
      for (int i = 0; i < 32; i++) all[i]->value = all[i]->result;
    }
  });
}

#define REDUCTION(name, value)                                                     \
  template <class T>                                                               \
  INLINE T name(T x, Place place = Place::current()) {                      \
    return butterfly(#name, place, x, [](const T& a, const T& b) { return T(value); }); \
  }
REDUCTION(simd_sum, a + b)
REDUCTION(simd_product, a * b)
REDUCTION(simd_max, max(a, b))
REDUCTION(simd_min, min(a, b))
REDUCTION(simd_or, a | b)
REDUCTION(simd_and, a & b)
REDUCTION(simd_xor, a ^ b)
INLINE bool simd_all(bool x, Place place = Place::current()) { return simd_and(int(x), place) != 0; }
INLINE bool simd_any(bool x, Place place = Place::current()) { return simd_or(int(x), place) != 0; }

// From lane FROM; one that does not exist is an error, or leaves the lane's own value (shuffles up and down).
#define SHUFFLE(name, FROM, beyond)                                                                       \
  template <class T>                                                                                      \
  INLINE T name(T x, int lane, Place place = Place::current()) {                                   \
    return exchange(#name, place, x, lane, [](Exchange<T>** all) {                                        \
      for (int i = 0; i < 32; i++) {                                                                      \
        const int by = all[i]->lane, from = FROM;                                                         \
        if (from >= 0 && from < 32)                                                                       \
          all[i]->result = all[from]->value;                                                              \
        else                                                                                              \
          beyond;                                                                                         \
      }                                                                                                   \
    });                                                                                                   \
  }
#define NO_LANE machine::fail("%s at line %u from lane %d", all[i]->what, uint(all[i]->place.line()), from)
SHUFFLE(simd_shuffle, by, NO_LANE)
SHUFFLE(simd_shuffle_xor, i ^ by, NO_LANE)
SHUFFLE(simd_shuffle_down, i + by, (void)0)
SHUFFLE(simd_shuffle_up, i - by, (void)0)
SHUFFLE(simd_shuffle_rotate_down, (i + by) & 31, (void)0)
SHUFFLE(simd_shuffle_rotate_up, (i - by) & 31, (void)0)
SHUFFLE(simd_broadcast, by == all[0]->lane ? by : -1, NO_LANE)
SHUFFLE(quad_shuffle_xor, (i & ~3) | ((i ^ by) & 3), NO_LANE)
template <class T>
INLINE T simd_broadcast_first(T x, Place place = Place::current()) { return simd_broadcast(x, 0, place); }

template <class T>
INLINE T prefix_sum(const char* what, Place place, T x, bool inclusive) {
  return exchange(what, place, x, inclusive, [](Exchange<T>** all) {
    T sum = T(0);
    for (int i = 0; i < 32; i++) {
      const T before = sum;
      sum = T(sum + all[i]->value);
      all[i]->result = all[i]->lane ? sum : before;
    }
  });
}
template <class T>
INLINE T simd_prefix_inclusive_sum(T x, Place place = Place::current()) {
  return prefix_sum("simd_prefix_inclusive_sum", place, x, true);
}
template <class T>
INLINE T simd_prefix_exclusive_sum(T x, Place place = Place::current()) {
  return prefix_sum("simd_prefix_exclusive_sum", place, x, false);
}

// Two neighbouring columns of a row in each lane; a matrix that was given no value is NaN.
template <scalar T, int ROWS, int COLS>
struct simdgroup_matrix {
  static_assert(ROWS == 8 && COLS == 8, "Metal has 8 x 8 matrices");
  static_assert(std::same_as<T, float> || narrow<T>, "of float, half or bfloat");
  vec<T, 2> own;
  INLINE simdgroup_matrix() : own(T(NAN)) {}
  template <scalar A>
  INLINE explicit simdgroup_matrix(A diagonal) {
    const uint lane = machine::ids().lane;
    for (int i = 0; i < 2; i++)
      own[i] = machine::matrix_row(lane) == machine::matrix_col(lane) + i ? T(diagonal) : T(0);
  }
  INLINE vec<T, 2>& thread_elements() { return own; }
  INLINE const vec<T, 2>& thread_elements() const { return own; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int ROWS, int COLS>
INLINE simdgroup_matrix<T, ROWS, COLS> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, ROWS, COLS> out;
  out.own = vec<T, 2>(value);
  return out;
}

UNWATCHED inline void together(const char* what, Place place) {
  machine::Meeting meeting{what, place, [](machine::Meeting* const*) {}};
  machine::meet(meeting);
}

// `origin` is (column, row) of the matrix, in elements.
template <class T, class P>
INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, P from, ulong per_row = 8, ulong2 origin = 0,
                           bool transpose = false, Place place = Place::current()) {
  const uint lane = machine::ids().lane;
  together("simdgroup_load", place);
  for (int i = 0; i < 2; i++) {
    const int row = machine::matrix_row(lane), col = machine::matrix_col(lane) + i;
    to.own[i] = T(from[(origin.y + ulong(transpose ? col : row)) * per_row + origin.x + ulong(transpose ? row : col)]);
  }
}
template <class T, class P>
INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& from, P to, ulong per_row = 8, ulong2 origin = 0,
                            bool transpose = false, Place place = Place::current()) {
  const uint lane = machine::ids().lane;
  together("simdgroup_store", place);
  for (int i = 0; i < 2; i++) {
    const int row = machine::matrix_row(lane), col = machine::matrix_col(lane) + i;
    to[(origin.y + ulong(transpose ? col : row)) * per_row + origin.x + ulong(transpose ? row : col)] = from.own[i];
  }
}

template <class D, class A, class B>
INLINE void product(const char* what, Place place, simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                    const simdgroup_matrix<B, 8, 8>& b, machine::Pair c) {
  const machine::Pair out =
      machine::multiply(what, place, {float(a.own.x), float(a.own.y)}, {float(b.own.x), float(b.own.y)}, c);
  d.own.x = D(out.x), d.own.y = D(out.y);
}
template <class D, class A, class B, class C>
INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                          Place place = Place::current()) {
  product("simdgroup_multiply_accumulate", place, d, a, b, {float(c.own.x), float(c.own.y)});
}
template <class D, class A, class B>
INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, Place place = Place::current()) {
  product("simdgroup_multiply", place, d, a, b, {0.0f, 0.0f});
}

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
typedef atomic<float> atomic_float;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;

// Threads change places at meetings only, so plain code is atomic. Unwatched: atomics are what may race.
#define ATOMIC(name, then)                                                                             \
  template <class T, class U = T>                                                                      \
  UNWATCHED T name(atomic<T>* at, U x, memory_order) {             \
    machine::check(at, sizeof(T), true);                                                               \
    const T before = at->value;                                                                        \
    at->value = then;                                                                                  \
    return before;                                                                                     \
  }
ATOMIC(atomic_fetch_add_explicit, T(before + T(x)))
ATOMIC(atomic_fetch_sub_explicit, T(before - T(x)))
ATOMIC(atomic_fetch_max_explicit, max(before, T(x)))
ATOMIC(atomic_fetch_min_explicit, min(before, T(x)))
ATOMIC(atomic_exchange_explicit, T(x))
template <class T, class U>
INLINE void atomic_store_explicit(atomic<T>* at, U x, memory_order order) {
  atomic_exchange_explicit(at, x, order);
}
template <class T>
UNWATCHED T atomic_load_explicit(const atomic<T>* at, memory_order) {
  machine::check(at, sizeof(T), false);
  return at->value;
}

}  // namespace metal
