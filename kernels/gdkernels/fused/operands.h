// What a stage reads of one chunk, from threadgroup memory (STAGED) or straight from device memory. Sizes and places
// are computed in plan.py.

#if STAGED
typedef Staged<const threadgroup Activation*> NearActivations;
typedef StagedPlanes<const threadgroup Factor*, PARTS> NearFactors;
typedef const threadgroup float* NearFloats;
#else
typedef Rows<const device Activation*> NearActivations;
typedef Planes<const device Factor*, PARTS> NearFactors;
typedef const device float* NearFloats;
#endif

// ROWS x COLS at `from`, of which `rows` exist, near the threads: `place` is where in threadgroup memory. All threads
// fetch; what was fetched is to be read after stage_wait and a barrier.
template <int ROWS, int COLS>
METAL_FUNC void fetch_activations(
    threadgroup float* place, int ld, const device Activation* from, int from_ld, int rows, int thread_id) {
#if STAGED
  stage<ROWS, COLS, 32 * GROUPS>((threadgroup Activation*)place, ld, from, from_ld, rows, thread_id);
#endif
}
METAL_FUNC NearActivations near_activations(
    threadgroup float* place, int ld, const device Activation* from, int from_ld, int rows) {
#if STAGED
  return staged((const threadgroup Activation*)place, ld);
#else
  return rows_of(from, from_ld, rows);
#endif
}
// The same of factors, ROWS x COLS of a matrix with from_ld columns.
template <int ROWS, int COLS>
METAL_FUNC void fetch_factors(
    threadgroup float* place, const device Factor* from, int from_ld, int plane, int thread_id) {
#if STAGED
  UNROLL
  for (int n = 0; n < PARTS; n++) {
    stage<ROWS / 8, 8 * COLS, 32 * GROUPS>(
        (threadgroup Factor*)place + n * ROWS * COLS, 8 * COLS, from + n * plane, 8 * from_ld, ROWS / 8, thread_id);
  }
#endif
}
template <int ROWS, int COLS>
METAL_FUNC NearFactors near_factors(threadgroup float* place, const device Factor* from, int from_ld, int plane) {
#if STAGED
  return staged_planes<PARTS>((const threadgroup Factor*)place, COLS, ROWS * COLS);
#else
  return planes<PARTS>(from, from_ld, plane);
#endif
}

// Both at once.
template <int ROWS, int COLS>
METAL_FUNC NearActivations bring_activations(
    threadgroup float* place, int ld, const device Activation* from, int from_ld, int rows, int thread_id) {
  fetch_activations<ROWS, COLS>(place, ld, from, from_ld, rows, thread_id);
  return near_activations(place, ld, from, from_ld, rows);
}
template <int ROWS, int COLS>
METAL_FUNC NearFactors bring_factors(
    threadgroup float* place, const device Factor* from, int from_ld, int plane, int thread_id) {
  fetch_factors<ROWS, COLS>(place, from, from_ld, plane, thread_id);
  return near_factors<ROWS, COLS>(place, from, from_ld, plane);
}

// Between fetching and reading, and between reading and fetching anew. `later`: one more chunk is on its way.
METAL_FUNC void arrived(bool later) {
#if STAGED
  if (later) {
    stage_wait<1>();
  } else {
    stage_wait<0>();
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
}
METAL_FUNC void released() {
#if STAGED
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
}
