// Vectors of float32 in the width of the instruction set that this file is compiled for. GCC's and Clang's vector types
// do most of it. Products and sums are fused only where `fma` says so: a result must not depend on which loop the
// compiler chose to fuse (the build says -ffp-contract=off).
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t VecInt __attribute__((vector_size(4 * LANES)));

inline Vec load(const float *at) {
    Vec v;
    memcpy(&v, at, sizeof v);
    return v;
}

inline VecInt load_int(const void *at) {
    VecInt v;
    memcpy(&v, at, sizeof v);
    return v;
}

inline void store(float *at, Vec v) { memcpy(at, &v, sizeof v); }

inline Vec broadcast(float x) {
#if defined(__AVX512F__)
    return (Vec)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (Vec)_mm256_set1_ps(x);
#else
    return Vec{x, x, x, x};
#endif
}

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// NaN in `b` stays, so that what is not a number is never hidden.
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float largest(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float parts[LANES], most;
    store(parts, v);
    most = parts[0];
    for (int i = 1; i < LANES; i++) most = parts[i] > most ? parts[i] : most;
    return most;
#endif
}

inline float sum(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float parts[LANES];
    store(parts, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
#endif
}

// The 2 * LANES bfloat16 at `at` are pairs; `even` and `odd` are the first and the second of each as float32.
struct Pairs {
    Vec even, odd;
};

inline Pairs load_pairs(const uint16_t *at) {
    VecInt both = load_int(at);
    return {(Vec)(both << 16), (Vec)(both & (int32_t)0xffff0000)};
}

inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

inline float widen(float x) { return x; }

// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

typedef uint16_t VecHalf __attribute__((vector_size(2 * LANES)));

// The same for a vector.
inline void store_narrow(uint16_t *at, Vec x) {
    const VecInt bits = (VecInt)x, high = bits >> 16;
    const VecInt rounded = (bits + 0x7fff + (high & 1)) >> 16;
    const VecHalf half = __builtin_convertvector(x == x ? rounded : high | 0x40, VecHalf);
    memcpy(at, &half, sizeof half);
}

inline Vec load_wide(const float *at) { return load(at); }

inline Vec load_wide(const uint16_t *at) {
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16);
#elif defined(__AVX2__)
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16);
#else
    return Vec{widen(at[0]), widen(at[1]), widen(at[2]), widen(at[3])};
#endif
}

// exp(x) within 2 units in the last place: x = n log 2 + r, a polynomial in r (Cephes' expf), n into the exponent.
// Below -87 it is exactly 0, which a hidden key's weight has to be.
inline Vec exp_of(Vec x) {
    const Vec low = broadcast(-87.0f), high = broadcast(88.0f), magic = broadcast(12582912.0f);
    Vec clamped = x < low ? low : x;
    clamped = clamped > high ? high : clamped;
    Vec shifted = fma(clamped, broadcast(1.44269504088896341f), magic);
    Vec n = shifted - magic;
    Vec r = fma(n, broadcast(-0.693359375f), clamped);
    r = fma(n, broadcast(2.12194440e-4f), r);
    Vec p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = fma(p, r * r, r + broadcast(1.0f));
    VecInt exponent = ((VecInt)shifted - (VecInt)magic) << 23;
    Vec y = (Vec)((VecInt)p + exponent);
    return x < low ? Vec{} : y;
}

}  // namespace
