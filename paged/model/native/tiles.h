/* Products of bfloat16 by AMX: 16 rows with 16 columns over 32 numbers of the depth an instruction.
 *
 * The instruction sums the even numbers of the 32 in order, the odd ones likewise, and adds both to what is there. So a result has one order of
 * additions for one depth, whatever the rows, but another than the instructions of pairs have: where AMX is there, it computes one row, too.
 * Packed weights lie as AMX reads them. A processor may have it and Linux not allow it: that is asked once, when the library is loaded.
 */
#ifndef PAGED_TILES_H
#define PAGED_TILES_H

#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__) && LANES == 16
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

/* Rows of a tile, and numbers of the depth in a row of it. */
#define TILE_ROWS 16
#define TILE_DEPTH 32

/* Bytes in a row of a tile: a line of the cache. */
#define TILE_BYTES 64

/* Lines `begin` to `end` - 1 into the cache. */
INLINE void fetch(const char *lines, int begin, int end) {
    UNROLL for (int i = begin; i < end; i++) __builtin_prefetch(lines + i * TILE_BYTES);
}

/* Linux' ARCH_REQ_XCOMP_PERM, and the feature that it names XFEATURE_XTILEDATA. */
static int may_use_tiles(void) {
    static int may = -1;
    if (may < 0) may = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return may;
}
__attribute__((constructor)) static void ask_for_tiles(void) { may_use_tiles(); }

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shape;

/* Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights. Of 0, 1, 4 the rows are `high`, of 2, 3, 5 `low`; where four tiles
 * of sums stand side by side, `low` is `high`. */
static void shape_tiles(size_t high, size_t low) {
    tile_shape shape = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shape.bytes[t] = 64;
        shape.rows[t] = t > 5 ? TILE_ROWS : t < 2 || t == 4 ? high : low;
    }
    settle(&shape);
    _tile_loadconfig(&shape);
}

/* The sums of four tiles, from memory and back to it. */
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

/* Up to 16 rows with a panel of 64 columns; x [rows, depth], w [depth / 2, 64, 2]. */
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

/* 17 to 32 rows with half a panel. `is_new` fetches the other half, too: memory is read fast only line after line. */
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

/* Rows [rows], any number, with a panel; depth is a multiple of TILE_DEPTH. */
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

/* Rows with a panel, as pair_tile: what no whole tile has of the depth is filled up with 0. */
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
#else
#define HAS_TILES 0
#endif
#endif
