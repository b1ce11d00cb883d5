/* A mixture of experts for all rows in one call.
 *
 *     out[row] = sum over its choices j of shares[row, j] * down(activation(up(x[row])))      of expert chosen[row, j]
 *
 * Rows are gathered by expert, so that each expert's weights are read once. A row's numbers do not depend on the other rows of a product
 * (products.c), and its results are added in the order of its own choices. So they depend neither on how many rows chose the same expert nor on
 * the number of threads. Sums and biases are float32; inputs of a product have the weights' element, or are rounded to 8 bits for codes.
 */
#include "experts.h"

#include "codes.h"
#include "vector.h"

/* Panels of one expert in a piece of work: few, so that threads are equally busy, but enough to outweigh the start of a piece. */
#define PANELS 4
/* With fewer rows, a pass over them is not worth a second thread. */
#define FEW 8

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* The places of intermediate results. A pair is a row and one of its choices; pairs are ordered by expert. */
typedef struct {
    int64_t *used;    /* [experts]: the experts that were chosen */
    int64_t *starts;  /* [experts + 1]: the first pair of each expert */
    int64_t *pairs;   /* [rows, choices]: the place of each pair; -1: no expert */
    void *gathered;   /* [pairs, hidden] */
    float *both;      /* [pairs, 2 * width] or [pairs, width] */
    void *active;     /* [pairs, width] */
    float *given;     /* [pairs, hidden] */
    char *rounded;    /* rounded rows, for products with codes */
    size_t bytes;
} places;

static size_t codes_room(const paged_product *coded, int64_t pairs, int64_t depth) {
    return coded ? (size_t)paged_codes_room(coded->codes, pairs, depth) : 0;
}

static places places_of(const paged_experts_call *call, char *work) {
    const size_t bytes = bytes_of(call->element), pairs = call->rows * call->choices, experts = call->experts;
    const size_t up = codes_room(call->coded_up, pairs, call->hidden), down = codes_room(call->coded_down, pairs, call->width);
    const size_t sizes[] = {
        experts * 8,
        (experts + 1) * 8,
        pairs * 8,
        pairs * call->hidden * bytes,
        pairs * call->width * (call->has_gates ? 2 : 1) * 4,
        pairs * call->width * bytes,
        pairs * call->hidden * 4,
        up > down ? up : down,
    };
    size_t at[9] = {0};
    for (int i = 0; i < 8; i++) at[i + 1] = at[i] + rounded(sizes[i]);
    return (places){(int64_t *)(work + at[0]), (int64_t *)(work + at[1]), (int64_t *)(work + at[2]), work + at[3],
                    (float *)(work + at[4]),   work + at[5],              (float *)(work + at[6]),   work + at[7],          at[8]};
}

int64_t paged_experts_room(const paged_experts_call *call) { return (int64_t)places_of(call, (char *)0).bytes; }

/* Orders pairs by expert, and by row within each, and copies their rows. Returns how many experts were chosen. */
static int64_t gather(const paged_experts_call *call, const places *at) {
    const int64_t pairs = call->rows * call->choices;
    const size_t row_bytes = call->hidden * bytes_of(call->element);
    int64_t used = 0;
    for (int64_t e = 0; e <= call->experts; e++) at->starts[e] = 0;
    for (int64_t i = 0; i < pairs; i++)
        if ((uint64_t)call->chosen[i] < (uint64_t)call->experts) at->starts[call->chosen[i] + 1]++;
    for (int64_t e = 0; e < call->experts; e++) {
        if (at->starts[e + 1]) at->used[used++] = e;
        at->starts[e + 1] += at->starts[e];
    }
    /* Each start moves to the expert's end, which was the next one's start. */
    for (int64_t i = 0; i < pairs; i++)
        at->pairs[i] = (uint64_t)call->chosen[i] < (uint64_t)call->experts ? at->starts[call->chosen[i]]++ : -1;
    for (int64_t e = call->experts; e > 0; e--) at->starts[e] = at->starts[e - 1];
    at->starts[0] = 0;
#pragma omp parallel for schedule(static) if (call->rows >= FEW)
    for (int64_t i = 0; i < pairs; i++)
        if (at->pairs[i] >= 0)
            memcpy((char *)at->gathered + at->pairs[i] * row_bytes, (const char *)call->x + i / call->choices * row_bytes, row_bytes);
    return used;
}

/* Multiplies each expert's pairs, x [pairs, depth], by its codes, over threads; a row is rounded once for all results. */
static void multiply_coded(const paged_experts_call *call, const places *at, int64_t used, const void *x, int64_t depth,
                           const paged_product *coded, float *to) {
    for (int64_t number = 0; number < used; number++) {
        const int64_t expert = at->used[number], first = at->starts[expert], rows = at->starts[expert + 1] - first;
        paged_product product = coded[expert];
        product.to = to + first * product.to_stride;
        paged_mixed_products((const char *)x + first * depth * bytes_of(call->element), depth, rows, depth, call->element, &product, 1,
                             at->rounded);
    }
}

/* The same for weights that are floats. */
static void multiply(const paged_experts_call *call, const places *at, int64_t used, const void *x, int64_t depth, const void *packed,
                     const float *bias, int64_t outs, float *to) {
    const int64_t panels = (outs + COLUMNS - 1) / COLUMNS, parts = (panels + PANELS - 1) / PANELS, width = PANELS * COLUMNS;
    const size_t bytes = bytes_of(call->element);
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int64_t number = 0; number < used; number++)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t expert = at->used[number], first = at->starts[expert], rows = at->starts[expert + 1] - first;
            const int64_t column = part * width;
            const paged_product product = {
                .packed = (const char *)packed + (expert * panels * COLUMNS + column) * depth * bytes,
                .bias = bias ? bias + expert * outs + column : NULL,
                .to = to + first * outs + column,
                .outs = outs - column < width ? outs - column : width,
                .to_stride = outs,
            };
            /* Within this parallel region it runs on one thread. */
            paged_products((const char *)x + first * depth * bytes, depth, rows, depth, call->element, &product, 1);
        }
}

INLINE vec below(vec x, float most) { return chosen((ivec)(x > most), spread(most), x); }

INLINE vec activated(const paged_activation *its, vec gate) {
    if (its->is_square) {
        const vec positive = chosen((ivec)(gate < 0.0f), (vec){0}, gate);
        return positive * positive;
    }
    const vec x = below(gate, its->most_gate);
    vec bent = x;
    /* Skipped for 0, since 0 times infinity is NaN. */
    if (its->cubic) bent = x + its->cubic * x * x * x;
    return x / (1.0f + exp_of(-its->slope * bent));
}

INLINE vec lifted(const paged_activation *its, vec up) {
    const vec x = below(up, its->most_up);
    return chosen((ivec)(x < -its->most_up), spread(-its->most_up), x) + its->plus;
}

static void activate(const paged_experts_call *call, const places *at, int64_t pairs) {
    const int64_t width = call->width, stride = call->has_gates ? 2 * width : width;
    const paged_activation *its = &call->activation;
    const enum element element = call->element;
#pragma omp parallel for schedule(static) if (pairs >= FEW)
    for (int64_t pair = 0; pair < pairs; pair++) {
        const float *gate = at->both + pair * stride, *up = gate + width;
        char *to = (char *)at->active + pair * width * bytes_of(element);
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            vec found = activated(its, *(const vec *)(gate + i));
            if (call->has_gates) found *= lifted(its, *(const vec *)(up + i));
            store(to, i, found, element);
        }
        for (; i < width; i++) {
            vec found = activated(its, spread(gate[i]));
            if (call->has_gates) found *= lifted(its, spread(up[i]));
            store_one(to, i, found[0], element);
        }
    }
}

/* Adds up each row's results, in the order of its choices. */
static void add(const paged_experts_call *call, const places *at) {
    const int64_t hidden = call->hidden, choices = call->choices;
#pragma omp parallel for schedule(static) if (call->rows >= FEW)
    for (int64_t r = 0; r < call->rows; r++) {
        const int64_t *pairs = at->pairs + r * choices;
        const float *shares = call->shares + r * choices;
        float *to = call->out + r * hidden;
        int64_t i = 0;
        for (; i + LANES <= hidden; i += LANES) {
            vec sum = {0};
            for (int64_t j = 0; j < choices; j++)
                if (pairs[j] >= 0) sum = fused(spread(shares[j]), *(const vec *)(at->given + pairs[j] * hidden + i), sum);
            *(vec *)(to + i) = sum;
        }
        for (; i < hidden; i++) {
            vec sum = {0};
            for (int64_t j = 0; j < choices; j++)
                if (pairs[j] >= 0) sum = fused(spread(shares[j]), spread(at->given[pairs[j] * hidden + i]), sum);
            to[i] = sum[0];
        }
    }
}

void paged_experts(const paged_experts_call *call) {
    const places at = places_of(call, call->work);
    const int64_t used = gather(call, &at), pairs = at.starts[call->experts];
    const int64_t ups = call->has_gates ? 2 * call->width : call->width;
    if (call->coded_up) multiply_coded(call, &at, used, at.gathered, call->hidden, call->coded_up, at.both);
    else multiply(call, &at, used, at.gathered, call->hidden, call->up, call->up_bias, ups, at.both);
    activate(call, &at, pairs);
    if (call->coded_down) multiply_coded(call, &at, used, at.active, call->width, call->coded_down, at.given);
    else multiply(call, &at, used, at.active, call->width, call->down, call->down_bias, call->hidden, at.given);
    add(call, &at);
}
