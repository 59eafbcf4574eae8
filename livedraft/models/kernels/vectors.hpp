// One vector register of floats, for all kernels. The compiler's own vector types (GCC, Clang) spell most of it; what they cannot say
// is in the intrinsics of the two widths.
//
// Legend: W floats of a register.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

namespace {

#ifdef __AVX512F__
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float floats __attribute__((vector_size(4 * W)));
typedef int32_t ints __attribute__((vector_size(4 * W)));
typedef int8_t bytes __attribute__((vector_size(W)));
typedef uint16_t halves __attribute__((vector_size(2 * W)));

template <class Vector>
inline Vector load_as(const void* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline floats load(const float* from) { return load_as<floats>(from); }
inline void store(float* to, floats x) { std::memcpy(to, &x, sizeof x); }
inline floats all(float x) { return x - floats{}; }

// a * b + c, rounded once. Said, not left to the compiler: it fuses in one loop and not in another, by the CPU it tunes for, and a row's
// numbers must not depend on which loop it went through.
#ifdef __AVX512F__
inline floats fused(floats a, floats b, floats c) { return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else
inline floats fused(floats a, floats b, floats c) { return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#endif

inline floats widen(const bf16* x) {
    return (floats)(__builtin_convertvector(load_as<halves>(x), ints) << 16);
}

// 2 W neighbouring bf16 as the even ones and the odd ones.
struct Pairs {
    floats even, odd;
};

inline Pairs widen_pairs(const bf16* x) {
    const ints both = load_as<ints>(x);
    return {(floats)(both << 16), (floats)(both & (ints{} + (int)0xffff0000))};
}

// The lowest byte of each.
inline void store_bytes(ints x, int8_t* to) {
    const bytes narrowed = __builtin_convertvector(x, bytes);
    std::memcpy(to, &narrowed, sizeof narrowed);
}

// Four neighbouring inputs, for products with W times four weights that have no sign. Whole numbers: alike on every CPU.
#ifdef __AVX512VNNI__
struct FourBytes {
    ints inputs;
    explicit FourBytes(const int8_t* at) : inputs(ints{} + load_as<int>(at)) {}
    ints times(ints weights, ints sum) const {
        return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)inputs);
    }
};
#else
// Pairs of 16 bits: the even bytes of both, and the odd ones.
struct FourBytes {
    ints even, odd;
    explicit FourBytes(const int8_t* at)
        : even(ints{} + pair(at[0], at[2])), odd(ints{} + pair(at[1], at[3])) {}
    static int pair(int low, int high) { return (low & 0xffff) | (int)((uint32_t)high << 16); }
    ints times(ints weights, ints sum) const {
        return sum + sums_of_pairs(weights & 0x00ff00ff, even) + sums_of_pairs((weights >> 8) & 0x00ff00ff, odd);
    }
#ifdef __AVX512F__
    static ints sums_of_pairs(ints a, ints b) { return (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#else
    static ints sums_of_pairs(ints a, ints b) { return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#endif
};
#endif

#ifdef __AVX512F__
inline float sum_of(floats x) { return _mm512_reduce_add_ps((__m512)x); }
#else
inline float sum_of(floats x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
#endif

#ifdef __AVX512F__
inline int largest_of(ints x) { return _mm512_reduce_max_epi32((__m512i)x); }
#else
inline int largest_of(ints x) {
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(2, 3, 0, 1))));
}
#endif

// Rounded to the nearest bf16, ties to even; a NaN stays one.
inline void narrow(floats x, bf16* out) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    const ints bits = (ints)x;
    const ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const halves result = __builtin_convertvector(x == x ? rounded : ints{} + 0x7fc0, halves);
    std::memcpy(out, &result, sizeof result);
#endif
}

inline void narrow(floats x, float* out) { store(out, x); }

// exp for x <= about 88, to a few units in the last place (Cephes' polynomial).
inline floats exp_of(floats x) {
    x = x < -87.3f ? all(-87.3f) : x;  // a NaN stays one: the engine must see it
    const floats shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const floats n = fused(x, all(1.44269504f), shift) - shift;
    floats r = fused(n, all(-0.693359375f), x);
    r = fused(n, all(2.12194440e-4f), r);
    floats p = all(1.9875691500e-4f);
    p = fused(p, r, all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(0.5f));
    p = fused(p * r, r, r + 1.0f);
    return p * (floats)((__builtin_convertvector(n, ints) + 127) << 23);
}

}  // namespace
