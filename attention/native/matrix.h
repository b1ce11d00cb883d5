/* Products of bfloat16 by a processor's matrix unit (AMX): 16 rows with 16 columns over 32 numbers of the depth an instruction.
 *
 * The instruction sums the even numbers of the 32 in order, and the odd ones likewise, and adds both to what is there.
 * Subnormal numbers count as 0. So for one depth a result has one order of additions, whatever the rows. That order
 * differs from the one of fused additions: a machine with a matrix unit has to use its order for a single row, too.
 */
#ifndef PAGED_MATRIX_H
#define PAGED_MATRIX_H

#include "amx.h"

#if HAS_AMX && defined(__AVX512BF16__)
#define HAS_MATRIX 1

/* Rows and columns of a tile, and numbers of the depth in a row of it. */
#define SIDE TILE_ROWS
#define DEEP TILE_DEPTH

/* Rows of the upper and the lower tiles, as set in the processor; 0: not set. */
typedef struct {
    size_t high, low;
} matrix_shape;

static void shape_matrix(matrix_shape *now, size_t high, size_t low) {
    if (now->high == high && now->low == low) return;
    shape_tiles(high, low);
    *now = (matrix_shape){high, low};
}

static void release_matrix(matrix_shape *now) {
    _tile_release();
    *now = (matrix_shape){0, 0};
}

/* One or two tiles of rows with one or two of columns. */
INLINE void matrix_block(const int tall, const int wide, const bf16 *x, size_t x_stride, const int32_t *w, size_t w_stride, size_t depth, float *to,
                         size_t to_stride, const int first) {
    const bf16 *const below = x + SIDE * x_stride;
    float *const to_below = to + SIDE * to_stride;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, to, to_stride * 4);
        if (wide > 1) _tile_loadd(1, to + SIDE, to_stride * 4);
        if (tall > 1) _tile_loadd(2, to_below, to_stride * 4);
        if (tall > 1 && wide > 1) _tile_loadd(3, to_below + SIDE, to_stride * 4);
    }
    for (size_t p = 0; p < depth; p += DEEP) {
        const int32_t *const pairs = w + p / 2 * w_stride;
        _tile_loadd(4, x + p, x_stride * 2);
        _tile_loadd(6, pairs, w_stride * 4);
        _tile_dpbf16ps(0, 4, 6);
        if (wide > 1) {
            _tile_loadd(7, pairs + SIDE, w_stride * 4);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (tall > 1) {
            _tile_loadd(5, below + p, x_stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            if (wide > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, to, to_stride * 4);
    if (wide > 1) _tile_stored(1, to + SIDE, to_stride * 4);
    if (tall > 1) _tile_stored(2, to_below, to_stride * 4);
    if (tall > 1 && wide > 1) _tile_stored(3, to_below + SIDE, to_stride * 4);
}

/* to[rows, columns] = x[rows, depth] · w[depth / 2, columns, 2], on top of what is there unless this is `first`.
 * `columns` is a multiple of SIDE, `depth` of DEEP. */
INLINE void matrix_product(matrix_shape *shape, size_t rows, const bf16 *x, size_t x_stride, const int32_t *w, size_t w_stride, size_t depth,
                           float *to, size_t to_stride, size_t columns, const int first) {
    settle(x);
    settle(w);
    settle(to);
    for (size_t r = 0; r < rows; r += 2 * SIDE, x += 2 * SIDE * x_stride, to += 2 * SIDE * to_stride) {
        const size_t left = rows - r, high = left < SIDE ? left : SIDE, low = left < 2 * SIDE ? left - high : SIDE;
        shape_matrix(shape, high, low ? low : high);
        for (size_t c = 0; c < columns; c += 2 * SIDE) {
            const int is_wide = c + SIDE < columns;
            if (low && is_wide)
                matrix_block(2, 2, x, x_stride, w + c, w_stride, depth, to + c, to_stride, first);
            else if (low)
                matrix_block(2, 1, x, x_stride, w + c, w_stride, depth, to + c, to_stride, first);
            else if (is_wide)
                matrix_block(1, 2, x, x_stride, w + c, w_stride, depth, to + c, to_stride, first);
            else
                matrix_block(1, 1, x, x_stride, w + c, w_stride, depth, to + c, to_stride, first);
        }
    }
}

/* LANES numbers that are rounded to bfloat16, to the nearest, halves to even. */
INLINE vec rounded(vec v) { return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16); }

/* LANES numbers as bfloat16, to the nearest, halves to even. */
INLINE void store_narrow(bf16 *to, vec v) {
    *(__m256i_u *)to = (__m256i)_mm512_cvtneps_pbh((__m512)v);
}
#else
#define HAS_MATRIX 0
#endif
#endif
