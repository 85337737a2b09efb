// Memory of the machine: buffers and threadgroup arrays, each alone in a slot of a large reserved range, so that an
// index which runs away still tells whose it was. Shared by machine.cpp and watch.cpp.
#pragma once
#include <cstdint>

#include "machine.h"

namespace machine {

constexpr uintptr_t SLOT_BITS = 30;  // 1 GB of addresses a slot; a buffer ends in the middle of its slot
constexpr uintptr_t SLOT = uintptr_t(1) << SLOT_BITS;
constexpr int BUFFERS = 31, ARRAYS = 64, SLOTS = BUFFERS + ARRAYS;

// Who touched an element last. A stamp is 0 for nobody, else (phase << 32 | SIMD phase << 10 | thread index).
// Phases count the barriers that order this kind of memory: of the threadgroup, and of the thread's SIMD group.
struct Cell {
  uint64_t write, first_read, other_read;
};

struct Region {
  const char* name;
  uintptr_t begin, end;
  uintptr_t grain;  // bytes a cell stands for
  Cell* cells;      // null where only reads are allowed
  Memory kind;
};

struct State {
  uintptr_t arena;  // address of slot 0
  Region regions[SLOTS];
  uint32_t phase[3], first_phase[3];  // by Memory; first_phase is that of the running threadgroup's start
  uint32_t simd_phase[3][32];
  const Ids* ids;   // of the running thread
  const void* code;  // after the access that is at fault, where it is known
};
extern State state;

constexpr unsigned MAX_THREADS = 1024, MAX_SHARED_BYTES = 32768;

// Runs every threadgroup of a launch, in a random order.
void run(const uint32_t (&grid)[3], const uint32_t (&size)[3], uint32_t seed, void* const* buffers);

// A new threadgroup begins: its arrays are new, and poisoned where they are declared.
void forget_shared();

// What the address is: a buffer's name and the distance to it, for messages.
void describe(uintptr_t at, char* text, size_t size);

}  // namespace machine
