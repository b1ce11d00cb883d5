/* What a processor's matrix unit (AMX) needs before it multiplies: to be allowed, and the shape of its tiles.
 *
 * A processor may have it and Linux not allow it: that is asked once, when a library is loaded.
 */
#ifndef PAGED_AMX_H
#define PAGED_AMX_H

#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__) && LANES == 16
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

/* Rows of a tile, and columns of a tile of sums; numbers of bfloat16 in a row of one; its bytes, a line of the cache. */
#define TILE_ROWS 16
#define TILE_DEPTH 32
#define TILE_BYTES 64

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

/* GCC's own intrinsic does not say that all of it is read. */
INLINE void load_shape(const tile_shape *shape) { __asm__ volatile("ldtilecfg %0" ::"m"(*shape)); }

/* Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 what they are multiplied by. Of 0, 1, 4 the rows are `high`, of 2, 3, 5 `low`; where four
 * tiles of sums stand side by side, `low` is `high`. */
static inline void shape_tiles(size_t high, size_t low) {
    tile_shape shape = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shape.bytes[t] = TILE_BYTES;
        shape.rows[t] = t > 5 ? TILE_ROWS : t < 2 || t == 4 ? high : low;
    }
    load_shape(&shape);
}
#else
#define HAS_AMX 0
#endif

#endif
