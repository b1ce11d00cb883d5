/* Vectors of float32 as wide as the machine's, and what attention and products share: loads of both element types, exp, a
 * tile of a product. Written in the vector extensions of GCC and Clang, so that one text serves every instruction set.
 * Where a compiler misses an instruction, the intrinsic is named.
 *
 * The order of every sum here depends only on the number of summands: not on how many rows are computed beside it, and
 * not on the thread that computes it.
 */
#ifndef PAGED_VECTOR_H
#define PAGED_VECTOR_H

#if defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define WIDE 4
#elif defined(__AVX__)
#define LANES 8
#define WIDE 2
#elif defined(__aarch64__)
#define LANES 4
#define WIDE 4
#else
#define LANES 4
#define WIDE 2
#endif
/* A tile of a product: as many rows and columns as registers hold. */
#define ROWS 6
#define COLUMNS (WIDE * LANES)

#define INLINE static inline __attribute__((always_inline, unused))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint16_t bf16;

enum element { FLOAT32 = 0, BFLOAT16 = 1 };

/* Force writes to memory, because compilers do not see that matrix units read it. */
INLINE void settle(const void *there) { __asm__ volatile("" : : "r"(there) : "memory"); }

INLINE size_t bytes_of(enum element element) { return element == FLOAT32 ? 4 : 2; }

/* Subtract 0, which compilers leave out; adding 0 would turn -0 into 0. */
INLINE vec spread(float x) { return x - (vec){0}; }

/* a * b + c, rounded once where the processor can. Named, because compilers fuse in one place and not in another: GCC
 * for some processors not where additions follow one another, so that a sum would depend on what is computed beside it.
 * Nothing else is fused. */
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif LANES == 4 && defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* Read from memory, because compilers build such a vector lane by lane. */
static const int32_t lane_numbers[32] __attribute__((unused)) = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                                                 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE vec rising(void) { return __builtin_convertvector(*(const ivec *)lane_numbers, vec); }

INLINE vec chosen(ivec is, vec yes, vec no) { return (vec)(((ivec)yes & is) | ((ivec)no & ~is)); }

INLINE vec larger(vec a, vec b) {
#ifdef __AVX512F__
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return chosen((ivec)(a > b), a, b);
#endif
}

/* Combine lanes half a vector apart, then a quarter, …: always the same tree. */
INLINE vec turned(vec v, int by) {
#ifdef __clang__
    vec found;
    UNROLL for (int i = 0; i < LANES; i++) found[i] = v[(i + by) % LANES];
    return found;
#else
    /* A shuffle takes lane numbers modulo LANES. */
    return __builtin_shuffle(v, *(const ivec *)(lane_numbers + by));
#endif
}

/* Lanes change places with those a power of two away. */
INLINE vec swapped(vec v, int by) {
#ifdef __clang__
    vec found;
    UNROLL for (int i = 0; i < LANES; i++) found[i] = v[i ^ by];
    return found;
#else
    return __builtin_shuffle(v, *(const ivec *)lane_numbers ^ by);
#endif
}

INLINE float sum_of(vec v) {
    UNROLL for (int by = LANES / 2; by; by /= 2) v += turned(v, by);
    return v[0];
}

INLINE float most_of(vec v) {
    UNROLL for (int by = LANES / 2; by; by /= 2) v = larger(v, turned(v, by));
    return v[0];
}

/* Sum of squares, in LANES sums and a remainder: one order for one length. */
INLINE float squares_of(const float *x, size_t length) {
    vec sum = {0};
    size_t i = 0;
    for (; i + LANES <= length; i += LANES) sum = fused(*(const vec *)(x + i), *(const vec *)(x + i), sum);
    float total = sum_of(sum);
    for (; i < length; i++) total += x[i] * x[i];
    return total;
}

INLINE float as_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

/* To the nearest, halves to even; NaN stays NaN. */
INLINE bf16 as_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE vec load(const void *from, size_t at, enum element element) {
    if (element == FLOAT32) return *(const vec *)((const float *)from + at);
    return (vec)(__builtin_convertvector(*(const hvec *)((const bf16 *)from + at), uvec) << 16);
}

INLINE void store(void *to, size_t at, vec v, enum element element) {
    if (element == FLOAT32) {
        *(vec *)((float *)to + at) = v;
        return;
    }
    uvec bits = (uvec)v;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    ivec is_nan = (ivec)((bits & 0x7fffffff) > 0x7f800000);
    rounded = (rounded & ~(uvec)is_nan) | (0x7fc0 & (uvec)is_nan);
    *(hvec *)((bf16 *)to + at) = __builtin_convertvector(rounded, hvec);
}

INLINE float load_one(const void *from, size_t at, enum element element) {
    return element == FLOAT32 ? ((const float *)from)[at] : as_float(((const bf16 *)from)[at]);
}

INLINE void store_one(void *to, size_t at, float x, enum element element) {
    if (element == FLOAT32)
        ((float *)to)[at] = x;
    else
        ((bf16 *)to)[at] = as_bf16(x);
}

/* e to the x for x up to 88, within two units in the last place down to -87, and exactly 0 below. NaN stays NaN.
 * x = n ln 2 + r; a polynomial for r (the coefficients are Cephes'), and n into the exponent. */
INLINE vec exp_below(vec x) {
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vec r = fused(n, spread(2.12194440e-4f), fused(n, spread(-0.693359375f), x));
    vec p = spread(1.9875691500e-4f);
    p = fused(p, r, spread(1.3981999507e-3f));
    p = fused(p, r, spread(8.3334519073e-3f));
    p = fused(p, r, spread(4.1665795894e-2f));
    p = fused(p, r, spread(1.6666665459e-1f));
    p = fused(p, r, spread(5.0000001201e-1f));
    p = fused(p, r * r, r) + 1.0f;
    uvec exponent = (uvec)(__builtin_convertvector(n, ivec) + 127) << 23;
    return (vec)((ivec)(p * (vec)exponent) & ~(ivec)(x < -87.0f));
}

/* e to the x, at most e to the 88. */
INLINE vec exp_of(vec x) { return exp_below(chosen((ivec)(x > 88.0f), spread(88.0f), x)); }

/* to[rows, wide vectors] = x[rows, depth] · w[depth, wide vectors], on top of what is there, `kept` [rows] times,
 * unless this is the `first` part of the sum; `kept` may be NULL. Each number is the sum over depth in order, by fused
 * additions, whatever `rows` and `wide` are, which have to be constants where this is inlined, up to ROWS and WIDE. */
INLINE void tile(const int rows, const int wide, const float *x, size_t x_stride, const float *w, size_t w_stride, size_t depth,
                 float *to, size_t to_stride, int first, const float *kept) {
    vec sums[ROWS][WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < wide; j++) {
            sums[i][j] = first ? (vec){0} : *(const vec *)(to + i * to_stride + j * LANES);
            if (kept) sums[i][j] *= kept[i];
        }
    for (size_t p = 0; p < depth; p++) {
        vec row[WIDE];
        UNROLL for (int j = 0; j < wide; j++) row[j] = *(const vec *)(w + p * w_stride + j * LANES);
        UNROLL for (int i = 0; i < rows; i++) {
            const vec factor = spread(x[i * x_stride + p]);
            UNROLL for (int j = 0; j < wide; j++) sums[i][j] = fused(factor, row[j], sums[i][j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < wide; j++) *(vec *)(to + i * to_stride + j * LANES) = sums[i][j];
}

/* A call of `kernel` whose first argument, from 1 to ROWS, is a constant. */
#define WITH_CONSTANT(rows, kernel, ...)                \
    switch (rows) {                                     \
        case 1: kernel(1, __VA_ARGS__); break;          \
        case 2: kernel(2, __VA_ARGS__); break;          \
        case 3: kernel(3, __VA_ARGS__); break;          \
        case 4: kernel(4, __VA_ARGS__); break;          \
        case 5: kernel(5, __VA_ARGS__); break;          \
        default: kernel(6, __VA_ARGS__); break;         \
    }

#endif
