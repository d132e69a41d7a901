// Batched matrix products, norms and clipped sums for the torch engines. Every number of a product is computed in the same
// order whatever the number of rows, columns and members of the batch: an example's bits do not depend on the others.
#pragma once
#include <cstdint>

namespace fedveil {

// A stack of matrices; strides in floats. A stack whose `batch` is 0 is one matrix for all.
struct Matrices {
    const float* at;
    int64_t batch, row, column;
};

struct ProductKernels {
    // c[m] = a[m] b[m] (+ bias in every row) for m < count; rows x terms times terms x columns. Columns of c are adjacent.
    void (*products)(const Matrices& a, const Matrices& b, const float* bias, float* c, int64_t c_batch, int64_t c_row,
                     int64_t count, int64_t rows, int64_t columns, int64_t terms);
    // The sum of squares (or of sizes) of n floats, in double: squares of floats neither vanish nor overflow there.
    double (*size)(const float* x, int64_t n, bool l1);
    // sum[i] += factors[m] * x[m * step + i] for m < count, in double, one after the other.
    void (*add)(double* sum, const float* x, int64_t step, const double* factors, int64_t count, int64_t n);
};

}  // namespace fedveil
