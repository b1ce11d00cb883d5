/* Matrix products with weights in codes of 8 or 4 bits and a scale a group of inputs; each result is summed in one order.
 *
 *     result = sum over groups of  scale of the weights * sum over pieces of  scale of x * (sum of code * x - zero * sum of x)
 *
 * Each row is rounded to 8 bits in pieces of 128 inputs, or of a smaller group, with a scale each. Sums within a piece are exact integers, the same
 * by any instruction: few rows are multiplied by vectors, and more in tiles (AMX). Sums over pieces and groups are float32, one fused addition after
 * the other. So results do not depend on other rows, and two processors with fused additions agree to the last bit.
 */
#include "codes.h"

#include "panels.h"
#include "tiles.h"

/* Inputs of a row that share a scale. */
#define PIECE 128
/* Most rows at a time. */
#define MOST 16
/* With fewer rows, rounding them is not worth a second thread. */
#define FEW 8

/* What the instructions subtract from codes: nothing if they multiply unsigned codes, else 128 from codes of 8 bits. */
#if defined(__AVX512VNNI__) || (LANES == 8 && defined(__AVXVNNI__))
#define OFFSET(bits) 0
#elif defined(__AVX512BW__) || (LANES == 8 && defined(__AVX2__)) || (defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD))
#define OFFSET(bits) ((bits) == 8 ? 128 : 0)
#else
#define OFFSET(bits) 0
#endif

typedef struct {
    float scale;
    int32_t sum; /* sum of its codes */
} piece;

/* The layout of a rounded row in memory: the codes of all groups, then its pieces. */
typedef struct {
    size_t group, filled; /* inputs of a group, without and with padding */
    size_t groups, pieces; /* groups of a row, pieces of a group */
    size_t codes, stride;  /* bytes of a row's codes, and of the whole row */
} layout;

static layout layout_of(const paged_codes *codes, size_t depth) {
    layout found = {.group = codes->group, .groups = depth / codes->group};
    found.filled = (found.group + 7) / 8 * 8;
    found.pieces = (found.filled + PIECE - 1) / PIECE;
    found.codes = (found.groups * found.filled + 63) / 64 * 64;
    found.stride = found.codes + (found.groups * found.pieces * sizeof(piece) + 63) / 64 * 64;
    return found;
}

int64_t paged_codes_room(const paged_codes *codes, int64_t rows, int64_t depth) {
    return (int64_t)(layout_of(codes, (size_t)depth).stride * (size_t)rows);
}

INLINE piece *pieces_of(const char *rounded, size_t row, const layout *lies) {
    return (piece *)(rounded + row * lies->stride + lies->codes);
}

/* Rounds a piece of PIECE numbers, padded with 0, to codes from -127 to 127, and stores the first `filled`. A number that is not finite makes the
 * scale NaN. */
INLINE piece rounded_piece(const float *x, int8_t *codes, size_t filled) {
    vec most = {0}, no_number = {0};
    for (size_t i = 0; i < PIECE; i += LANES) {
        const vec each = *(const vec *)(x + i);
        most = larger((vec)((uvec)each & 0x7fffffff), most);
        no_number += each * 0.0f;
    }
    const float largest = most_of(most), wrong = sum_of(no_number);
    /* Numbers this small become 0, since the reciprocal would be infinite. */
    const float factor = largest > 1e-30f ? 127.0f / largest : 0.0f;
    int32_t wide[PIECE];
    for (size_t i = 0; i < PIECE; i += LANES) {
        /* Rounds to the nearest, halves to even. */
        const vec whole = (*(const vec *)(x + i) * factor + 12582912.0f) - 12582912.0f;
        *(ivec *)(wide + i) = wrong == 0 ? __builtin_convertvector(whole, ivec) : (ivec){0};
    }
    piece found = {(largest > 1e-30f ? largest / 127.0f : 0.0f) + wrong, 0};
    for (size_t i = 0; i < filled; i++) {
        codes[i] = (int8_t)wide[i];
        found.sum += wide[i];
    }
    return found;
}

/* Rounds a row into `to`. */
static void round_row(const void *x, enum element element, const layout *lies, const int64_t *order, char *to) {
    piece *pieces = pieces_of(to, 0, lies);
    for (size_t g = 0; g < lies->groups; g++)
        for (size_t p = 0; p < lies->filled; p += PIECE) {
            const size_t first = g * lies->group + p, left = lies->group > p ? lies->group - p : 0, filled = lies->filled - p;
            const size_t count = left < PIECE ? left : PIECE;
            float numbers[PIECE] = {0};
            if (order)
                for (size_t i = 0; i < count; i++) numbers[i] = load_one(x, order[first + i], element);
            else if (count == PIECE)
                for (size_t i = 0; i < PIECE; i += LANES) *(vec *)(numbers + i) = load(x, first + i, element);
            else
                for (size_t i = 0; i < count; i++) numbers[i] = load_one(x, first + i, element);
            *pieces++ = rounded_piece(numbers, (int8_t *)to + g * lies->filled + p, filled < PIECE ? filled : PIECE);
        }
}

/* Adds, in each lane, four codes times the four numbers of x to sums. */
INLINE ivec dotted(ivec sums, ivec codes, int32_t x, const int bits) {
    (void)bits;
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(x));
#elif LANES == 8 && defined(__AVXVNNI__)
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(x));
#elif defined(__AVX512BW__)
    /* Two products in 16 bits: up to 2 * 128 * 127, which is below 2 ** 15. */
    __m512i factors = _mm512_set1_epi32(x), ours = (__m512i)codes;
    if (bits == 8) {
        ours = _mm512_xor_si512(ours, _mm512_set1_epi8(-128));
        factors = _mm512_mask_sub_epi8(factors, _mm512_movepi8_mask(ours), _mm512_setzero_si512(), factors);
        ours = _mm512_abs_epi8(ours);
    }
    return sums + (ivec)_mm512_madd_epi16(_mm512_maddubs_epi16(ours, factors), _mm512_set1_epi16(1));
#elif LANES == 8 && defined(__AVX2__)
    __m256i factors = _mm256_set1_epi32(x), ours = (__m256i)codes;
    if (bits == 8) {
        ours = _mm256_xor_si256(ours, _mm256_set1_epi8(-128));
        factors = _mm256_sign_epi8(factors, ours);
        ours = _mm256_abs_epi8(ours);
    }
    return sums + (ivec)_mm256_madd_epi16(_mm256_maddubs_epi16(ours, factors), _mm256_set1_epi16(1));
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
    /* Written from Arm's manual, and never run. */
    int8x16_t ours = vreinterpretq_s8_s32((int32x4_t)codes);
    if (bits == 8) ours = veorq_s8(ours, vdupq_n_s8(-128));
    return (ivec)vdotq_s32((int32x4_t)sums, ours, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
    UNROLL for (int i = 0; i < 4; i++) sums += (ivec)((uvec)codes >> 8 * i & 255) * (int32_t)(int8_t)((uint32_t)x >> 8 * i);
    return sums;
#endif
}

typedef uint8_t ubvec __attribute__((vector_size(LANES), aligned(1), may_alias));

/* LANES zeros, as integers of 32 bits. */
INLINE ivec widened(const uint8_t *zeros) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)zeros));
#else
    return __builtin_convertvector(*(const ubvec *)zeros, ivec);
#endif
}

INLINE int32_t four(const char *codes) {
    int32_t found;
    memcpy(&found, codes, 4);
    return found;
}

/* Multiplies rounded rows by one panel. `adds`: to the numbers in `to`. */
INLINE void code_tile(const int rows, const int bits, const char *x, const layout *lies, const char *w, const float *scales,
                      const uint8_t *zeros, int32_t zero, float *to, size_t to_stride, int adds) {
    vec sums[ROWS][WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < WIDE; j++) sums[i][j] = adds ? *(const vec *)(to + i * to_stride + j * LANES) : (vec){0};
    for (size_t g = 0, number = 0; g < lies->groups; g++) {
        vec of_group[ROWS][WIDE];
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int j = 0; j < WIDE; j++) of_group[i][j] = (vec){0};
        for (size_t p = 0; p < lies->filled; p += PIECE, number++) {
            ivec dots[ROWS][WIDE], others[WIDE];
            const size_t count = lies->filled - p < PIECE ? lies->filled - p : PIECE;
            const char *codes = x + g * lies->filled + p;
            UNROLL for (int i = 0; i < rows; i++) {
                const int32_t sum = pieces_of(x, i, lies)[number].sum;
                UNROLL for (int j = 0; j < WIDE; j++)
                    dots[i][j] = zeros ? (OFFSET(bits) - widened(zeros + g * COLUMNS + j * LANES)) * sum
                                       : (ivec){0} + (OFFSET(bits) - zero) * sum;
            }
            UNROLL for (int j = 0; j < WIDE; j++) others[j] = (ivec){0};
            for (size_t k = 0; k < count; k += 8, w += bits * COLUMNS)
                UNROLL for (int half = 0; half < 2; half++) {
                    ivec its[WIDE];
                    UNROLL for (int j = 0; j < WIDE; j++) {
                        if (bits == 8)
                            its[j] = *(const ivec *)(w + 4 * (half * COLUMNS + j * LANES));
                        else
                            its[j] = (*(const ivec *)(w + 4 * j * LANES) >> 4 * half) & 0x0f0f0f0f;
                    }
                    UNROLL for (int i = 0; i < rows; i++) {
                        const int32_t factors = four(codes + i * lies->stride + k + 4 * half);
                        UNROLL for (int j = 0; j < WIDE; j++) {
                            /* A single row would wait for each addition, so it has two sums. */
                            if (rows == 1 && half)
                                others[j] = dotted(others[j], its[j], factors, bits);
                            else
                                dots[i][j] = dotted(dots[i][j], its[j], factors, bits);
                        }
                    }
                }
            UNROLL for (int i = 0; i < rows; i++) {
                const vec scale = spread(pieces_of(x, i, lies)[number].scale);
                UNROLL for (int j = 0; j < WIDE; j++) {
                    if (rows == 1) dots[i][j] += others[j];
                    of_group[i][j] = fused(__builtin_convertvector(dots[i][j], vec), scale, of_group[i][j]);
                }
            }
        }
        UNROLL for (int j = 0; j < WIDE; j++) {
            const vec scale = *(const vec *)(scales + g * COLUMNS + j * LANES);
            UNROLL for (int i = 0; i < rows; i++) sums[i][j] = fused(of_group[i][j], scale, sums[i][j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < WIDE; j++) *(vec *)(to + i * to_stride + j * LANES) = sums[i][j];
}

#if HAS_AMX && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#define HAS_BYTE_TILES 1
/* Fewest rows with which tiles are faster than code_tile. */
#define FEWEST 5
/* Pieces at a time: sums of one are scaled while others are multiplied. */
#define DEEP 4

/* Computes the sums of a piece, in tile `number`. */
#define MULTIPLY(number)                                                               \
    do {                                                                               \
        const size_t p = (within + number) * PIECE, left = lies->filled - p;           \
        const size_t begin = group * lies->filled + p;                                 \
        const size_t end = begin + (left < PIECE ? left : PIECE);                      \
        _tile_zero(number);                                                            \
        for (size_t k = begin; k < end; k += TILE_BYTES) {                             \
            if (is_new)                                                                \
                for (int i = 0; i < TILE_ROWS; i++) fetch(w + (k + 4 * i) * COLUMNS, 1, 4); \
            _tile_loadd(4, x + k, lies->stride);                                       \
            _tile_loadd(6, w + k * COLUMNS, 4 * COLUMNS);                              \
            _tile_dpbsud(number, 4, 6);                                                \
        }                                                                              \
        _tile_stored(number, dots[number], sizeof(ivec));                              \
    } while (0)

/* Adds `now` pieces, from number `first` on, to their group. */
INLINE void add_pieces(const int now, size_t rows, const char *x, const layout *lies, size_t first, __m512i zero, ivec (*dots)[TILE_ROWS],
                       vec *of_group) {
    for (size_t i = 0; i < rows; i++) {
        const piece *its = pieces_of(x, i, lies) + first;
        vec sum = of_group[i];
        UNROLL for (int d = 0; d < now; d++) {
            /* `zero` is negative, in the lower halves of lanes; the sum of a piece's codes fits into one half. */
            const __m512i dot = _mm512_dpwssd_epi32((__m512i)dots[d][i], zero, _mm512_set1_epi32(its[d].sum));
            sum = fused((vec)_mm512_cvtepi32_ps(dot), spread(its[d].scale), sum);
        }
        of_group[i] = sum;
    }
}

/* As code_tile, for codes of 8 bits, up to TILE_ROWS rows, and the LANES columns at which `w`, `scales`, `zeros` and `to` begin.
 * `is_new` fetches the panel's other columns, too: memory is fast only if read line after line. */
INLINE void byte_tile(size_t rows, const char *x, const layout *lies, const char *w, const float *scales, const uint8_t *zeros, int32_t zero,
                      float *to, size_t to_stride, int adds, int is_new) {
    /* Whole cache lines. */
    ivec dots[DEEP][TILE_ROWS] __attribute__((aligned(64)));
    vec of_group[TILE_ROWS] __attribute__((aligned(64)));
    for (size_t group = 0; group < lies->groups; group++) {
        const vec scale = *(const vec *)(scales + group * COLUMNS);
        const ivec its_zero = zeros ? widened(zeros + group * COLUMNS) : (ivec)_mm512_set1_epi32(zero);
        const __m512i minus = _mm512_and_si512((__m512i)-its_zero, _mm512_set1_epi32(0xffff));
        for (size_t i = 0; i < rows; i++) of_group[i] = (vec){0};
        for (size_t within = 0; within < lies->pieces; within += DEEP) {
            const size_t first = group * lies->pieces + within, left = lies->pieces - within;
            MULTIPLY(0);
            if (left > 1) MULTIPLY(1);
            if (left > 2) MULTIPLY(2);
            if (left > 3) MULTIPLY(3);
            switch (left) {
                case 1: add_pieces(1, rows, x, lies, first, minus, dots, of_group); break;
                case 2: add_pieces(2, rows, x, lies, first, minus, dots, of_group); break;
                case 3: add_pieces(3, rows, x, lies, first, minus, dots, of_group); break;
                default: add_pieces(DEEP, rows, x, lies, first, minus, dots, of_group);
            }
        }
        for (size_t i = 0; i < rows; i++) {
            vec *its = (vec *)(to + i * to_stride);
            *its = fused(of_group[i], scale, group || adds ? *its : (vec){0});
        }
    }
}

static void shape_byte_tiles(size_t rows) {
    tile_shape shape = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shape.rows[t] = t < 6 ? rows : TILE_ROWS;
        shape.bytes[t] = TILE_BYTES;
    }
    load_shape(&shape);
}
#else
#define HAS_BYTE_TILES 0
#endif

/* Multiplies the first rows by one panel. Returns how many. `shaped`: rows of the tiles; 0: tiles have no shape yet. */
INLINE size_t some_rows(size_t rows, const int bits, const char *x, const layout *lies, const char *w, const float *scales,
                        const uint8_t *zeros, int32_t zero, float *to, size_t to_stride, int adds, size_t *shaped) {
    (void)shaped;
#if HAS_BYTE_TILES
    if (bits == 8 && rows >= FEWEST && lies->filled % TILE_BYTES == 0 && may_use_tiles()) {
        const size_t count = rows < TILE_ROWS ? rows : TILE_ROWS;
        const int is_new = !*shaped;
        settle(x);
        if (*shaped != count) shape_byte_tiles(*shaped = count);
        byte_tile(count, x, lies, w, scales, zeros, zero, to, to_stride, adds, is_new);
        for (int j = LANES; j < COLUMNS; j += LANES)
            byte_tile(count, x, lies, w + 4 * j, scales + j, zeros ? zeros + j : NULL, zero, to + j, to_stride, adds, 0);
        return count;
    }
#endif
    WITH_CONSTANT(rows, code_tile, bits, x, lies, w, scales, zeros, zero, to, to_stride, adds)
    return rows < ROWS ? rows : ROWS;
}

/* Multiplies rows first to last - 1 by one panel. */
INLINE void with_panel(const char *x, const layout *lies, size_t first, size_t last, const paged_product *product, size_t panel,
                       const int bits) {
    const size_t column = panel * COLUMNS, stride = product->to_stride;
    const size_t width = product->outs - column < COLUMNS ? product->outs - column : COLUMNS;
    const paged_codes *codes = product->codes;
    const char *w = (const char *)product->packed + column * lies->groups * lies->filled * bits / 8;
    const float *scales = codes->scales + column * lies->groups;
    const uint8_t *zeros = codes->zeros ? codes->zeros + column * lies->groups : NULL;
    float *to = product->to + column;
    size_t shaped = 0;
    for (size_t r = first; r < last;) {
        const char *its = x + r * lies->stride;
        if (width == COLUMNS) {
            r += some_rows(last - r, bits, its, lies, w, scales, zeros, codes->zero, to + r * stride, stride, product->adds,
                           &shaped);
            continue;
        }
        /* A whole panel is wider than `to`. */
        float sums[MOST * COLUMNS] = {0};
        const size_t most = last - r < MOST ? last - r : MOST;
        if (product->adds)
            for (size_t i = 0; i < most; i++) memcpy(sums + i * COLUMNS, to + (r + i) * stride, width * sizeof(float));
        const size_t count = some_rows(most, bits, its, lies, w, scales, zeros, codes->zero, sums, COLUMNS, product->adds, &shaped);
        for (size_t i = 0; i < count; i++) memcpy(to + (r + i) * stride, sums + i * COLUMNS, width * sizeof(float));
        r += count;
    }
#if HAS_BYTE_TILES
    if (shaped) _tile_release();
#endif
    add_bias(product, first, last, column, width);
}

typedef struct {
    const char *rounded;
    layout lies;
} coded_rows;

static void with_panel_8(const void *x, size_t first, size_t last, const paged_product *product, size_t panel) {
    const coded_rows *its = x;
    with_panel(its->rounded, &its->lies, first, last, product, panel, 8);
}

static void with_panel_4(const void *x, size_t first, size_t last, const paged_product *product, size_t panel) {
    const coded_rows *its = x;
    with_panel(its->rounded, &its->lies, first, last, product, panel, 4);
}

static panel_work by_bits(const paged_product *product, const void *x) {
    (void)x;
    return product->codes->bits == 8 ? with_panel_8 : with_panel_4;
}

/* Computes products whose rows are rounded alike. */
static void coded_products(const void *x, size_t x_stride, int64_t rows, size_t depth, enum element element, const paged_product *products,
                           int64_t count, char *work) {
    const layout lies = layout_of(products->codes, depth);
    const int64_t *order = products->codes->order;
    const size_t bytes = bytes_of(element);
#pragma omp parallel for schedule(static) if (rows >= FEW)
    for (int64_t r = 0; r < rows; r++) round_row((const char *)x + r * x_stride * bytes, element, &lies, order, work + r * lies.stride);
    const coded_rows its = {work, lies};
    over_panels(&its, rows, products, count, by_bits);
}

static int is_alike(const paged_codes *one, const paged_codes *other) {
    if (!one || !other) return one == other;
    return one->group == other->group && one->order == other->order;
}

void paged_mixed_products(const void *x, int64_t x_stride, int64_t rows, int64_t depth, int32_t element, const paged_product *products,
                          int64_t count, void *work) {
    for (int64_t first = 0, next; first < count; first = next) {
        for (next = first + 1; next < count && is_alike(products[first].codes, products[next].codes); next++) {}
        if (products[first].codes)
            coded_products(x, x_stride, rows, depth, element, products + first, next - first, work);
        else
            paged_products(x, x_stride, rows, depth, element, products + first, next - first);
    }
}

void paged_code_row(const paged_codes *codes, const void *packed, int64_t depth, int64_t result, float *to) {
    const layout lies = layout_of(codes, (size_t)depth);
    const size_t panel = result / COLUMNS * COLUMNS, column = result % COLUMNS, first = panel * lies.groups;
    const uint8_t *words = (const uint8_t *)packed + panel * lies.groups * lies.filled * codes->bits / 8;
    for (size_t d = 0; d < (size_t)depth; d++) {
        const size_t g = d / lies.group, at = g * COLUMNS + column, i = g * lies.filled + d % lies.group;
        int32_t code;
        if (codes->bits == 8)
            code = words[(i / 4 * COLUMNS + column) * 4 + i % 4];
        else
            code = words[(i / 8 * COLUMNS + column) * 4 + i % 4] >> (i & 4) & 15;
        const int32_t zero = codes->zeros ? codes->zeros[first + at] : codes->zero;
        to[codes->order ? codes->order[d] : (int64_t)d] = (float)(code - zero) * codes->scales[first + at];
    }
}
