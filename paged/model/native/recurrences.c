/* Recurrences of state layers, token after token: the short convolution, the gated delta rule, Mamba's two scans.
 *
 * A piece of work is one row and one unit of its state: a head or some channels. It reads the state from the row's pages at the first token, and
 * keeps it on the pages to write from then on. Each number of a state or an output is computed by the same operations in the same order, whatever
 * the other rows are, however the row's tokens are cut into passes, and on any thread: states are stored in the element in which they are computed.
 */
#include "recurrences.h"

#include <math.h>
#include <stdlib.h>

#include "vector.h"

/* With less work, in numbers of states times tokens, a second thread is not worth its start. */
#define FEW 32768
/* Most channels of a convolution in a piece of work. */
#define BAND 512

static inline int64_t num_tokens(const paged_rows *rows) { return rows->starts[rows->n] - rows->starts[0]; }

/* A row's unit on its pages; NULL: it is read as zeros, or not written. */
INLINE char *unit_at(const paged_rows *rows, const int32_t *pages, int64_t row, int64_t unit) {
    const int64_t page = pages[row * rows->stride + rows->parts[unit]];
    return page < 0 ? NULL : rows->pages + page * rows->page_bytes + rows->offsets[unit];
}

/* Up to LANES numbers, followed by zeros. */
INLINE vec some(const float *from, size_t count) {
    if (count >= LANES) return *(const vec *)from;
    float part[LANES] = {0};
    memcpy(part, from, count * sizeof(float));
    return *(vec *)part;
}

INLINE void put_some(float *to, vec v, size_t count) {
    if (count >= LANES)
        *(vec *)to = v;
    else
        memcpy(to, &v, count * sizeof(float));
}

/* The tokens before the pass for the channels of a band: taps - 1 lines, in the order of time. */
typedef struct {
    float lines[PAGED_MOST_TAPS - 1][BAND];
} tail;

INLINE void read_tail(const paged_convolution *call, const paged_rows *rows, int64_t row, size_t first, size_t count, tail *to,
                      enum element element) {
    const size_t kept = call->taps - 1, of_unit = (call->channels + rows->units - 1) / rows->units;
    for (size_t c = 0, number = first / of_unit, within = first % of_unit; c < count; number++, within = 0) {
        const char *unit = unit_at(rows, rows->read, row, number);
        for (; c < count && within < of_unit; c++, within++)
            for (size_t k = 0; k < kept; k++) to->lines[k][c] = unit ? load_one(unit, within * kept + k, element) : 0;
    }
}

/* Stores the last tokens of the tail followed by the row's tokens. */
INLINE void write_tail(const paged_convolution *call, const paged_rows *rows, int64_t row, size_t first, size_t count, const tail *from,
                       enum element element) {
    const size_t kept = call->taps - 1, of_unit = (call->channels + rows->units - 1) / rows->units;
    const int64_t stop = rows->starts[row + 1], tokens = stop - rows->starts[row];
    for (size_t c = 0, number = first / of_unit, within = first % of_unit; c < count; number++, within = 0) {
        char *unit = unit_at(rows, rows->write, row, number);
        for (; c < count && within < of_unit; c++, within++)
            for (size_t k = 0; unit && k < kept; k++) {
                const size_t ago = kept - k;
                const size_t at = (stop - ago) * call->x_stride + first + c;
                const float its = (int64_t)ago > tokens ? from->lines[k + tokens][c] : load_one(call->x, at, element);
                store_one(unit, within * kept + k, its, element);
            }
    }
}

/* Convolves token t of a row, for `width` channels from `first` on, at most LANES. */
INLINE void convolve_lanes(const paged_convolution *call, int64_t start, int64_t t, size_t first, const tail *before, size_t in_band,
                           size_t width, enum element element) {
    const int64_t kept = call->taps - 1;
    vec sum = {0};
    if (call->bias) sum = some(call->bias + first, width);
    for (int64_t k = 0; k <= kept; k++) {
        const int64_t at = t - kept + k;
        vec x = {0};
        if (at < start)
            x = some(before->lines[at - start + kept] + in_band, width);
        else if (width == LANES)
            x = load(call->x, at * call->x_stride + first, element);
        else {
            float part[LANES] = {0};
            for (size_t c = 0; c < width; c++) part[c] = load_one(call->x, at * call->x_stride + first + c, element);
            x = *(vec *)part;
        }
        sum = fused(some(call->weight + k * call->channels + first, width), x, sum);
    }
    if (call->has_silu) sum = sum / (1.0f + exp_of(-sum));
    const size_t to = t * call->channels + first;
    if (width == LANES)
        store(call->out, to, sum, element);
    else
        for (size_t c = 0; c < width; c++) store_one(call->out, to + c, sum[c], element);
}

INLINE void convolve_channels(const paged_convolution *call, const paged_rows *rows, int64_t row, size_t first, size_t count,
                              enum element element) {
    const int64_t start = rows->starts[row];
    tail before;
    read_tail(call, rows, row, first, count, &before, element);
    for (int64_t t = start; t < rows->starts[row + 1]; t++) {
        size_t c = 0;
        for (; c + LANES <= count; c += LANES) convolve_lanes(call, start, t, first + c, &before, c, LANES, element);
        if (c < count) convolve_lanes(call, start, t, first + c, &before, c, count - c, element);
    }
    write_tail(call, rows, row, first, count, &before, element);
}

static void convolve_band(const paged_convolution *call, const paged_rows *rows, int64_t row, size_t first, size_t count) {
    if (call->element == FLOAT32)
        convolve_channels(call, rows, row, first, count, FLOAT32);
    else
        convolve_channels(call, rows, row, first, count, BFLOAT16);
}

void paged_convolve(const paged_convolution *call, const paged_rows *rows) {
    const int64_t bands = (call->channels + BAND - 1) / BAND;
#pragma omp parallel for schedule(static) if (num_tokens(rows) * call->channels >= FEW)
    for (int64_t piece = 0; piece < rows->n * bands; piece++) {
        const int64_t row = piece / bands, first = piece % bands * BAND, left = call->channels - first;
        convolve_band(call, rows, row, first, left < BAND ? left : BAND);
    }
}

/* A head's state: `before`, NULL for zeros; `state`, where it is written; and `nowhere`, memory to free if it is not kept. */
typedef struct {
    const float *before;
    float *state, *nowhere;
} head_state;

/* Finds a head's state. `state` NULL: there is nothing to compute, or no memory for a state that is not kept, which is noted. Copies the state of a
 * row without tokens. */
static head_state head_of(const paged_rows *rows, int64_t row, int64_t head, size_t size) {
    head_state found = {(const float *)unit_at(rows, rows->read, row, head), (float *)unit_at(rows, rows->write, row, head), NULL};
    if (rows->starts[row] == rows->starts[row + 1]) {
        if (found.state && found.before)
            memmove(found.state, found.before, size * sizeof(float));
        else if (found.state)
            memset(found.state, 0, size * sizeof(float));
        return (head_state){NULL, NULL, NULL};
    }
    if (!found.state) found.state = found.nowhere = malloc(size * sizeof(float));
    if (!found.state) {
#pragma omp atomic write
        *rows->lacks_memory = 1;
    }
    return found;
}

/* Scales a key or a query by `scale`, and to length 1 first if `is_normed`. */
INLINE void prepare(const float *from, size_t size, int is_normed, float scale, float *to) {
    const float factor = is_normed ? scale / sqrtf(squares_of(from, size) + 1e-6f) : scale;
    for (size_t i = 0; i < size; i++) to[i] = from[i] * factor;
}

/* Computes the factor by which each of `size` rows of a state decays, from one logarithm or from as many. */
INLINE void keep(const float *decay, size_t given, size_t size, float *to) {
    for (size_t i = 0; i < given; i += LANES) put_some(to + i, exp_of(some(decay + i, given - i)), given - i);
    for (size_t i = given; i < size; i++) to[i] = to[0];
}

/* Advances `wide` vectors of a head's columns by one token; the last vector has `count` - (wide - 1) * LANES columns. The state decays, its value at
 * the key moves towards the token's value by `share`, and the query reads it. */
INLINE void delta_columns(const int wide, const float *before, float *state, size_t columns, size_t key_size, size_t count, const float *key,
                          const float *query, const float *kept, const float *value, float share, float *out) {
    const size_t last = count - (wide - 1) * LANES;
    vec held[WIDE] = {{0}}, found[WIDE] = {{0}};
    if (before)
        for (size_t i = 0; i < key_size; i++)
            UNROLL for (int j = 0; j < wide; j++)
                held[j] = fused(some(before + i * columns + j * LANES, j < wide - 1 ? LANES : last) * kept[i], spread(key[i]), held[j]);
    UNROLL for (int j = 0; j < wide; j++) held[j] = (some(value + j * LANES, j < wide - 1 ? LANES : last) - held[j]) * share;
    for (size_t i = 0; i < key_size; i++)
        UNROLL for (int j = 0; j < wide; j++) {
            const size_t width = j < wide - 1 ? LANES : last;
            vec now = {0};
            if (before) now = some(before + i * columns + j * LANES, width) * kept[i];
            now = fused(spread(key[i]), held[j], now);
            put_some(state + i * columns + j * LANES, now, width);
            found[j] = fused(now, spread(query[i]), found[j]);
        }
    UNROLL for (int j = 0; j < wide; j++) put_some(out + j * LANES, found[j], j < wide - 1 ? LANES : last);
}

static void delta_head(const paged_delta_rule *call, const paged_rows *rows, int64_t row, int64_t head) {
    const size_t key_size = call->key_size, columns = call->value_size;
    const head_state own = head_of(rows, row, head, key_size * columns);
    const float *before = own.before;
    float *state = own.state;
    if (!state) return;
    float key[PAGED_MOST_KEY_SIZE], query[PAGED_MOST_KEY_SIZE], kept[PAGED_MOST_KEY_SIZE];
    for (int64_t t = rows->starts[row]; t < rows->starts[row + 1]; t++) {
        const int64_t of_head = t * call->heads + head;
        const int64_t of_key = (t * call->key_heads + head / (call->heads / call->key_heads)) * (int64_t)key_size;
        const float *value = call->values + of_head * (int64_t)columns;
        float *out = call->out + of_head * (int64_t)columns;
        const float share = call->beta[of_head];
        keep(call->decay + of_head * call->decay_size, call->decay_size, key_size, kept);
        prepare(call->keys + of_key, key_size, call->is_normed, 1, key);
        prepare(call->queries + of_key, key_size, call->is_normed, call->scale, query);
        for (size_t c = 0; c < columns;) {
            const float *from = before ? before + c : NULL;
            if (columns - c >= COLUMNS) {
                delta_columns(WIDE, from, state + c, columns, key_size, COLUMNS, key, query, kept, value + c, share, out + c);
                c += COLUMNS;
            } else {
                const size_t count = columns - c < LANES ? columns - c : LANES;
                delta_columns(1, from, state + c, columns, key_size, count, key, query, kept, value + c, share, out + c);
                c += count;
            }
        }
        before = state;
    }
    free(own.nowhere);
}

void paged_advance_delta_rule(const paged_delta_rule *call, const paged_rows *rows) {
#pragma omp parallel for schedule(dynamic) if (num_tokens(rows) * call->heads * call->key_size * call->value_size >= FEW)
    for (int64_t piece = 0; piece < rows->n * call->heads; piece++) delta_head(call, rows, piece / call->heads, piece % call->heads);
}

/* Advances up to LANES numbers of a head's row: the state decays, and the token is added. Returns `sum` plus what is read of the state. */
INLINE vec scan_lanes(const float *before, float *state, const float *input, const float *reading, vec factor,
                    vec kept, vec sum, size_t width) {
    vec now = {0};
    if (before) now = some(before, width) * kept;
    now = fused(some(input, width), factor, now);
    put_some(state, now, width);
    return fused(now, some(reading, width), sum);
}

static void scan_head(const paged_scan *call, const paged_rows *rows, int64_t row, int64_t head) {
    const size_t size = call->head_size, columns = call->state_size;
    const head_state own = head_of(rows, row, head, size * columns);
    const float *before = own.before;
    float *state = own.state;
    if (!state) return;
    for (int64_t t = rows->starts[row]; t < rows->starts[row + 1]; t++) {
        const int64_t of_head = t * call->heads + head;
        const int64_t of_group = (t * call->groups + head / (call->heads / call->groups)) * (int64_t)columns;
        const float *x = call->x + of_head * (int64_t)size, *input = call->input + of_group, *reading = call->reading + of_group;
        const float step = call->step[of_head], kept_part = exp_of(spread(step * call->decay[head]))[0];
        for (size_t p = 0; p < size; p++) {
            const vec factor = spread(x[p] * step), kept = spread(kept_part);
            vec sum = {0};
            const float *from = before ? before + p * columns : NULL;
            float *to = state + p * columns;
            size_t c = 0;
            for (; c + LANES <= columns; c += LANES)
                sum = scan_lanes(from ? from + c : NULL, to + c, input + c, reading + c, factor, kept, sum, LANES);
            if (c < columns) sum = scan_lanes(from ? from + c : NULL, to + c, input + c, reading + c, factor, kept, sum, columns - c);
            call->out[of_head * (int64_t)size + p] = sum_of(sum) + (call->skip ? call->skip[head] * x[p] : 0);
        }
        before = state;
    }
    free(own.nowhere);
}

void paged_advance_scan(const paged_scan *call, const paged_rows *rows) {
#pragma omp parallel for schedule(dynamic) if (num_tokens(rows) * call->heads * call->head_size * call->state_size >= FEW)
    for (int64_t piece = 0; piece < rows->n * call->heads; piece++) scan_head(call, rows, piece / call->heads, piece % call->heads);
}

/* Scans the channels of one unit, token by token. */
static void scan_channels(const paged_selective_scan *call, const paged_rows *rows, int64_t row, int64_t unit) {
    const size_t columns = call->state_size, of_unit = (call->channels + rows->units - 1) / rows->units, first = unit * of_unit;
    if (first >= (size_t)call->channels) return;
    const size_t count = call->channels - first < of_unit ? call->channels - first : of_unit;
    const head_state own = head_of(rows, row, unit, count * columns);
    const float *before = own.before;
    if (!own.state) return;
    for (int64_t t = rows->starts[row]; t < rows->starts[row + 1]; t++) {
        const float *input = call->input + t * columns, *reading = call->reading + t * columns;
        for (size_t c = 0; c < count; c++) {
            const size_t channel = first + c, at = t * call->channels + channel;
            const float *from = before ? before + c * columns : NULL, *decay = call->decay + channel * columns;
            float *to = own.state + c * columns;
            const float x = call->x[at];
            const vec step = spread(call->step[at]), factor = step * x;
            vec sum = {0};
            size_t n = 0;
            for (; n + LANES <= columns; n += LANES)
                sum = scan_lanes(from ? from + n : NULL, to + n, input + n, reading + n, factor,
                                 exp_of(step * some(decay + n, LANES)), sum, LANES);
            if (n < columns)
                sum = scan_lanes(from ? from + n : NULL, to + n, input + n, reading + n, factor,
                                 exp_of(step * some(decay + n, columns - n)), sum, columns - n);
            call->out[at] = sum_of(sum) + (call->skip ? call->skip[channel] * x : 0);
        }
        before = own.state;
    }
    free(own.nowhere);
}

void paged_advance_selective_scan(const paged_selective_scan *call, const paged_rows *rows) {
#pragma omp parallel for schedule(dynamic) if (num_tokens(rows) * call->channels * call->state_size >= FEW)
    for (int64_t piece = 0; piece < rows->n * rows->units; piece++) scan_channels(call, rows, piece / rows->units, piece % rows->units);
}
