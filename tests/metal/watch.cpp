// The watch over memory. A kernel compiled with -fsanitize=thread calls __tsan_read4 and its like before every access;
// here they are the emulator's own: accesses outside of a buffer, and data races between threads of a launch, stop it.
//
// Two accesses of the same element race if at least one writes, they are of different threads, and no barrier of that
// kind of memory lies between: a threadgroup's, or within a SIMD group also the SIMD group's. Threadgroups never wait
// for each other, so between those any such pair races. Not recorded: atomic operations, and accesses of less than an
// element, which would be taken for accesses of its neighbours.
#include <cstdio>
#include <initializer_list>

#include "memory.h"

namespace machine {

namespace {

const char* const VERBS[2] = {"reads", "writes"};

uint64_t stamp_now(const Ids& ids, Memory kind) {
  return uint64_t(state.phase[kind]) << 32 | uint64_t(state.simd_phase[kind][ids.simd] & 0x3fffff) << 10 | ids.index;
}

bool races(uint64_t before, uint64_t now, Memory kind) {
  if (before == 0) return false;
  const uint32_t phase = uint32_t(before >> 32);
  if (phase < state.first_phase[kind]) return kind == device_memory;  // by another threadgroup
  const unsigned thread = before & 1023, me = now & 1023;
  if (thread == me || phase != uint32_t(now >> 32)) return false;
  return thread / 32 != me / 32 || (before ^ now) < 1024;  // the same SIMD group: only within a SIMD phase
}

[[noreturn]] void fail_race(const Region& region, uintptr_t at, bool write, uint64_t before, bool before_wrote) {
  char text[256], other[64] = "a thread of another threadgroup";
  describe(at, text, sizeof text);
  if (uint32_t(before >> 32) >= state.first_phase[region.kind])
    snprintf(other, sizeof other, "thread %u", unsigned(before & 1023));
  fail("data race: thread %u %s %s, which %s %s with no barrier between", state.ids->index, VERBS[write], text, other,
       before_wrote ? "wrote" : "read");
}

void record(const Region& region, uintptr_t at, size_t bytes, bool write) {
  const uint64_t now = stamp_now(*state.ids, region.kind);
  const uintptr_t first = (at - region.begin) / region.grain, last = (at + bytes - 1 - region.begin) / region.grain;
  for (uintptr_t i = first; i <= last; i++) {
    Cell& cell = region.cells[i];
    if (races(cell.write, now, region.kind)) fail_race(region, at, write, cell.write, true);
    if (write) {
      for (uint64_t reader : {cell.first_read, cell.other_read})
        if (races(reader, now, region.kind)) fail_race(region, at, write, reader, false);
      cell = {now, 0, 0};
    } else if (cell.first_read >> 32 != now >> 32) {
      cell.first_read = now, cell.other_read = 0;  // the first reader of this phase
    } else if ((cell.first_read ^ now) & 1023) {
      // Of the others one is kept, of another SIMD group if there is one: it races with the most writers.
      const bool far = ((cell.other_read ^ cell.first_read) & 1023) >= 32;
      if (cell.other_read == 0 || !far) cell.other_read = now;
    } else {
      cell.first_read = now;
    }
  }
}

inline void watch(const void* code, void* pointer, size_t bytes, bool write, bool recorded = true) {
  const uintptr_t at = uintptr_t(pointer), offset = at - state.arena;
  if (offset >= SLOT * SLOTS) return;  // the thread's own stack, or constants of the program
  const Region& region = state.regions[offset >> SLOT_BITS];
  state.code = code;
  if (at < region.begin || at + bytes > region.end) {
    char text[256];
    describe(at < region.begin ? at : at + bytes > region.end && at < region.end ? region.end : at, text, sizeof text);
    fail("thread %u %s %zu bytes out of bounds, %s", state.ids->index, VERBS[write], bytes, text);
  }
  if (write && !region.cells) fail("thread %u writes input `%s`", state.ids->index, region.name);
  if (recorded && region.cells && bytes >= region.grain) record(region, at, bytes, write);
  state.code = nullptr;
}

}  // namespace

void check(const void* at, size_t bytes, bool write) {
  watch(__builtin_return_address(0), const_cast<void*>(at), bytes, write, false);
}

}  // namespace machine

#define HERE __builtin_return_address(0)
#define HOOK(name, bytes, write) \
  extern "C" void __tsan_##name(void* at) { machine::watch(HERE, at, bytes, write); }
#define HOOKS(n)                       \
  HOOK(read##n, n, false)              \
  HOOK(write##n, n, true)              \
  HOOK(read_write##n, n, true)         \
  HOOK(volatile_read##n, n, false)     \
  HOOK(volatile_write##n, n, true)     \
  HOOK(unaligned_read##n, n, false)    \
  HOOK(unaligned_write##n, n, true)    \
  HOOK(unaligned_read_write##n, n, true)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
extern "C" void __tsan_read_range(void* at, size_t bytes) { machine::watch(HERE, at, bytes, false); }
extern "C" void __tsan_write_range(void* at, size_t bytes) { machine::watch(HERE, at, bytes, true); }
// Clang calls these for copies.
extern "C" void* __tsan_memcpy(void* to, void* from, size_t bytes) {
  machine::watch(HERE, from, bytes, false);
  machine::watch(HERE, to, bytes, true);
  return __builtin_memcpy(to, from, bytes);
}
extern "C" void* __tsan_memmove(void* to, void* from, size_t bytes) {
  machine::watch(HERE, from, bytes, false);
  machine::watch(HERE, to, bytes, true);
  return __builtin_memmove(to, from, bytes);
}
extern "C" void* __tsan_memset(void* to, int value, size_t bytes) {
  machine::watch(HERE, to, bytes, true);
  return __builtin_memset(to, value, bytes);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
