/* Attention over K and V that lie in blocks, for sequences with one token or with many, in one call.
 *
 * A row is one query head of one token. A piece of work has up to MOST_ROWS rows that read the same K and V. It goes
 * over its sequence in tiles of TILE positions, which always begin at multiples of TILE. K is turned, so that scores
 * are a product. V is multiplied where it lies in the cache. The running maximum and sum are FlashAttention's (Dao et
 * al., 2022). A tile that a row does not see changes no bit: its weights are exactly 0, and earlier sums are multiplied
 * by exactly 1. So a token's result depends on its own context alone: not on other sequences, on how its prompt was
 * cut, on where its blocks lie, or on the number of threads.
 *
 * What lies behind a sequence's end, or before every row's window, is never read: a freed block may hold anything.
 */
#include "attention.h"

#include "matrix.h"
#include "quantised.h"

#define TILE 64
#define MOST_ROWS 96
#define LOWEST -1e30f
/* With so many sequences every thread has some. */
#define MANY 16

#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#if LANES == 16
#define LOW(a, b) SHUFFLED(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) SHUFFLED(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LANES == 8
#define LOW(a, b) SHUFFLED(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) SHUFFLED(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define LOW(a, b) SHUFFLED(a, b, 0, 4, 1, 5)
#define HIGH(a, b) SHUFFLED(a, b, 2, 6, 3, 7)
#endif

/* A head's size, rounded up to a multiple of LANES and of the codes in a word. */
INLINE size_t up(size_t size) {
    const size_t multiple = LANES < 8 ? 8 : LANES;
    return (size + multiple - 1) / multiple * multiple;
}

/* The same for K and queries; a matrix unit takes multiples of 32. */
INLINE size_t up_keys(size_t size, int by_matrix) { return by_matrix ? (size + 31) / 32 * 32 : up(size); }

/* The offsets in bytes of K and V of a tile's positions, and of their scales, if any. */
typedef struct {
    size_t keys[TILE], values[TILE], key_scales[TILE], value_scales[TILE];
} places;

/* Memory of one piece of work; rows that read one head of K and V are together. */
typedef struct {
    float queries[MOST_ROWS * PAGED_MOST_HEAD_SIZE];
    float totals[MOST_ROWS * PAGED_MOST_HEAD_SIZE];
    float keys[PAGED_MOST_HEAD_SIZE * TILE]; /* turned: [head size, TILE] */
    float values[TILE * PAGED_MOST_HEAD_SIZE];
    float weights[MOST_ROWS * TILE];
    vec weight[MOST_ROWS];
    /* LANES more, because a vector of rows is read from wherever a head's rows begin. */
    float highest[MOST_ROWS + LANES], now[MOST_ROWS + LANES], kept[MOST_ROWS + LANES];
    float key_scales[TILE], value_scales[TILE];
    places at[2]; /* of this tile's positions and of the next one's */
#if HAS_MATRIX
    matrix_shape shape;
#endif
} room;

/* LANES elements of a row from `at` on, 0 behind its end. */
INLINE vec part_of(const void *row, size_t at, size_t length, int stored) {
    if (at + LANES <= length) return load_stored(row, at, stored);
    float part[LANES] = {0};
    for (size_t i = 0; at + i < length; i++) part[i] = load_stored_one(row, at + i, stored);
    return *(vec *)part;
}

/* Transpose LANES rows of LANES numbers: log2(LANES) perfect shuffles of the rows. */
INLINE void turn(vec *lines) {
    vec mixed[LANES];
    UNROLL for (int round = 1; round < LANES; round *= 2) {
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = LOW(lines[i], lines[i + LANES / 2]);
            mixed[2 * i + 1] = HIGH(lines[i], lines[i + LANES / 2]);
        }
        UNROLL for (int i = 0; i < LANES; i++) lines[i] = mixed[i];
    }
}

/* The rows of a tile, and those of the next tile, which are prefetched line by line while this one is computed. They
 * lie too far apart for the processor to guess, and a prefetch of all at once would have to be waited for. */
typedef struct {
    const char *now[TILE], *next[TILE];
} tile_rows;

/* Write the rows of `count` positions, `bytes` each, as words [words, TILE]: 0 behind a row's end, arbitrary behind the
 * last LANES positions. */
static void turn_words(const tile_rows *rows, size_t count, size_t bytes, size_t words, int32_t *to) {
    for (size_t first = 0; first < count; first += LANES)
        for (size_t w = 0; w < words; w += LANES) {
            vec lines[LANES];
            UNROLL for (int i = 0; i < LANES; i++) __builtin_prefetch(rows->next[first + i] + w * 4, 0, 3);
            if (first + LANES <= count)
                UNROLL for (int i = 0; i < LANES; i++) lines[i] = (vec)words_of(rows->now[first + i], w * 4, bytes);
            else
                for (int i = 0; i < LANES; i++) lines[i] = first + i < count ? (vec)words_of(rows->now[first + i], w * 4, bytes) : (vec){0};
            turn(lines);
            UNROLL for (int i = 0; i < LANES; i++) *(vec *)(to + (w + i) * TILE + first) = lines[i];
        }
}

/* Unpack turned words to turned codes, [depth, TILE], in place: the last ones first, because codes need more room. */
INLINE void unpack_words(float *to, size_t depth, int stored) {
    const size_t codes = codes_of(stored);
    for (size_t w = (depth + codes - 1) / codes; w-- > 0;)
        for (size_t first = 0; first < TILE; first += LANES) {
            const ivec words = *(const ivec *)(to + w * TILE + first);
            UNROLL for (size_t i = 0; i < codes; i++) *(vec *)(to + (w * codes + i) * TILE + first) = unpacked(words, i, stored);
        }
}

/* Multiply few rows with K in turned words, which are unpacked on the fly: to[rows, TILE]. The sums are those that
 * `product` takes of turned codes. */
INLINE void few_scores(const int rows, const int32_t *words, size_t count, size_t depth, const float *x, float *to, int stored) {
    const size_t codes = codes_of(stored);
    for (size_t first = 0; first < count; first += COLUMNS) {
        vec sums[ROWS][WIDE];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < WIDE; j++) sums[r][j] = (vec){0};
        for (size_t w = 0; w < depth / codes; w++)
            UNROLL for (size_t i = 0; i < codes; i++) {
                vec line[WIDE];
                UNROLL for (int j = 0; j < WIDE; j++) line[j] = unpacked(*(const ivec *)(words + w * TILE + first + j * LANES), i, stored);
                UNROLL for (int r = 0; r < rows; r++) {
                    const vec factor = spread(x[r * depth + w * codes + i]);
                    UNROLL for (int j = 0; j < WIDE; j++) sums[r][j] = fused(factor, line[j], sums[r][j]);
                }
            }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < WIDE; j++) *(vec *)(to + r * TILE + first + j * LANES) = sums[r][j];
    }
}

/* K of `count` rows as [depth, TILE], where depth is up(head_size); 0 behind the rows. */
INLINE void turn_keys(const tile_rows *keys, size_t count, size_t head_size, size_t depth, float *to, enum element element) {
    const char *const *rows = keys->now;
    const size_t bytes = bytes_of(element);
    for (size_t first = 0; first < TILE; first += LANES)
        for (size_t d = 0; d < depth; d += LANES) {
            vec lines[LANES];
            if (d * bytes % 64 == 0)
                UNROLL for (int i = 0; i < LANES; i++) __builtin_prefetch(keys->next[first + i] + d * bytes, 0, 3);
            if (first + LANES <= count && d + LANES <= head_size)
                UNROLL for (int i = 0; i < LANES; i++) lines[i] = load(rows[first + i], d, element);
            else
                for (int i = 0; i < LANES; i++)
                    lines[i] = first + i < count ? part_of(rows[first + i], d, head_size, (int)element) : (vec){0};
            turn(lines);
            UNROLL for (int i = 0; i < LANES; i++) *(vec *)(to + (d + i) * TILE + first) = lines[i];
        }
}

#if HAS_MATRIX
/* Whether rows are so few that a matrix unit takes longer: it has to wait until codes are paired. */
INLINE int is_few(size_t rows, int stored) { return IS_QUANTISED(stored) && rows <= ROWS; }

/* Put two numbers that bfloat16 holds, as it holds every code, in a word. */
INLINE ivec paired(vec low, vec high) { return (ivec)(((uvec)low >> 16) | ((uvec)high & 0xffff0000u)); }

/* Unpack turned words to turned pairs of codes, [depth / 2, TILE], as unpack_words does. */
INLINE void unpack_pairs(int32_t *to, size_t depth, int stored) {
    const int codes = codes_of(stored);
    for (size_t w = depth / codes; w-- > 0;)
        for (size_t first = 0; first < TILE; first += LANES) {
            const ivec words = *(const ivec *)(to + w * TILE + first);
            UNROLL for (int i = 0; i < codes; i += 2)
                *(ivec *)(to + (w * codes + i) / 2 * TILE + first) = paired(unpacked(words, i, stored), unpacked(words, i + 1, stored));
        }
}

/* V as pairs of positions, [TILE / 2, depth]. */
INLINE void pair_values(const tile_rows *values, size_t size, size_t depth, int32_t *to, int stored) {
    for (size_t j = 0; j < TILE; j += 2)
        for (size_t d = 0; d < depth; d += LANES) {
            const size_t line = row_bytes(d, stored);
            if (line % 64 == 0) {
                __builtin_prefetch(values->next[j] + line, 0, 3);
                __builtin_prefetch(values->next[j + 1] + line, 0, 3);
            }
            *(ivec *)(to + j / 2 * depth + d) = paired(part_of(values->now[j], d, size, stored), part_of(values->now[j + 1], d, size, stored));
        }
}

/* A row's query, not scaled, as bfloat16, or as floats of that. */
INLINE void narrow_query(const char *query, size_t size, size_t depth, enum element element, void *to, int is_few, int stored) {
    float line[PAGED_MOST_HEAD_SIZE];
    for (size_t d = 0; d < depth; d += LANES) *(vec *)(line + d) = part_of(query, d, size, (int)element);
    if (IS_QUANTISED(stored)) transform(line, size);
    for (size_t d = 0; d < depth; d += LANES)
        if (is_few)
            *(vec *)((float *)to + d) = rounded(*(const vec *)(line + d));
        else
            store_narrow((bf16 *)to + d, *(const vec *)(line + d));
}

/* Add the sums of the even and of the odd numbers of DEEP to earlier sums, in a matrix unit's order. */
#define ADD_BOTH(rows)                    \
    UNROLL for (int r = 0; r < rows; r++) \
        UNROLL for (int j = 0; j < 2; j++) sums[r][j] += both[0][r][j] + both[1][r][j]

/* Scores of few rows with K in turned words, with the same bits as matrix_scores and without its wait. x are floats. */
INLINE void few_matrix_scores(const int rows, const int32_t *words, size_t count, size_t depth, const float *x, float *to, int stored) {
    const size_t codes = codes_of(stored);
    for (size_t first = 0; first < count; first += 2 * LANES) {
        vec sums[ROWS][2] = {0};
        for (size_t part = 0; part < depth; part += DEEP) {
            vec both[2][ROWS][2] = {0};
            for (size_t d = part; d < part + DEEP; d += codes)
                UNROLL for (size_t i = 0; i < codes; i++) {
                    vec line[2];
                    UNROLL for (int j = 0; j < 2; j++) line[j] = unpacked(*(const ivec *)(words + d / codes * TILE + first + j * LANES), i, stored);
                    UNROLL for (int r = 0; r < rows; r++) {
                        const vec factor = spread(x[r * depth + d + i]);
                        UNROLL for (int j = 0; j < 2; j++) both[i % 2][r][j] = fused(factor, line[j], both[i % 2][r][j]);
                    }
                }
            ADD_BOTH(rows);
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < 2; j++) *(vec *)(to + r * TILE + first + j * LANES) = sums[r][j];
    }
}

/* Totals of few rows, from `column` on, with the same bits as matrix_totals. x are floats that bfloat16 holds. */
INLINE void few_matrix_totals(const int rows, const float *x, const tile_rows *values, size_t column, float *to, size_t to_stride,
                              const float *kept, int stored) {
    vec sums[ROWS][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < 2; j++) sums[r][j] = *(const vec *)(to + r * to_stride + column + j * LANES) * kept[r];
    for (size_t part = 0; part < TILE; part += DEEP) {
        vec both[2][ROWS][2] = {0};
        for (size_t p = part; p < part + DEEP; p += 2)
            UNROLL for (int odd = 0; odd < 2; odd++) {
                vec line[2];
                UNROLL for (int j = 0; j < 2; j++) {
                    const size_t at = row_bytes(column + j * LANES, stored);
                    if (at % 64 == 0) __builtin_prefetch(values->next[p + odd] + at, 0, 3);
                    line[j] = load_stored(values->now[p + odd], column + j * LANES, stored);
                }
                UNROLL for (int r = 0; r < rows; r++) {
                    const vec factor = spread(x[r * TILE + p + odd]);
                    UNROLL for (int j = 0; j < 2; j++) both[odd][r][j] = fused(factor, line[j], both[odd][r][j]);
                }
            }
        ADD_BOTH(rows);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < 2; j++) *(vec *)(to + r * to_stride + column + j * LANES) = sums[r][j];
}

/* Scores of rows with a tile of K, not multiplied by the scale. */
INLINE void matrix_scores(const paged_attention_call *call, room *room, size_t own, size_t rows, const tile_rows *keys, size_t count, size_t depth,
                          float *weights, int stored) {
    int32_t *const words = (int32_t *)room->keys;
    turn_words(keys, count, row_bytes(call->key_size, stored), IS_QUANTISED(stored) ? depth / codes_of(stored) : depth / 2, words);
    if (is_few(rows, stored)) {
        WITH_CONSTANT(rows, few_matrix_scores, words, count, depth, room->queries + own * depth, weights, stored)
        return;
    }
    if (IS_QUANTISED(stored)) unpack_pairs(words, depth, stored);
    matrix_product(&room->shape, rows, (const bf16 *)room->queries + own * depth, depth, words, TILE, depth, weights, TILE, TILE, 1);
}

/* Add a weighted tile of V to `kept` times the totals. Weights are narrowed in place. */
INLINE void matrix_totals(room *room, size_t rows, const tile_rows *values, size_t size, size_t depth, float *weights, float *totals,
                          const float *kept, int stored) {
    if (is_few(rows, stored) && size % (2 * LANES) == 0) {
        for (size_t i = 0; i < rows * TILE; i += LANES) *(vec *)(weights + i) = rounded(*(const vec *)(weights + i));
        for (size_t c = 0; c < size; c += 2 * LANES)
            WITH_CONSTANT(rows, few_matrix_totals, weights, values, c, totals, depth, kept, stored)
        return;
    }
    for (size_t r = 0; r < rows; r++) {
        vec line[TILE / LANES];
        UNROLL for (int j = 0; j < TILE / LANES; j++) line[j] = *(const vec *)(weights + r * TILE + j * LANES);
        UNROLL for (int j = 0; j < TILE / LANES; j++) store_narrow((bf16 *)(weights + r * TILE) + j * LANES, line[j]);
        /* Times 1 changes nothing. */
        if (kept[r] != 1)
            for (size_t d = 0; d < depth; d += LANES) *(vec *)(totals + r * depth + d) *= kept[r];
    }
    pair_values(values, size, depth, (int32_t *)room->values, stored);
    /* The whole tile, with zeros behind its end: so a number has one order of additions, and 0 has one sign. */
    matrix_product(&room->shape, rows, (const bf16 *)weights, 2 * TILE, (const int32_t *)room->values, depth, TILE, totals, depth, depth, 0);
}
#endif

/* `kernel`, for the rows that are left from r on, at column c: over the widest tiles that fit, until `columns`, a
 * multiple of LANES, are done. */
#define OVER_COLUMNS(columns, left, kernel, ...)                                                        \
    for (size_t c = 0; c < (columns);) {                                                                \
        if ((columns) - c >= COLUMNS) {                                                                 \
            WITH_CONSTANT(left, kernel, WIDE, __VA_ARGS__)                                              \
            c += COLUMNS;                                                                               \
        } else if ((columns) - c >= 2 * LANES) {                                                        \
            WITH_CONSTANT(left, kernel, 2, __VA_ARGS__)                                                 \
            c += 2 * LANES;                                                                             \
        } else {                                                                                        \
            WITH_CONSTANT(left, kernel, 1, __VA_ARGS__)                                                 \
            c += LANES;                                                                                 \
        }                                                                                               \
    }

/* to[rows, columns] = x · w, on top of `kept` [rows] times what is there, if that is given. `columns` is a multiple of
 * LANES. */
INLINE void product(size_t rows, const float *x, size_t x_stride, const float *w, size_t w_stride, size_t depth, float *to,
                    size_t to_stride, size_t columns, const float *kept) {
    for (size_t r = 0; r < rows; r += ROWS)
        OVER_COLUMNS(columns, rows - r, tile, x + r * x_stride, x_stride, w + c, w_stride, depth, to + r * to_stride + c, to_stride, !kept,
                     kept ? kept + r : NULL)
}

/* As `tile`, of rows that lie anywhere, from `column` on: no row of them is read twice. */
INLINE void scattered_tile(const int rows, const int wide, const float *x, const tile_rows *w, size_t column, size_t depth, float *to,
                           size_t to_stride, const float *kept, int stored) {
    vec sums[ROWS][WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < wide; j++) sums[i][j] = *(const vec *)(to + i * to_stride + column + j * LANES) * kept[i];
    for (size_t p = 0; p < depth; p++) {
        vec row[WIDE];
        UNROLL for (int j = 0; j < wide; j++) {
            const size_t line = row_bytes(column + j * LANES, stored);
            if (line % 64 == 0) __builtin_prefetch(w->next[p] + line, 0, 3);
            row[j] = load_stored(w->now[p], column + j * LANES, stored);
        }
        UNROLL for (int i = 0; i < rows; i++) {
            const vec factor = spread(x[i * TILE + p]);
            UNROLL for (int j = 0; j < wide; j++) sums[i][j] = fused(factor, row[j], sums[i][j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < wide; j++) *(vec *)(to + i * to_stride + column + j * LANES) = sums[i][j];
}

/* Cap a row's scores in a tile, and hide what the row does not see: all but positions low to high - 1 of the tile. */
INLINE void mask(float *scores, float low, float high, float soft_cap) {
    UNROLL for (int j = 0; j < TILE; j += LANES) {
        vec score = *(vec *)(scores + j), place = rising() + (float)j;
        if (soft_cap != 0) /* tanh x = 1 - 2 / (e^2x + 1) */
            score = (1.0f - 2.0f / (exp_of(score * (2.0f / soft_cap)) + 1.0f)) * soft_cap;
        *(vec *)(scores + j) = chosen((ivec)(place < high) & (ivec)(place >= low), score, spread(-__builtin_inff()));
    }
}

INLINE float highest_of(const float *scores) {
    vec most = *(const vec *)scores;
    UNROLL for (int j = LANES; j < TILE; j += LANES) most = larger(most, *(const vec *)(scores + j));
    return most_of(most);
}

/* Turn a row's scores in a tile into weights; return their sum in LANES parts. */
INLINE vec weigh(float *scores, float highest) {
    vec sum = {0};
    UNROLL for (int j = 0; j < TILE; j += LANES) {
        vec part = exp_below(*(vec *)(scores + j) - highest);
        *(vec *)(scores + j) = part;
        sum += part;
    }
    return sum;
}

/* Multiply each number of a tile's rows by the factor of its position. */
INLINE void times(float *weights, size_t rows, const float *factors) {
    for (size_t r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < TILE; j += LANES) *(vec *)(weights + r * TILE + j) *= *(const vec *)(factors + j);
}

/* Where K and V of positions first to last - 1 of a sequence lie, from its block table. */
INLINE void find(const paged_attention_call *call, const int32_t *table, size_t first, size_t last, places *at, int stored) {
    const size_t key_row = call->kv_heads * row_bytes(call->key_size, stored), value_row = call->kv_heads * row_bytes(call->value_size, stored);
    const size_t scales_row = call->kv_heads * sizeof(bf16);
    const size_t block_size = call->block_size, step = call->column_stride;
    size_t column = first / block_size * step, offset = first % block_size;
    for (size_t j = 0; j < last - first; j++) {
        const size_t key_page = (size_t)table[column + call->key_part] * call->page_bytes;
        const size_t value_page = (size_t)table[column + call->value_part] * call->page_bytes;
        at->keys[j] = key_page + offset * key_row;
        at->values[j] = value_page + offset * value_row;
        if (IS_QUANTISED(stored)) {
            at->key_scales[j] = key_page + offset * scales_row;
            at->value_scales[j] = value_page + offset * scales_row;
            __builtin_prefetch(call->key_scales + at->key_scales[j], 0, 3);
            __builtin_prefetch(call->value_scales + at->value_scales[j], 0, 3);
        }
        if (++offset == block_size) {
            offset = 0;
            column += step;
        }
    }
}

/* The first position that a token sees; the token is number `seen` of its sequence, counted from 1. */
INLINE size_t first_seen(const paged_attention_call *call, size_t seen) {
    const size_t window = call->window, chunk = call->chunk;
    size_t first = window && seen > window ? seen - window : 0;
    if (chunk && (seen - 1) / chunk * chunk > first) first = (seen - 1) / chunk * chunk;
    return first;
}

/* Scores of rows with a tile of K; codes are not scaled. */
INLINE void scores(const paged_attention_call *call, room *room, size_t own, size_t rows, const tile_rows *keys, size_t count, size_t key_depth,
                   float *weights, int stored) {
    int32_t *words = (int32_t *)room->keys;
    if (IS_QUANTISED(stored))
        turn_words(keys, count, row_bytes(call->key_size, stored), (key_depth + codes_of(stored) - 1) / codes_of(stored), words);
    if (IS_QUANTISED(stored) && rows <= ROWS) {
        WITH_CONSTANT(rows, few_scores, words, count, key_depth, room->queries + own * key_depth, weights, stored)
    } else {
        if (IS_QUANTISED(stored))
            unpack_words(room->keys, key_depth, stored);
        else
            turn_keys(keys, count, call->key_size, key_depth, room->keys, (enum element)stored);
        product(rows, room->queries + own * key_depth, key_depth, room->keys, TILE, key_depth, weights, TILE, TILE, NULL);
    }
}

/* Add a tile of positions to the results of the `rows` rows of one head of K and V, which begin at row `own`. `keys`
 * and `values` are of `count` positions. */
INLINE void add_tile(const paged_attention_call *call, room *room, size_t own, size_t rows, const tile_rows *keys,
                     const tile_rows *values, size_t count, size_t first, size_t before, size_t c, int is_whole,
                     int stored, int by_matrix) {
    const size_t size = call->value_size, depth = up(size), key_depth = up_keys(call->key_size, by_matrix);
    const size_t group = call->heads / call->kv_heads;
    float *weights = room->weights + own * TILE, *totals = room->totals + own * depth, *kept = room->kept + own;
#if HAS_MATRIX
    if (by_matrix) matrix_scores(call, room, own, rows, keys, count, key_depth, weights, stored);
#endif
    if (!by_matrix) scores(call, room, own, rows, keys, count, key_depth, weights, stored);
    if (IS_QUANTISED(stored) || by_matrix) times(weights, rows, room->key_scales);
    if (!is_whole || call->soft_cap != 0)
        for (size_t r = 0; r < rows; r++) {
            const size_t seen = before + (first + r) / group + 1, least = first_seen(call, seen);
            float high = seen < c ? 0 : (float)(seen - c), low = least > c ? (float)(least - c) : 0;
            mask(weights + r * TILE, low, high, call->soft_cap);
        }
    for (size_t r = 0; r < rows; r++) room->now[own + r] = highest_of(weights + r * TILE);
    for (size_t r = 0; r < rows; r += LANES) {
        /* A NaN score gives a NaN weight and result. What the vector computes of the next head's rows is not used. */
        vec highest = *(vec *)(room->highest + own + r), now = larger(*(vec *)(room->now + own + r), highest);
        *(vec *)(kept + r) = exp_below(highest - now);
        *(vec *)(room->now + own + r) = now;
    }
    for (size_t r = 0; r < rows; r++) {
        room->highest[own + r] = room->now[own + r];
        room->weight[own + r] = room->weight[own + r] * kept[r] + weigh(weights + r * TILE, room->highest[own + r]);
    }
    if (IS_QUANTISED(stored)) times(weights, rows, room->value_scales);
#if HAS_MATRIX
    if (by_matrix) {
        matrix_totals(room, rows, values, size, depth, weights, totals, kept, stored);
        return;
    }
#endif
    if (rows <= 2 * ROWS && size == depth) {
        for (size_t r = 0; r < rows; r += ROWS)
            OVER_COLUMNS(size, rows - r, scattered_tile, weights + r * TILE, values, c, count, totals + r * depth, depth, kept + r, stored)
        return;
    }
    for (size_t j = 0; j < count; j++) __builtin_prefetch(values->next[j], 0, 3);
    for (size_t j = 0; j < count; j++)
        for (size_t d = 0; d < depth; d += LANES) *(vec *)(room->values + j * depth + d) = part_of(values->now[j], d, size, stored);
    product(rows, weights, TILE, room->values, depth, count, totals, depth, depth, kept);
}

/* Compute rows `first` to `last` - 1 of sequence i for heads `head` to `behind` - 1 of K and V. A row is a token of
 * this step and one of the query heads that read a head of K and V. Heads take turns at each tile, because what they
 * read lies side by side. */
INLINE void attend(const paged_attention_call *call, size_t i, size_t head, size_t behind, size_t first, size_t last, room *room,
                   int stored, int by_matrix) {
    const size_t key_size = call->key_size, size = call->value_size;
    const size_t key_bytes = row_bytes(key_size, stored), value_bytes = row_bytes(size, stored);
    const size_t key_depth = up_keys(key_size, by_matrix), depth = up(size);
    const size_t group = call->heads / call->kv_heads, rows = last - first;
    const size_t start = call->query_start[i], before = call->seq_lens[i] - (call->query_start[i + 1] - start);
    const int32_t *table = call->tables + i * call->table_stride;
    const size_t end = before + (last - 1) / group + 1, earliest = before + first / group + 1;
    const size_t begin = first_seen(call, earliest);

    for (size_t r = 0; r < rows * (behind - head); r++) {
        size_t token = start + (first + r % rows) / group, its = (head + r / rows) * group + (first + r % rows) % group;
        const size_t at = token * call->query_stride + its * key_size;
        const char *query = (const char *)call->queries + at * bytes_of(call->query_element);
#if HAS_MATRIX
        if (by_matrix) {
            void *const to = is_few(rows, stored) ? (void *)(room->queries + r * key_depth) : (bf16 *)room->queries + r * key_depth;
            narrow_query(query, key_size, key_depth, call->query_element, to, is_few(rows, stored), stored);
        }
#endif
        if (!by_matrix) {
            for (size_t d = 0; d < key_depth; d += LANES)
                *(vec *)(room->queries + r * key_depth + d) = call->scale * part_of(query, d, key_size, call->query_element);
            if (IS_QUANTISED(stored)) transform(room->queries + r * key_depth, key_size);
        }
        room->highest[r] = call->sinks ? call->sinks[its] : LOWEST;
        room->weight[r] = (vec){0};
        room->weight[r][0] = call->sinks ? 1 : 0;
    }
    memset(room->totals, 0, rows * (behind - head) * depth * sizeof(float));
    /* Begin at the first position that any row sees: nothing before it is read, and nothing behind it is skipped. */
    size_t from = begin, upto = begin / TILE * TILE + TILE < end ? begin / TILE * TILE + TILE : end;
    find(call, table, from, upto, &room->at[0], stored);
    for (int side = 0; from < end; side = !side) {
        const size_t c = from / TILE * TILE, count = upto - c, skipped = from - c;
        const size_t next = upto, behind_next = next + TILE < end ? next + TILE : end;
        if (next < end) find(call, table, next, behind_next, &room->at[!side], stored);
        /* Every row sees the whole tile if the last row's window begins, and the first row's ends, outside of it. */
        const int is_whole = c + TILE <= earliest && first_seen(call, end) <= c;
        for (size_t h = head; h < behind; h++) {
            static const float nothing[PAGED_MOST_HEAD_SIZE];
            tile_rows keys, values;
            const int is_last = h + 1 == behind;
            const places *now = &room->at[side], *later = &room->at[is_last ? !side : side];
            const size_t known = is_last ? behind_next - next : upto - from, other = is_last ? head : h + 1;
            for (size_t j = 0; j < TILE; j++) {
                const int is_read = j >= skipped && j < count;
                keys.now[j] = values.now[j] = (const char *)nothing;
                if (is_read) {
                    keys.now[j] = call->keys + now->keys[j - skipped] + h * key_bytes;
                    values.now[j] = call->values + now->values[j - skipped] + h * value_bytes;
                }
                if (by_matrix && !IS_QUANTISED(stored)) room->key_scales[j] = call->scale;
                if (IS_QUANTISED(stored)) {
                    const size_t of = h * sizeof(bf16);
                    room->key_scales[j] = is_read ? as_float(*(const bf16 *)(call->key_scales + now->key_scales[j - skipped] + of)) : 0;
                    room->value_scales[j] = is_read ? as_float(*(const bf16 *)(call->value_scales + now->value_scales[j - skipped] + of)) : 0;
                    if (by_matrix) room->key_scales[j] *= call->scale;
                }
                keys.next[j] = call->keys + (j < known ? later->keys[j] + other * key_bytes : 0);
                values.next[j] = call->values + (j < known ? later->values[j] + other * value_bytes : 0);
            }
            add_tile(call, room, (h - head) * rows, rows, &keys, &values, count, first, before, c, is_whole, stored, by_matrix);
        }
        from = next;
        upto = behind_next;
    }
    for (size_t r = 0; r < rows * (behind - head); r++) {
        size_t token = start + (first + r % rows) / group, its = (head + r / rows) * group + (first + r % rows) % group;
        const size_t at = token * call->out_stride + its * size;
        const float factor = 1.0f / sum_of(room->weight[r]);
        /* An unseen tile changes -0 to 0, so a result without one has to, too. */
        if (by_matrix)
            for (size_t d = 0; d < depth; d += LANES) *(vec *)(room->totals + r * depth + d) += 0.0f;
        if (IS_QUANTISED(stored)) transform(room->totals + r * depth, size);
        size_t d = 0;
        for (; d + LANES <= size; d += LANES)
            store(call->out, at + d, *(vec *)(room->totals + r * depth + d) * factor, call->out_element);
        for (; d < size; d++) store_one(call->out, at + d, room->totals[r * depth + d] * factor, call->out_element);
    }
}

typedef void way(const paged_attention_call *, size_t, size_t, size_t, size_t, size_t, room *);
#define ATTEND(name, stored, by_matrix)                                                                                                 \
    static void name(const paged_attention_call *call, size_t i, size_t head, size_t behind, size_t first, size_t last, room *room) { \
        attend(call, i, head, behind, first, last, room, stored, by_matrix);                                                            \
    }
ATTEND(attend_float32, FLOAT32, 0)
ATTEND(attend_bfloat16, BFLOAT16, 0)
ATTEND(attend_int8, INT8, 0)
ATTEND(attend_int4, INT4, 0)

/* By `stored`. */
static way *const ways[] = {attend_float32, attend_bfloat16, attend_int8, attend_int4};
#if HAS_MATRIX
ATTEND(matrix_bfloat16, BFLOAT16, 1)
ATTEND(matrix_int8, INT8, 1)
ATTEND(matrix_int4, INT4, 1)
static way *const matrix_ways[] = {attend_float32, matrix_bfloat16, matrix_int8, matrix_int4};
#endif

/* A matrix unit serves queries in bfloat16: they lose no precision then, or no more than they have lost already. */
static way *way_of(const paged_attention_call *call) {
#if HAS_MATRIX
    if (call->query_element == BFLOAT16 && may_use_tiles()) return matrix_ways[call->stored];
#endif
    return ways[call->stored];
}

/* The heads of K and V in one piece of work, for a sequence with so many rows a head: all, if there are sequences for
 * every thread and the rows fit, else one. */
static size_t heads_together(const paged_attention_call *call, size_t rows) {
    return call->n >= MANY && rows * call->kv_heads <= MOST_ROWS ? call->kv_heads : 1;
}

static size_t rows_of(const paged_attention_call *call, size_t i) {
    return (call->query_start[i + 1] - call->query_start[i]) * (call->heads / call->kv_heads);
}

static size_t pieces_of(const paged_attention_call *call, size_t i) {
    const size_t rows = rows_of(call, i);
    return (rows + MOST_ROWS - 1) / MOST_ROWS * (call->kv_heads / heads_together(call, rows));
}

void paged_attention(const paged_attention_call *call) {
    size_t total = 0;
    for (int64_t i = 0; i < call->n; i++) total += pieces_of(call, i);
    way *const do_piece = way_of(call);
#pragma omp parallel
    {
        room room;
#if HAS_MATRIX
        room.shape = (matrix_shape){0, 0};
        /* As in a matrix unit, subnormal numbers count as 0. */
        const unsigned before = _mm_getcsr();
        if (do_piece != ways[call->stored]) _mm_setcsr(before | 0x8040);
#endif
        /* The sequence of the last piece: a thread gets pieces in rising order. */
        size_t i = 0, pieces_before = 0;
#pragma omp for schedule(dynamic)
        for (size_t piece = 0; piece < total; piece++) {
            while (piece >= pieces_before + pieces_of(call, i)) pieces_before += pieces_of(call, i++);
            const size_t rows = rows_of(call, i), together = heads_together(call, rows), parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
            const size_t number = piece - pieces_before, head = number % (call->kv_heads / together) * together;
            /* The latest rows first: they see the most, so the pieces at the end are small. */
            const size_t first = (parts - 1 - number / (call->kv_heads / together)) * MOST_ROWS;
            const size_t last = first + MOST_ROWS < rows ? first + MOST_ROWS : rows;
            do_piece(call, i, head, head + together, first, last, &room);
#if HAS_MATRIX
            if (room.shape.high) release_matrix(&room.shape);
#endif
        }
#if HAS_MATRIX
        _mm_setcsr(before);
#endif
    }
}
