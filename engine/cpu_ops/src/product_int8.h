// The product with weights in 8 bits: whole numbers within a group of inputs, float32 from group to group.
//
// A row of x is quantised in groups of GROUP inputs to bytes q + 128 with a scale each: first all bytes, then the scales.
// A panel's memory is, for each group, PANEL corrections of 4 bytes (-128 times the sum of the group's weights, which
// takes the 128 out again), PANEL float32 scales of the weights and [GROUP / 4][PANEL][4] weights. Sums of a group are
// exact; the sum over groups is one chain.
#pragma once
#include "product.h"

namespace {

constexpr int GROUP = 32;
#if defined(__AVX512F__)
constexpr int MAX_INT8_ROWS = 6;  // 24 of 32 registers are sums
#else
constexpr int MAX_INT8_ROWS = 2;
#endif

inline int64_t int8_groups(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

inline VecInt broadcast_word(const uint8_t *at) {
    int32_t word;
    memcpy(&word, at, 4);
    return (VecInt)broadcast(0.0f) + word;
}

// sums + the products of 4 bytes without sign and 4 with, for each word.
inline VecInt add_bytes(VecInt sums, VecInt bytes, VecInt weights) {
#if defined(__AVX512VNNI__)
    return (VecInt)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, (__m512i)weights);
#else
    for (int i = 0; i < 4; i++) sums += ((bytes >> (8 * i)) & 0xff) * ((weights << (24 - 8 * i)) >> 24);
    return sums;
#endif
}

inline Vec to_float(VecInt v) { return __builtin_convertvector(v, Vec); }

template <int ROWS>
__attribute__((noinline)) void multiply_int8_rows(const float *x, int64_t stride, const int32_t *panel, int64_t inputs,
                                                  float *result) {
    const int64_t groups = int8_groups(inputs);
    const uint8_t *bytes = (const uint8_t *)x;
    Sums<ROWS> sums;
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) sums.at[row][0] = sums.at[row][1] = Vec{};
    for (int64_t group = 0; group < groups; group++, bytes += GROUP) {
        VecInt exact[ROWS][2];
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            exact[row][0] = load_int(panel);
            exact[row][1] = load_int(panel + LANES);
        }
        const Vec left_scale = (Vec)load_int(panel + PANEL), right_scale = (Vec)load_int(panel + PANEL + LANES);
        panel += 2 * PANEL;
        for (int k = 0; k < GROUP; k += 4, panel += PANEL) {
            __builtin_prefetch((const char *)panel + PREFETCH_BYTES);
            __builtin_prefetch((const char *)panel + PREFETCH_BYTES + 4 * LANES);
            const VecInt left = load_int(panel), right = load_int(panel + LANES);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                const VecInt word = broadcast_word(bytes + row * 4 * stride + k);
                exact[row][0] = add_bytes(exact[row][0], word, left);
                exact[row][1] = add_bytes(exact[row][1], word, right);
            }
        }
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const Vec scale = broadcast(x[row * stride + groups * (GROUP / 4) + group]);
            sums.at[row][0] = fma(to_float(exact[row][0]) * left_scale, scale, sums.at[row][0]);
            sums.at[row][1] = fma(to_float(exact[row][1]) * right_scale, scale, sums.at[row][1]);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
        store(result + row * PANEL, sums.at[row][0]);
        store(result + row * PANEL + LANES, sums.at[row][1]);
    }
}

template <int ROWS>
inline void multiply_int8(int rows, const float *x, int64_t stride, const int32_t *panel, int64_t inputs,
                          float *result) {
    if (rows == ROWS)
        multiply_int8_rows<ROWS>(x, stride, panel, inputs, result);
    else if constexpr (ROWS > 1)
        multiply_int8<ROWS - 1>(rows, x, stride, panel, inputs, result);
}

// Quantises a row of `inputs` values. A group with a value that is not finite gets a scale that is none.
inline void quantize_row(const float *x, int64_t inputs, float *target) {
    uint8_t *bytes = (uint8_t *)target;
    float *scales = target + int8_groups(inputs) * (GROUP / 4);
    const float magic = 12582912.0f;  // adding it rounds to a whole number, which is then in the low bits
    for (int64_t start = 0; start < inputs; start += GROUP, bytes += GROUP, scales++) {
        float values[GROUP] = {};
        memcpy(values, x + start, 4 * (size_t)(inputs - start < GROUP ? inputs - start : GROUP));
        Vec most = {}, spoilt = {};
        for (int i = 0; i < GROUP; i += LANES) {
            const Vec v = load(values + i);
            most = larger(v < Vec{} ? -v : v, most);
            spoilt = spoilt + v * broadcast(0.0f);
        }
        const float size = largest(most);
        *scales = size / 127.0f + sum(spoilt);
        const Vec inverse = broadcast(size > 0 && size < 3e38f ? 127.0f / size : 0.0f);
        for (int i = 0; i < GROUP; i += LANES) {
            const Vec shifted = load(values + i) * inverse + broadcast(magic);
            const VecInt byte = ((VecInt)shifted - (VecInt)broadcast(magic)) + 128;
            typedef uint8_t VecByte __attribute__((vector_size(LANES)));
            const VecByte narrow = __builtin_convertvector(byte, VecByte);
            memcpy(bytes + i, &narrow, LANES);
        }
    }
}

}  // namespace
