// The product of 8 x 8 matrices, once for a SIMD group.
#include <cstring>

#include "machine.h"

namespace machine {

namespace {
struct Product : Meeting {
  Pair a, b, c;
};

void multiply_all(Meeting* const* all) {
  typedef float Row __attribute__((vector_size(32)));
  alignas(32) float a[8][8], b[8][8], c[8][8];
  for (unsigned lane = 0; lane < 32; lane++) {
    const Product& own = *static_cast<const Product*>(all[lane]);
    const int row = matrix_row(lane), col = matrix_col(lane);
    memcpy(&a[row][col], &own.a, 8);
    memcpy(&b[row][col], &own.b, 8);
    memcpy(&c[row][col], &own.c, 8);
  }
  for (int row = 0; row < 8; row++) {
    Row sum = *reinterpret_cast<Row*>(c[row]);
    for (int k = 0; k < 8; k++) sum += a[row][k] * *reinterpret_cast<Row*>(b[k]);
    *reinterpret_cast<Row*>(c[row]) = sum;
  }
  for (unsigned lane = 0; lane < 32; lane++)
    memcpy(&static_cast<Product*>(all[lane])->c, &c[matrix_row(lane)][matrix_col(lane)], 8);
}
}  // namespace

Pair multiply(const char* what, Place place, Pair a, Pair b, Pair c) {
  Product mine{{what, place, multiply_all}, a, b, c};
  meet(mine);
  return mine.c;
}

}  // namespace machine
