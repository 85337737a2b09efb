// Lanes, their meetings and the launch. A SIMD group runs in rounds: each lane runs, in a random order, up to the next
// place where it must wait, then hands over directly to the next lane; the last one judges the round.
#include "machine.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "memory.h"
#include "stack.h"

namespace machine {

State state;

namespace {

constexpr size_t STACK = 256 << 10;  // of one thread; only what it touches becomes memory
constexpr unsigned WIDTH = 32;

enum class Stop : uint8_t { none, simd, barrier, returned };
const char* const STOPS[] = {"", "", "threadgroup_barrier", "return"};

struct Lane {
  void* stack;
  Ids ids;
  Stop stop;
  Meeting* meeting;  // for Stop::simd
  Place place;       // of a barrier
  uint32_t memory;   // ordered by a barrier, of either kind
};

struct SimdGroup {
  unsigned first, size, turn;
  Stop stop;
  uint8_t order[WIDTH];
};

Lane lanes[MAX_THREADS];
SimdGroup simds[WIDTH];
unsigned threads, simd_count;
SimdGroup* running;
void* scheduler;
char* stacks;
void* const* buffers;
uint64_t random_state;

uint32_t random_below(uint32_t n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return uint32_t((random_state >> 32) * n >> 32);
}

template <class T>
void shuffle(T* items, unsigned n) {
  for (unsigned i = n; i > 1; i--) std::swap(items[i - 1], items[random_below(i)]);
}

bool same(const Place& a, const Place& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || !strcmp(a.file_name(), b.file_name()));
}

Place place_of(const Lane& lane) { return lane.stop == Stop::simd ? lane.meeting->place : lane.place; }

const char* name_of(const Lane& lane) {
  return lane.stop == Stop::simd ? lane.meeting->what : STOPS[int(lane.stop)];
}

bool alike(const Lane& a, const Lane& b) {
  if (a.stop != b.stop) return false;
  if (a.stop == Stop::returned) return true;
  if (a.stop == Stop::simd && a.meeting->act != b.meeting->act) return false;
  return same(place_of(a), place_of(b));
}

[[noreturn]] void fail_apart(const Lane& a, const Lane& b, const char* who) {
  char at[2][64] = {"", ""};
  const Lane* both[2] = {&a, &b};
  for (int i = 0; i < 2; i++)
    if (both[i]->stop != Stop::returned)
      snprintf(at[i], sizeof at[i], " at %s:%u", place_of(*both[i]).file_name(), unsigned(place_of(*both[i]).line()));
  fail("%s: thread %u is in %s%s, thread %u in %s%s", who, a.ids.index, name_of(a), at[0], b.ids.index, name_of(b),
       at[1]);
}

// The orders are drawn from a few random ones, since a meeting happens every few hundred nanoseconds.
constexpr unsigned ORDERS = 64;
uint8_t orders[ORDERS][WIDTH];

void new_order(SimdGroup& simd) {
  const uint8_t* order = orders[random_below(ORDERS)];
  if (simd.size == WIDTH) {
    memcpy(simd.order, order, WIDTH);
  } else {
    for (unsigned i = 0, n = 0; i < WIDTH; i++)
      if (order[i] < simd.size) simd.order[n++] = order[i];
  }
  simd.turn = 0;
}

inline Lane& lane_of_turn(SimdGroup& simd) { return lanes[simd.first + simd.order[simd.turn]]; }

void go(void** save, Lane& to) {
  state.ids = &to.ids;
  switch_stack(save, to.stack);
}

void leave(Lane& me) { switch_stack(&me.stack, scheduler); }

void end_of_round(SimdGroup& simd, Lane& me) {
  Lane* group = lanes + simd.first;
  for (unsigned i = 1; i < simd.size; i++)
    if (!alike(group[0], group[i])) {
      const bool returned = group[0].stop == Stop::returned || group[i].stop == Stop::returned;
      fail_apart(group[0], group[i],
                 returned ? "a thread returned early" : "threads of a SIMD group meet at different places");
    }
  simd.stop = me.stop;
  if (me.stop != Stop::simd) return leave(me);
  if (me.meeting->act) {
    if (simd.size != WIDTH)
      fail("%s at %s:%u by a SIMD group of %u threads: all 32 must exist", me.meeting->what,
           me.meeting->place.file_name(), unsigned(me.meeting->place.line()), simd.size);
    Meeting* all[WIDTH];
    for (unsigned i = 0; i < WIDTH; i++) all[i] = group[i].meeting;
    me.meeting->act(all);
  }
  for (Memory kind : {device_memory, threadgroup_memory})
    if (me.memory & kind) state.simd_phase[kind][me.ids.simd]++;
  const unsigned mine = simd.order[simd.turn - 1];
  new_order(simd);
  simd.stop = Stop::none;
  if (simd_count > 1 && random_below(16) == 0) return leave(me);  // let another SIMD group overtake
  Lane& next = lane_of_turn(simd);
  if (simd.order[0] != mine) go(&me.stack, next);
}

// The running lane has stopped: the next one of its SIMD group runs.
inline void next_turn(Lane& me) {
  SimdGroup& simd = *running;
  if (++simd.turn < simd.size)
    go(&me.stack, lane_of_turn(simd));
  else
    end_of_round(simd, me);
}

void lane_main() {
  run_thread(buffers, *state.ids);
  Lane& me = lanes[state.ids->index];
  me.stop = Stop::returned;
  next_turn(me);
  abort();
}

// The stacks' tops are spread over the cache's sets: at equal distances of a power of two they would evict each other.
void prepare(unsigned thread) {
  char* top = stacks + STACK * (thread + 1) - thread * 832 % 16384 / 64 * 64;
  lanes[thread].stack = new_stack(top, lane_main);
}

void run_group() {
  uint8_t ready[WIDTH];
  unsigned left = 0;
  for (unsigned s = 0; s < simd_count; s++) ready[left++] = uint8_t(s);
  for (;;) {
    while (left) {
      const unsigned pick = random_below(left);
      running = &simds[ready[pick]];
      go(&scheduler, lane_of_turn(*running));
      if (running->stop != Stop::none) ready[pick] = ready[--left];
    }
    for (unsigned s = 1; s < simd_count; s++) {
      const Lane &a = lanes[0], &b = lanes[simds[s].first];
      if (!alike(a, b))
        fail_apart(a, b,
                   a.stop == b.stop ? "threads wait at different barriers"
                                    : "a thread returned before a barrier of its threadgroup");
    }
    if (simds[0].stop == Stop::returned) return;
    for (Memory kind : {device_memory, threadgroup_memory})
      if (lanes[0].memory & kind) state.phase[kind]++;
    for (unsigned s = 0; s < simd_count; s++) {
      new_order(simds[s]);
      simds[s].stop = Stop::none;
      ready[left++] = uint8_t(s);
    }
  }
}

void start_group(const uint32_t (&group)[3], const uint32_t (&size)[3], const uint32_t (&grid)[3],
                 const uint32_t (&groups)[3]) {
  uint32_t here[3];
  for (int d = 0; d < 3; d++) {
    const uint32_t left = grid[d] - group[d] * size[d];
    here[d] = left < size[d] ? left : size[d];
  }
  threads = here[0] * here[1] * here[2];
  simd_count = (threads + WIDTH - 1) / WIDTH;
  for (unsigned t = 0; t < threads; t++) {
    Ids& ids = lanes[t].ids;
    const uint32_t at[3] = {t % here[0], t / here[0] % here[1], t / (here[0] * here[1])};
    for (int d = 0; d < 3; d++) {
      ids.position_in_group[d] = at[d];
      ids.position_in_grid[d] = group[d] * size[d] + at[d];
      ids.group[d] = group[d];
      ids.group_size[d] = here[d];
      ids.full_group_size[d] = size[d];
      ids.groups[d] = groups[d];
      ids.grid[d] = grid[d];
    }
    ids.index = t, ids.lane = t % WIDTH, ids.simd = t / WIDTH, ids.simds = simd_count;
    lanes[t].stop = Stop::none;
    prepare(t);
  }
  for (unsigned s = 0; s < simd_count; s++) {
    const unsigned rest = threads - s * WIDTH;
    simds[s].first = s * WIDTH, simds[s].size = rest < WIDTH ? rest : WIDTH, simds[s].stop = Stop::none;
    new_order(simds[s]);
  }
  forget_shared();
  for (Memory kind : {device_memory, threadgroup_memory}) state.first_phase[kind] = ++state.phase[kind];
}

}  // namespace

const Ids& ids() { return *state.ids; }

namespace {
inline void stop_at(Meeting& meeting, uint32_t memory) {
  Lane& me = lanes[state.ids->index];
  me.stop = Stop::simd, me.meeting = &meeting, me.memory = memory;
  next_turn(me);
}
}  // namespace

void meet(Meeting& meeting) { stop_at(meeting, no_memory); }

void simd_barrier(uint32_t memory, Place place) {
  Meeting meeting{"simdgroup_barrier", place, nullptr};
  stop_at(meeting, memory);
}

void threadgroup_barrier(uint32_t memory, Place place) {
  Lane& me = lanes[state.ids->index];
  me.stop = Stop::barrier, me.place = place, me.memory = memory;
  next_turn(me);
}

void run(const uint32_t (&grid)[3], const uint32_t (&size)[3], uint32_t seed, void* const* the_buffers) {
  buffers = the_buffers;
  random_state = (uint64_t(seed) + 1) * 0x9e3779b97f4a7c15u;
  for (auto& order : orders) {
    for (unsigned i = 0; i < WIDTH; i++) order[i] = uint8_t(i);
    shuffle(order, WIDTH);
  }
  const size_t bytes = STACK * size[0] * size[1] * size[2];
  void* const range = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) fail("no memory for the threads' stacks");
  stacks = static_cast<char*>(range);
  uint32_t groups[3];
  for (int d = 0; d < 3; d++) groups[d] = (grid[d] + size[d] - 1) / size[d];
  std::vector<uint32_t> order(size_t(groups[0]) * groups[1] * groups[2]);
  for (size_t i = 0; i < order.size(); i++) order[i] = uint32_t(i);
  shuffle(order.data(), unsigned(order.size()));
  for (uint32_t i : order) {
    const uint32_t group[3] = {i % groups[0], i / groups[0] % groups[1], i / (groups[0] * groups[1])};
    start_group(group, size, grid, groups);
    run_group();
  }
  state.ids = nullptr;
}

}  // namespace machine
