// The machine under metal_on_cpu.h: every thread of a threadgroup is a lane with a stack of its own, and lanes change
// places only where they must meet. Compiled once (machine.cpp, watch.cpp); kernels are compiled against this header.
#pragma once
#include <cstddef>
#include <cstdint>
#include <source_location>

namespace machine {

using Place = std::source_location;

struct Ids {
  uint32_t position_in_grid[3], position_in_group[3], group[3];
  uint32_t group_size[3], full_group_size[3], groups[3], grid[3];
  uint32_t index, lane, simd, simds;
};

// What a lane brings to a meeting of its SIMD group. The last lane to come calls `act` for all; operands and results
// lie in classes derived from this one, on the lanes' stacks, so nothing is copied and nothing is overwritten early.
struct Meeting {
  const char* what;
  Place place;
  void (*act)(Meeting* const* lanes);
};

enum Memory : uint32_t { no_memory = 0, device_memory = 1, threadgroup_memory = 2 };

void meet(Meeting& meeting);                                     // all 32 lanes of a SIMD group
void simd_barrier(uint32_t memory, Place place);          // all lanes that the SIMD group has
void threadgroup_barrier(uint32_t memory, Place place);   // all threads of the threadgroup
// Threadgroup memory, the same for all threads; races are watched by `grain` bytes.
void* shared(const char* name, size_t bytes, size_t grain, Place place);
const Ids& ids();                                                // of the running thread
void check(const void* at, size_t bytes, bool write);            // within a buffer, or an error
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// c + a b for 8 x 8 matrices, of which a lane holds two neighbouring columns of a row; all of it in float.
struct Pair {
  float x, y;
};
Pair multiply(const char* what, Place place, Pair a, Pair b, Pair c);

// Row and first column of what a lane holds of an 8 x 8 matrix (bit i of the lane is b_i): row = 4 b4 + 2 b2 + b1,
// col = 4 b3 + 2 b0. MLX relies on this map (mlx/backend/metal/kernels/steel/gemm/mma.h, get_coord).
constexpr int matrix_row(unsigned lane) { return (lane >> 4 & 1) * 4 + (lane >> 2 & 1) * 2 + (lane >> 1 & 1); }
constexpr int matrix_col(unsigned lane) { return (lane >> 3 & 1) * 4 + (lane & 1) * 2; }

}  // namespace machine

// Written by emulator.py for each kernel: one thread of it. `buffers` are in the order of the command line.
void run_thread(void* const* buffers, const machine::Ids& ids);
