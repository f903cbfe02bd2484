// The product that everything is made of: a few rows of x times one panel of a packed matrix.
//
// A panel is 2 * LANES columns, its memory in the order of the inputs k: float32 [k][2 * LANES], bfloat16 [k / 2][2 *
// LANES][2] with pairs of inputs side by side. Each element of the result is one chain of fused sums in the order of k,
// whatever the number of rows: so a row's result does not depend on its neighbours.
#pragma once
#include "simd.h"

namespace {

constexpr int PANEL = 2 * LANES;
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 14;  // 28 of 32 registers are sums
#else
constexpr int MAX_ROWS = 5;   // 10 of 16
#endif

template <int ROWS>
struct Sums {
    Vec at[ROWS][2];
};

// x + row * stride as a base of every third row and a multiple that an x86 address can hold: 14 pointers would spill.
template <int ROWS>
struct Rows {
    const char *base[(ROWS + 2) / 3];
    int64_t stride_bytes;
    Rows(const float *x, int64_t stride) : stride_bytes(4 * stride) {
#pragma GCC unroll 16
        for (int i = 0; i < (ROWS + 2) / 3; i++) base[i] = (const char *)x + 3 * i * stride_bytes;
    }
    float at(int row, int k) const {
        return *(const float *)(base[row / 3] + (row % 3) * stride_bytes + 4 * k);
    }
    void advance(int k) {
#pragma GCC unroll 16
        for (int i = 0; i < (ROWS + 2) / 3; i++) base[i] += 4 * k;
    }
};

template <int ROWS>
inline void add_products(Sums<ROWS> &sums, const Rows<ROWS> &x, int k, Vec left, Vec right) {
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
        Vec factor = broadcast(x.at(row, k));
        sums.at[row][0] = fma(factor, left, sums.at[row][0]);
        sums.at[row][1] = fma(factor, right, sums.at[row][1]);
    }
}

template <int ROWS>
inline void add_panel(Sums<ROWS> &sums, Rows<ROWS> x, const float *panel, int64_t inputs) {
    for (int64_t k = 0; k < inputs; k++, panel += PANEL) {
        add_products<ROWS>(sums, x, 0, load(panel), load(panel + LANES));
        x.advance(1);
    }
}

constexpr int PREFETCH_BYTES = 2048;

template <int ROWS>
inline void add_panel(Sums<ROWS> &sums, Rows<ROWS> x, const uint16_t *panel, int64_t inputs) {
    for (int64_t k = 0; k + 1 < inputs; k += 2, panel += 2 * PANEL) {
        __builtin_prefetch((const char *)panel + PREFETCH_BYTES);
        __builtin_prefetch((const char *)panel + PREFETCH_BYTES + 8 * LANES / 2);
        add_products<ROWS>(sums, x, 0, load_pairs(panel).even, load_pairs(panel + PANEL).even);
        // Keeps the compiler from mixing the two, for which the registers would not do.
        asm volatile("" ::: "memory");
        add_products<ROWS>(sums, x, 1, load_pairs(panel).odd, load_pairs(panel + PANEL).odd);
        x.advance(2);
    }
    if (inputs & 1) add_products<ROWS>(sums, x, 0, load_pairs(panel).even, load_pairs(panel + PANEL).even);
}

// result [ROWS][PANEL] (rows `result_stride` apart) = or += x [ROWS][inputs] * panel.
template <int ROWS, class Weight>
__attribute__((noinline)) void multiply_rows(const float *x, int64_t stride, const Weight *panel, int64_t inputs, float *result,
                   int64_t result_stride, bool add) {
    Sums<ROWS> sums;
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
        sums.at[row][0] = add ? load(result + row * result_stride) : Vec{};
        sums.at[row][1] = add ? load(result + row * result_stride + LANES) : Vec{};
    }
    add_panel<ROWS>(sums, Rows<ROWS>(x, stride), panel, inputs);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
        store(result + row * result_stride, sums.at[row][0]);
        store(result + row * result_stride + LANES, sums.at[row][1]);
    }
}

// Calls multiply_rows with a number of rows that is known only now.
template <int ROWS, class Weight>
inline void multiply_up_to(int rows, const float *x, int64_t stride, const Weight *panel, int64_t inputs, float *result,
                           int64_t result_stride, bool add) {
    if (rows == ROWS)
        multiply_rows<ROWS>(x, stride, panel, inputs, result, result_stride, add);
    else if constexpr (ROWS > 1)
        multiply_up_to<ROWS - 1>(rows, x, stride, panel, inputs, result, result_stride, add);
}

template <class Weight>
inline void multiply(int rows, const float *x, int64_t stride, const Weight *panel, int64_t inputs, float *result,
                     int64_t result_stride, bool add) {
    multiply_up_to<MAX_ROWS>(rows, x, stride, panel, inputs, result, result_stride, add);
}

// Rows [0, rows) in as few groups of at most `most` as possible, all about as large.
inline int64_t groups_of(int64_t rows, int64_t most = MAX_ROWS) { return (rows + most - 1) / most; }

inline int64_t group_start(int64_t rows, int64_t group, int64_t most = MAX_ROWS) {
    return rows * group / groups_of(rows, most);
}

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace
