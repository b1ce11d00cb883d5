/* Attention over K and V that lie in blocks, for sequences with one token or with many, in one call.
 *
 * Rows are query heads of tokens; those that read the same K and V stand in one piece of work, up to MOST_ROWS of them. A piece goes
 * over its sequence in tiles of TILE positions, which begin at multiples of TILE whoever asks: K is turned so that scores are a
 * product, the running maximum and sum are FlashAttention's (Dao et al., 2022), V is multiplied where it lies in the cache. A tile that
 * a row does not see changes nothing, to the bit: its weights are exactly 0 and what was summed before is multiplied by exactly 1. So
 * a token's result depends on its own context alone: not on the other sequences, not on how its prompt was cut, not on where its
 * blocks lie, and not on how many threads there are.
 *
 * What lies behind a sequence's end, or before every row's window, is never read: a freed block may hold anything.
 */
#include "attention.h"

#include "vector.h"

#define TILE 64
#define MOST_ROWS 64
#define LOWEST -1e30f

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

/* Memory of one piece of work. */
typedef struct {
    float queries[MOST_ROWS * PAGED_MOST_HEAD_SIZE];
    float totals[MOST_ROWS * PAGED_MOST_HEAD_SIZE];
    float keys[PAGED_MOST_HEAD_SIZE * TILE]; /* turned: [head size, TILE] */
    float values[TILE * PAGED_MOST_HEAD_SIZE];
    float weights[MOST_ROWS * TILE];
    float highest[MOST_ROWS], weight[MOST_ROWS];
} room;

/* LANES elements of a row from `at` on, 0 behind its end. */
INLINE vec part_of(const void *row, size_t at, size_t length, enum element element) {
    if (at + LANES <= length) return load(row, at, element);
    float part[LANES] = {0};
    for (size_t i = 0; at + i < length; i++) part[i] = load_one(row, at + i, element);
    return *(vec *)part;
}

/* K of `count` rows as [depth, TILE], where depth is the head size up to a multiple of LANES; 0 behind the rows. */
INLINE void turn_keys(const char *const *rows, size_t count, size_t head_size, size_t depth, float *to, enum element element) {
    for (size_t first = 0; first < TILE; first += LANES)
        for (size_t d = 0; d < depth; d += LANES) {
            vec lines[LANES], mixed[LANES];
            UNROLL for (int i = 0; i < LANES; i++)
                lines[i] = first + i < count ? part_of(rows[first + i], d, head_size, element) : (vec){0};
            /* A perfect shuffle of rows, as often as two goes into LANES: then rows are columns. */
            for (int round = 1; round < LANES; round *= 2) {
                UNROLL for (int i = 0; i < LANES / 2; i++) {
                    mixed[2 * i] = LOW(lines[i], lines[i + LANES / 2]);
                    mixed[2 * i + 1] = HIGH(lines[i], lines[i + LANES / 2]);
                }
                UNROLL for (int i = 0; i < LANES; i++) lines[i] = mixed[i];
            }
            UNROLL for (int i = 0; i < LANES; i++) *(vec *)(to + (d + i) * TILE + first) = lines[i];
        }
}

/* to[rows, columns] (+)= x · w, in tiles. `columns` is a multiple of LANES. */
INLINE void product(size_t rows, const float *x, size_t x_stride, const float *w, size_t w_stride, size_t depth, float *to,
                    size_t to_stride, size_t columns, int first) {
    for (size_t c = 0; c + COLUMNS <= columns; c += COLUMNS)
        for (size_t r = 0; r < rows; r += ROWS) {
            size_t left = rows - r;
            WITH_CONSTANT(left, tile, x + r * x_stride, x_stride, w + c, w_stride, depth, to + r * to_stride + c, to_stride, first)
        }
    /* What is left of an odd width, a vector at a time: the same sums in the same order. */
    for (size_t c = columns / COLUMNS * COLUMNS; c < columns; c += LANES)
        for (size_t r = 0; r < rows; r++) {
            vec sum = first ? (vec){0} : *(const vec *)(to + r * to_stride + c);
            for (size_t p = 0; p < depth; p++) sum += x[r * x_stride + p] * *(const vec *)(w + p * w_stride + c);
            *(vec *)(to + r * to_stride + c) = sum;
        }
}

/* Scores of a row in a tile become weights; says by how much what was summed before shrinks. Seen are positions low to high - 1 of the tile. */
INLINE float weigh(float *scores, float low, float high, float *highest, float *weight, float soft_cap) {
    vec most = spread(LOWEST), sum = {0};
    for (int j = 0; j < TILE; j += LANES) {
        vec place = rising() + (float)j, score = *(vec *)(scores + j);
        if (soft_cap != 0) {
            /* tanh x = 1 - 2 / (e^2x + 1) */
            vec grown = exp_of(score * (2.0f / soft_cap));
            score = (1.0f - 2.0f / (grown + 1.0f)) * soft_cap;
        }
        score = chosen((ivec)(place < high) & (ivec)(place >= low), score, spread(-__builtin_inff()));
        most = larger(most, score);
        *(vec *)(scores + j) = score;
    }
    float before = *highest, now = most_of(most);
    /* Where a score is NaN its weight is, too, and so is the result. */
    now = now > before ? now : before;
    for (int j = 0; j < TILE; j += LANES) {
        vec part = exp_of(*(vec *)(scores + j) - now);
        sum += part;
        *(vec *)(scores + j) = part;
    }
    float shrink = exp_of(spread(before - now))[0];
    *highest = now;
    *weight = *weight * shrink + sum_of(sum);
    return shrink;
}

/* Rows `first` to `last` - 1 of sequence i for one head of K and V; a row is a token of the sequence in this step and a head of the group. */
INLINE void attend(const paged_attention_call *call, size_t i, size_t kv_head, size_t first, size_t last, room *room,
                   enum element pool_element) {
    const size_t size = call->head_size, depth = (size + LANES - 1) / LANES * LANES;
    const size_t group = call->heads / call->kv_heads, rows = last - first;
    const size_t start = call->query_start[i], before = call->seq_lens[i] - (call->query_start[i + 1] - start);
    const size_t bytes = pool_element == FLOAT32 ? 4 : 2;
    const int32_t *table = call->tables + i * call->table_stride;
    const size_t end = before + (last - 1) / group + 1, window = call->window;
    const size_t earliest = before + first / group + 1;
    const size_t begin = window && earliest > window ? earliest - window : 0;

    for (size_t r = 0; r < rows; r++) {
        size_t token = start + (first + r) / group, head = kv_head * group + (first + r) % group;
        const size_t at = token * call->query_stride + head * size;
        for (size_t d = 0; d < depth; d++)
            room->queries[r * depth + d] = d < size ? load_one(call->queries, at + d, call->query_element) * call->scale : 0;
        room->highest[r] = call->sinks ? call->sinks[head] : LOWEST;
        room->weight[r] = call->sinks ? 1 : 0;
    }
    memset(room->totals, 0, rows * depth * sizeof(float));
    for (size_t c = begin / TILE * TILE; c < end; c += TILE) {
        /* From the first position that any row sees: behind it none is skipped, and before it nothing is read. */
        const size_t from = begin > c ? begin - c : 0, count = end - c < TILE ? end - c : TILE;
        const char *keys[TILE], *values[TILE];
        for (size_t j = from; j < count; j++) {
            size_t slot = (size_t)table[(c + j) / call->block_size] * call->block_size + (c + j) % call->block_size;
            size_t at = (slot * call->kv_heads + kv_head) * size * bytes;
            keys[j] = (const char *)call->keys + at;
            values[j] = (const char *)call->values + at;
        }
        static const float nothing[PAGED_MOST_HEAD_SIZE];
        for (size_t j = 0; j < from; j++) keys[j] = values[j] = (const char *)nothing;
        turn_keys(keys, count, size, depth, room->keys, pool_element);
        for (size_t j = 0; j < count; j++)
            for (size_t d = 0; d < depth; d += LANES)
                *(vec *)(room->values + j * depth + d) = part_of(values[j], d, size, pool_element);
        product(rows, room->queries, depth, room->keys, TILE, depth, room->weights, TILE, TILE, 1);
        for (size_t r = 0; r < rows; r++) {
            size_t seen = before + (first + r) / group + 1;
            float high = seen < c ? 0 : (float)(seen - c), low = window && seen > window + c ? (float)(seen - window - c) : 0;
            float shrink = weigh(room->weights + r * TILE, low, high, room->highest + r, room->weight + r, call->soft_cap);
            if (shrink != 1)
                for (size_t d = 0; d < depth; d += LANES) *(vec *)(room->totals + r * depth + d) *= shrink;
        }
        product(rows, room->weights, TILE, room->values, depth, count, room->totals, depth, depth, 0);
    }
    for (size_t r = 0; r < rows; r++) {
        size_t token = start + (first + r) / group, head = kv_head * group + (first + r) % group;
        const size_t at = token * call->out_stride + head * size;
        for (size_t d = 0; d < size; d++)
            store_one(call->out, at + d, room->totals[r * depth + d] / room->weight[r], call->out_element);
    }
}

static void attend_float32(const paged_attention_call *call, size_t i, size_t kv_head, size_t first, size_t last, room *room) {
    attend(call, i, kv_head, first, last, room, FLOAT32);
}

static void attend_bfloat16(const paged_attention_call *call, size_t i, size_t kv_head, size_t first, size_t last, room *room) {
    attend(call, i, kv_head, first, last, room, BFLOAT16);
}

void paged_attention(const paged_attention_call *call) {
    const size_t group = call->heads / call->kv_heads;
    /* A piece of work is found by its number: how many there are before each sequence. */
    size_t total = 0;
    for (int64_t i = 0; i < call->n; i++)
        total += ((call->query_start[i + 1] - call->query_start[i]) * group + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp parallel
    {
        room room;
        /* Where the piece that was done last belongs: pieces come in rising order. */
        size_t i = 0, pieces_before = 0;
#pragma omp for schedule(dynamic)
        for (size_t piece = 0; piece < total * call->kv_heads; piece++) {
            /* The latest first: they see the most, and what is left over at the end is small. */
            size_t number = piece / call->kv_heads, rows, pieces;
            for (;; i++, pieces_before += pieces) {
                rows = (call->query_start[i + 1] - call->query_start[i]) * group;
                pieces = (rows + MOST_ROWS - 1) / MOST_ROWS;
                if (number < pieces_before + pieces) break;
            }
            size_t part = pieces - 1 - (number - pieces_before), first = part * MOST_ROWS;
            size_t last = first + MOST_ROWS < rows ? first + MOST_ROWS : rows;
            (call->pool_element == FLOAT32 ? attend_float32 : attend_bfloat16)(call, i, piece % call->kv_heads, first, last, &room);
        }
    }
}
