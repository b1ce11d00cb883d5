/* Matrix products in which each result is summed in one order, whatever else is computed in the same call.
 *
 * A result is the sum over its depth, one fused multiply-add after the other (in bfloat16: pair after pair), whether its row is alone, in a tile of
 * six or in a prompt of thousands, and for any number of threads. So batch-invariance needs no tiles of a fixed size and no padding, and costs
 * nothing. Packed weights of a panel lie in the order in which they are read. The blocking is the usual one (Goto and van de Geijn, 2008).
 */
#include "products.h"

#include "panels.h"
#include "tiles.h"
#include "vector.h"

/* Numbers of the depth that stay in a cache while all rows of a chunk are multiplied; even, because of pairs. */
#define DEPTH 512
/* Rows of the buffer for sums of a panel that is wider than `to`; divides CHUNK. */
#define SOME 32

/* As `tile`, for bfloat16 in pairs: x [rows, depth], w [depth / 2, COLUMNS, 2]. */
INLINE void pair_tile(const int rows, const bf16 *x, size_t x_stride, const bf16 *w, size_t depth, float *to, size_t to_stride,
                      int first) {
    vec sums[ROWS][WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < WIDE; j++)
            sums[i][j] = first ? (vec){0} : *(const vec *)(to + i * to_stride + j * LANES);
    for (size_t p = 0; p < depth; p += 2) {
        uvec pairs[WIDE];
        UNROLL for (int j = 0; j < WIDE; j++) pairs[j] = *(const uvec *)(w + p * COLUMNS + 2 * j * LANES);
        UNROLL for (int i = 0; i < rows; i++) {
            uint32_t factors;
            memcpy(&factors, x + i * x_stride + p, 4);
#ifdef __AVX512BF16__
            __m512bh both = (__m512bh)_mm512_set1_epi32((int)factors);
            UNROLL for (int j = 0; j < WIDE; j++)
                sums[i][j] = (vec)_mm512_dpbf16_ps((__m512)sums[i][j], both, (__m512bh)pairs[j]);
#else
            const vec low = spread(as_float((bf16)factors)), high = spread(as_float((bf16)(factors >> 16)));
            UNROLL for (int j = 0; j < WIDE; j++) {
                sums[i][j] = fused(low, (vec)(pairs[j] << 16), sums[i][j]);
                sums[i][j] = fused(high, (vec)(pairs[j] & 0xffff0000u), sums[i][j]);
            }
#endif
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < WIDE; j++) *(vec *)(to + i * to_stride + j * LANES) = sums[i][j];
}

INLINE void some_rows(size_t rows, const void *x, size_t x_stride, const void *w, size_t depth, float *to, size_t to_stride, int first,
                      enum element element) {
    if (element == FLOAT32)
        WITH_CONSTANT(rows, tile, WIDE, x, x_stride, w, COLUMNS, depth, to, to_stride, first, NULL)
    else
        WITH_CONSTANT(rows, pair_tile, x, x_stride, w, depth, to, to_stride, first)
}

/* Multiplies any number of rows by a panel. */
INLINE void all_rows(size_t rows, const void *x, size_t x_stride, const void *w, size_t depth, float *to, size_t to_stride, int first,
                     enum element element) {
#if HAS_AMX
    if (element == BFLOAT16 && may_use_tiles()) {
        tiles(rows, x, x_stride, w, depth, to, to_stride, first);
        return;
    }
#endif
    for (size_t r = 0; r < rows; r += ROWS)
        some_rows(rows - r, (const char *)x + r * x_stride * bytes_of(element), x_stride, w, depth, to + r * to_stride, to_stride, first,
                  element);
}

/* Multiplies rows first to last - 1 by one panel. */
INLINE void with_panel(const void *x, size_t x_stride, size_t first, size_t last, size_t depth, const paged_product *product,
                       size_t panel, enum element element) {
    const size_t bytes = bytes_of(element), column = panel * COLUMNS, stride = product->to_stride;
    const size_t width = product->outs - column < COLUMNS ? product->outs - column : COLUMNS;
    const char *rows_of_x = x, *packed = (const char *)product->packed + column * depth * bytes;
    float *to = product->to + column;
    if (width == COLUMNS)
        for (size_t p = 0; p < depth; p += DEPTH)
            all_rows(last - first, rows_of_x + (first * x_stride + p) * bytes, x_stride, packed + p * COLUMNS * bytes,
                     depth - p < DEPTH ? depth - p : DEPTH, to + first * stride, stride, !p && !product->adds, element);
    else
        for (size_t r = first; r < last; r += SOME) {
            /* A whole panel is wider than `to`. */
            float sums[SOME * COLUMNS];
            const size_t count = last - r < SOME ? last - r : SOME;
            if (product->adds)
                for (size_t i = 0; i < count; i++) memcpy(sums + i * COLUMNS, to + (r + i) * stride, width * sizeof(float));
            all_rows(count, rows_of_x + r * x_stride * bytes, x_stride, packed, depth, sums, COLUMNS, !product->adds, element);
            for (size_t i = 0; i < count; i++) memcpy(to + (r + i) * stride, sums + i * COLUMNS, width * sizeof(float));
        }
    add_bias(product, first, last, column, width);
}

typedef struct {
    const void *x;
    size_t x_stride, depth;
    enum element element;
} float_rows;

static void with_panel_float32(const void *x, size_t first, size_t last, const paged_product *product, size_t panel) {
    const float_rows *its = x;
    with_panel(its->x, its->x_stride, first, last, its->depth, product, panel, FLOAT32);
}

static void with_panel_bfloat16(const void *x, size_t first, size_t last, const paged_product *product, size_t panel) {
    const float_rows *its = x;
    with_panel(its->x, its->x_stride, first, last, its->depth, product, panel, BFLOAT16);
}

static panel_work by_element(const paged_product *product, const void *x) {
    (void)product;
    return ((const float_rows *)x)->element == FLOAT32 ? with_panel_float32 : with_panel_bfloat16;
}

void paged_products(const void *x, int64_t x_stride, int64_t rows, int64_t depth, int32_t element, const paged_product *products,
                    int64_t count) {
    const float_rows its = {x, x_stride, depth, element};
    over_panels(&its, rows, products, count, by_element);
}

int64_t paged_columns(void) { return COLUMNS; }

int32_t paged_has_bfloat16(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

int32_t paged_has_tiles(void) {
#if HAS_AMX
    return may_use_tiles();
#else
    return 0;
#endif
}
