/* K and V as they are stored: float32, bfloat16, or codes of 8 or 4 bits with a bfloat16 scale a token and head (layouts/quantised.py, which
 * gives the same bits). Codes are read as float32, without their scale, which multiplies sums. Queries and results are
 * transformed as K and V are.
 */
#ifndef PAGED_QUANTISED_H
#define PAGED_QUANTISED_H

#include <math.h>

#include "vector.h"

/* The same numbers as in Python; the first two are those of enum element. */
enum stored { INT8 = 2, INT4 = 3 };
#define IS_QUANTISED(stored) ((stored) >= INT8)

typedef int8_t bvec __attribute__((vector_size(LANES), aligned(1), may_alias));

/* Words that begin at any byte. */
typedef int32_t words_anywhere __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

/* Bytes of a head's numbers or codes. */
INLINE size_t row_bytes(size_t size, int stored) {
    return stored == INT8 ? size : stored == INT4 ? (size + 1) / 2 : size * bytes_of((enum element)stored);
}

/* Codes in a word of 32 bits. */
INLINE int codes_of(int stored) { return stored == INT8 ? 4 : 8; }

/* Code `number` of each of these words. */
INLINE vec unpacked(ivec words, int number, int stored) {
    const int bits = stored == INT8 ? 8 : 4;
    return __builtin_convertvector((words << (32 - bits - number * bits)) >> (32 - bits), vec);
}

/* LANES words of a row of so many bytes, from this byte on; 0 behind its end. */
INLINE ivec words_of(const char *row, size_t at, size_t bytes) {
    if (at + 4 * LANES <= bytes) return (ivec) * (const words_anywhere *)(row + at);
#ifdef __AVX512BW__
    return (ivec)_mm512_maskz_loadu_epi8(bytes > at ? ~0ull >> (64 - (bytes - at)) : 0, row + at);
#else
    ivec found = {0};
    if (bytes > at) memcpy(&found, row + at, bytes - at);
    return found;
#endif
}

/* LANES codes of 8 bits. Named, because GCC takes them one by one. */
INLINE ivec widened(const char *codes) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes));
#elif LANES == 8 && defined(__AVX2__)
    return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes));
#else
    return __builtin_convertvector(*(const bvec *)codes, ivec);
#endif
}

static const int32_t to_the_top[16] __attribute__((unused)) = {28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0};
static const int32_t upper_half[16] __attribute__((unused)) = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1};

/* LANES numbers or codes from `at` on, a multiple of LANES. */
INLINE vec load_stored(const char *row, size_t at, int stored) {
    if (stored == INT8) return __builtin_convertvector(widened(row + at), vec);
    if (stored != INT4) return load(row, at, (enum element)stored);
    /* A word has the codes of eight lanes, each of which shifts its own to the top. */
    ivec words;
#if LANES == 16
    int32_t low, high;
    memcpy(&low, row + at / 2, 4);
    memcpy(&high, row + at / 2 + 4, 4);
    words = (ivec)chosen(*(const ivec *)upper_half, (vec)((ivec){0} + high), (vec)((ivec){0} + low));
#elif LANES == 8
    int32_t word;
    memcpy(&word, row + at / 2, 4);
    words = (ivec){0} + word;
#else
    uint16_t word;
    memcpy(&word, row + at / 2, 2);
    words = (ivec){0} + word;
#endif
    return __builtin_convertvector((words << *(const ivec *)to_the_top) >> 28, vec);
}

INLINE float load_stored_one(const char *row, size_t at, int stored) {
    if (stored == INT8) return ((const int8_t *)row)[at];
    if (stored == INT4) return (float)((int32_t)((uint32_t)(uint8_t)row[at / 2] << (at % 2 ? 24 : 28)) >> 28);
    return load_one(row, at, (enum element)stored);
}

/* The Hadamard transform of a head, of the largest power of two that it is made of; its own inverse. */
INLINE void transform(float *x, size_t size) {
    const size_t block = size & -size;
    size_t half = 1;
    if (block >= LANES) {
        for (size_t i = 0; i < size; i += LANES) {
            vec v = *(vec *)(x + i);
            UNROLL for (int by = 1; by < LANES; by *= 2) v = swapped(v, by) + chosen((*(const ivec *)lane_numbers & by) != 0, -v, v);
            *(vec *)(x + i) = v;
        }
        half = LANES;
    }
    for (; half < block; half *= 2)
        for (size_t i = 0; i < size; i += 2 * half)
            for (size_t j = i; j < i + half; j += half < LANES ? 1 : LANES)
                if (half < LANES) {
                    const float first = x[j], second = x[j + half];
                    x[j] = first + second;
                    x[j + half] = first - second;
                } else {
                    const vec first = *(vec *)(x + j), second = *(vec *)(x + j + half);
                    *(vec *)(x + j) = first + second;
                    *(vec *)(x + j + half) = first - second;
                }
    const float factor = (float)(1 / sqrt((double)block));
    for (size_t i = 0; i < size; i++) x[i] *= factor;
}

/* The scale and codes of a head's numbers, as QuantisedEntries.encoded; the numbers are transformed. */
INLINE void quantise(float *x, size_t size, char *codes, bf16 *scale, int stored) {
    const int below = stored == INT8 ? 128 : 8;
    const float to_whole = 12582912.0f;
    transform(x, size);
    /* Magnitudes as integers, which rise as they do; NaN is above all. */
    int32_t largest = 0, most = 0;
    for (size_t i = 0; i < size; i++) {
        int32_t bits, magnitude;
        memcpy(&bits, x + i, 4);
        magnitude = bits & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
        most = bits > most ? bits : most;
    }
    memset(codes, 0, row_bytes(size, stored));
    if (largest >= 0x7f800000) {
        *scale = 0x7fc0;
        return;
    }
    float step;
    memcpy(&step, &largest, 4);
    step /= (float)below;
    uint32_t bits;
    memcpy(&bits, &step, 4);
    /* The number of largest magnitude has the lowest code, so its scale has the other sign. */
    *scale = (bf16)((bits + 0xffff) >> 16 | (most == largest ? 0x8000 : 0));
    step = as_float(*scale);
    if (step == 0) return;
    for (size_t i = 0; i < size; i++) {
        /* To the nearest, halves to even. */
        int code = (int)((x[i] / step + to_whole) - to_whole);
        code = code > below - 1 ? below - 1 : code < -below ? -below : code;
        if (stored == INT8)
            codes[i] = (char)code;
        else
            codes[i / 2] |= (char)((code & 15) << i % 2 * 4);
    }
}

#endif
