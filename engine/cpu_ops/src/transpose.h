// LANES x LANES blocks of a matrix on their way from rows to columns. Words may be a float32 or two bfloat16.
#pragma once
#include "simd.h"

namespace {

#if defined(__AVX512F__)

// Turns 16 rows into 16 columns: pairs, then fours, then 128-bit quarters change places.
inline void transpose(__m512 *r) {
    __m512 t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        const __m512d a = (__m512d)t[4 * i], b = (__m512d)t[4 * i + 1], c = (__m512d)t[4 * i + 2],
                      d = (__m512d)t[4 * i + 3];
        r[4 * i] = (__m512)_mm512_unpacklo_pd(a, c);
        r[4 * i + 1] = (__m512)_mm512_unpackhi_pd(a, c);
        r[4 * i + 2] = (__m512)_mm512_unpacklo_pd(b, d);
        r[4 * i + 3] = (__m512)_mm512_unpackhi_pd(b, d);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

// columns[i * stride + j] = rows[j][i] for a block of LANES x LANES words of 4 bytes.
inline void transpose_block(const float *const *rows, float *columns, int64_t stride) {
    __m512 r[16];
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) r[j] = _mm512_loadu_ps(rows[j]);
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_storeu_ps(columns + i * stride, r[i]);
}

#else

inline void transpose_block(const float *const *rows, float *columns, int64_t stride) {
    for (int j = 0; j < LANES; j++)
        for (int i = 0; i < LANES; i++) memcpy(columns + i * stride + j, rows[j] + i, 4);
}

#endif

}  // namespace
