/* Products of bfloat16 by AMX: an instruction multiplies 16 rows by 16 columns over 32 numbers of the depth.
 *
 * It sums the even numbers of the 32 in order, the odd ones likewise, and adds both to the sums before. So a result has one order of additions for
 * one depth, whatever the rows. Instructions of pairs have another order, so with AMX even a single row is computed by it. Weights are packed as
 * AMX reads them.
 */
#ifndef PAGED_TILES_H
#define PAGED_TILES_H

#include "amx.h"

#if HAS_AMX

/* Fetches lines `begin` to `end` - 1 into the cache. */
INLINE void fetch(const char *lines, int begin, int end) {
    UNROLL for (int i = begin; i < end; i++) __builtin_prefetch(lines + i * TILE_BYTES);
}

/* Load the sums of four tiles from memory, and store them. */
#define LOAD_SUMS(a, b, c, d)              \
    do {                                   \
        _tile_loadd(0, a, to_stride * 4);  \
        _tile_loadd(1, b, to_stride * 4);  \
        _tile_loadd(2, c, to_stride * 4);  \
        _tile_loadd(3, d, to_stride * 4);  \
    } while (0)
#define STORE_SUMS(a, b, c, d)             \
    do {                                   \
        _tile_stored(0, a, to_stride * 4); \
        _tile_stored(1, b, to_stride * 4); \
        _tile_stored(2, c, to_stride * 4); \
        _tile_stored(3, d, to_stride * 4); \
    } while (0)

INLINE void zero_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Multiplies up to 16 rows by a panel of 64 columns; x [rows, depth], w [depth / 2, 64, 2]. */
INLINE void tiles_aside(const bf16 *x, size_t x_stride, const bf16 *w, size_t depth, float *to, size_t to_stride, int first) {
    if (first)
        zero_sums();
    else
        LOAD_SUMS(to, to + 16, to + 32, to + 48);
    for (size_t p = 0; p < depth; p += TILE_DEPTH) {
        const bf16 *panel = w + p * COLUMNS;
        _tile_loadd(4, x + p, x_stride * 2);
        _tile_loadd(6, panel, COLUMNS * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + 32, COLUMNS * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, panel + 64, COLUMNS * 4);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, panel + 96, COLUMNS * 4);
        _tile_dpbf16ps(3, 4, 7);
    }
    STORE_SUMS(to, to + 16, to + 32, to + 48);
}

/* Multiplies 17 to 32 rows by half a panel. `is_new` fetches the other half, too: memory is fast only if read line after line. */
INLINE void tiles_square(const bf16 *x, size_t x_stride, const bf16 *w, size_t depth, float *to, size_t to_stride, int first,
                         int is_new) {
    float *const below = to + TILE_ROWS * to_stride;
    if (first)
        zero_sums();
    else
        LOAD_SUMS(to, to + 16, below, below + 16);
    for (size_t p = 0; p < depth; p += TILE_DEPTH) {
        const char *rows = (const char *)(w + p * COLUMNS);
        if (is_new)
            for (int i = 0; i < TILE_ROWS; i++) fetch(rows + i * 4 * COLUMNS, 2, 4);
        _tile_loadd(4, x + p, x_stride * 2);
        _tile_loadd(6, rows, COLUMNS * 4);
        _tile_loadd(7, rows + TILE_BYTES, COLUMNS * 4);
        _tile_loadd(5, x + TILE_ROWS * x_stride + p, x_stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    STORE_SUMS(to, to + 16, below, below + 16);
}

/* Multiplies any number of rows by a panel; depth is a multiple of TILE_DEPTH. */
static void whole_tiles(size_t rows, const bf16 *x, size_t x_stride, const bf16 *w, size_t depth, float *to, size_t to_stride, int first) {
    size_t r = 0, high = 0, low = 0;
    settle(x);
    settle(w);
    for (; r < rows; r += 2 * TILE_ROWS) {
        const size_t left = rows - r, now_high = left < TILE_ROWS ? left : TILE_ROWS;
        const size_t now_low = left <= TILE_ROWS ? now_high : left < 2 * TILE_ROWS ? left - TILE_ROWS : TILE_ROWS;
        if (now_high != high || now_low != low) shape_tiles(high = now_high, low = now_low);
        const bf16 *row = x + r * x_stride;
        float *sums = to + r * to_stride;
        if (left <= TILE_ROWS)
            tiles_aside(row, x_stride, w, depth, sums, to_stride, first);
        else
            for (int half = 0; half < 2; half++)
                tiles_square(row, x_stride, w + half * COLUMNS, depth, sums + half * COLUMNS / 2, to_stride, first, !half && !r);
    }
    _tile_release();
}

/* Multiplies rows by a panel, as pair_tile does; the rest of the depth, less than a tile, is padded with 0. */
INLINE void tiles(size_t rows, const bf16 *x, size_t x_stride, const bf16 *w, size_t depth, float *to, size_t to_stride, int first) {
    const size_t whole = depth - depth % TILE_DEPTH, left = depth - whole;
    if (whole) whole_tiles(rows, x, x_stride, w, whole, to, to_stride, first);
    if (!left) return;
    bf16 filled_w[TILE_DEPTH * COLUMNS] = {0}, filled_x[2 * TILE_ROWS * TILE_DEPTH] = {0};
    memcpy(filled_w, w + whole * COLUMNS, left * COLUMNS * sizeof(bf16));
    for (size_t r = 0; r < rows; r += 2 * TILE_ROWS) {
        const size_t count = rows - r < 2 * TILE_ROWS ? rows - r : 2 * TILE_ROWS;
        for (size_t i = 0; i < count; i++) memcpy(filled_x + i * TILE_DEPTH, x + (r + i) * x_stride + whole, left * sizeof(bf16));
        whole_tiles(count, filled_x, TILE_DEPTH, filled_w, TILE_DEPTH, to + r * to_stride, to_stride, first && !whole);
    }
}
#endif
#endif
