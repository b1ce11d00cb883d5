/* A decoder of Llama's family from token ids to logits in one call: Llama, Mistral, Qwen 2 and 3, others with such layers, and LFM2.
 *
 *     hidden += o(attention(rope(norm?(qkv(norm(hidden))))))        K and V go into the pool's slots on the way
 *     hidden += o(C * convolution(B * x))                           or this: B, C, x = mix(norm(hidden)); the last tokens go onto pages
 *     hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))
 *
 * The residual stream, sums and norms are float32, whatever the weights are; inputs of a product have the weights' element. Each token is computed
 * from its own numbers in one order (products.c, attention.c), so a step's other tokens do not change it.
 *
 * For a split model this is a rank's part: some heads, some columns between gate and down, some of the vocabulary. Then the results of o, down and
 * the embedding are parts of sums, which `sum` adds up over ranks.
 */
#include "decoder.h"

#include <math.h>

#include "attention.h"
#include "codes.h"
#include "quantised.h"

/* With fewer rows, a pass over them is not worth a second thread. */
#define FEW 8

/* Root mean square norm (Zhang and Sennrich, 2019). */
INLINE void norm(const float *x, const float *weight, size_t length, float epsilon, void *to, enum element element) {
    const float factor = 1.0f / sqrtf(squares_of(x, length) / (float)length + epsilon);
    size_t i = 0;
    for (; i + LANES <= length; i += LANES) store(to, i, *(const vec *)(x + i) * factor * *(const vec *)(weight + i), element);
    for (; i < length; i++) store_one(to, i, x[i] * factor * weight[i], element);
}

static void norms(const paged_decoder *model, const float *x, const float *weight, size_t rows, void *to) {
    const size_t hidden = model->hidden, bytes = bytes_of(model->element);
#pragma omp parallel for schedule(static) if (rows >= FEW)
    for (size_t r = 0; r < rows; r++)
        norm(x + r * hidden, weight, hidden, model->epsilon, (char *)to + r * hidden * bytes, model->element);
}

/* Rotary position embedding in halves (Su et al., 2021), as in Hugging Face's models: table [head size], cosines and then sines. */
INLINE void rotate(float *head, const float *table, size_t size) {
    const size_t half = size / 2;
    for (size_t i = 0; i < half; i++) {
        const float a = head[i], b = head[half + i];
        head[i] = a * table[i] - b * table[half + i];
        head[half + i] = b * table[i] + a * table[half + i];
    }
}

/* Stores a token's K or V of all heads in its slot. On page 0 they begin at `to`, and their scales, if any, at `scales`. */
INLINE void keep(const paged_step *step, float *x, size_t heads, size_t size, int64_t slot, char *to, char *scales) {
    const int stored = step->attention.stored;
    const size_t bytes = row_bytes(size, stored);
    if (slot < 0) return;
    const size_t page = slot / step->attention.block_size * step->attention.page_bytes, first = slot % step->attention.block_size * heads;
    to += page + first * bytes;
    if (!IS_QUANTISED(stored)) {
        for (size_t d = 0; d < heads * size; d++) store_one(to, d, x[d], (enum element)stored);
        return;
    }
    bf16 *scale = (bf16 *)(scales + page) + first;
    for (size_t h = 0; h < heads; h++) quantise(x + h * size, size, to + h * bytes, scale + h, stored);
}

/* Norms and rotates queries and keys, and stores K and V in their slots of this layer. */
static void place_heads(const paged_decoder *model, const paged_layer *layer, const paged_step *step, const paged_place *place, float *qkv,
                        size_t stride) {
    const size_t size = model->head_size, heads = model->heads, kv_heads = model->kv_heads, row = kv_heads * size;
#pragma omp parallel for schedule(static) if (step->tokens >= FEW)
    for (int64_t t = 0; t < step->tokens; t++) {
        float *own = qkv + t * stride;
        const float *table = model->rotary + step->positions[t] * size;
        for (size_t h = 0; h < heads + kv_heads; h++) {
            const float *weight = h < heads ? layer->query_norm : layer->key_norm;
            if (weight) norm(own + h * size, weight, size, model->epsilon, own + h * size, FLOAT32);
            rotate(own + h * size, table, size);
        }
        float *k = own + heads * size, *v = k + row;
        const int64_t *slots = step->slot_mapping + t * step->parts;
        keep(step, k, kv_heads, size, slots[place->key_part], place->keys, place->key_scales);
        keep(step, v, kv_heads, size, slots[place->value_part], place->values, place->value_scales);
    }
}

/* silu(gate) * up, rows of [gate, up]. */
static void gate(const paged_decoder *model, const float *both, size_t rows, void *to) {
    const size_t width = model->intermediate, bytes = bytes_of(model->element);
#pragma omp parallel for schedule(static) if (rows >= FEW)
    for (size_t r = 0; r < rows; r++) {
        const float *x = both + r * 2 * width, *up = x + width;
        char *its = (char *)to + r * width * bytes;
        size_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const vec each = *(const vec *)(x + i);
            store(its, i, each / (1.0f + exp_of(-each)) * *(const vec *)(up + i), model->element);
        }
        for (; i < width; i++) store_one(its, i, x[i] / (1.0f + exp_of(spread(-x[i]))[0]) * up[i], model->element);
    }
}

static void embed(const paged_decoder *model, const paged_step *step, float *to) {
    const size_t hidden = model->hidden, columns = COLUMNS;
#pragma omp parallel for schedule(static) if (step->tokens >= FEW)
    for (int64_t t = 0; t < step->tokens; t++) {
        const size_t id = step->token_ids[t] - model->first_token;
        if (id >= (size_t)model->vocabulary) {
            /* An id of another rank; a smaller one has wrapped around. */
            memset(to + t * hidden, 0, hidden * sizeof(float));
            continue;
        }
        if (model->has_packed_embedding && model->head.codes) {
            paged_code_row(model->head.codes, model->embedding, hidden, id, to + t * hidden);
            continue;
        }
        for (size_t d = 0; d < hidden; d++) {
            size_t at = id * hidden + d;
            if (model->has_packed_embedding) {
                /* The head's own weights: float32 [panels, hidden, columns], bfloat16 [panels, hidden / 2, columns, 2]. */
                const size_t panel = id / columns * hidden * columns, column = id % columns;
                at = model->element == FLOAT32 ? panel + d * columns + column : panel + d / 2 * columns * 2 + column * 2 + d % 2;
            }
            to[t * hidden + d] = load_one(model->embedding, at, model->element);
        }
    }
}

static size_t larger_of(size_t a, size_t b) { return a > b ? a : b; }
static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* The places of intermediate results in the caller's memory; with `work` NULL only the number of bytes counts. */
typedef struct {
    float *hidden, *qkv, *both;
    void *normed, *attended, *gated, *rounded;
    size_t bytes;
} places;

/* Bytes of rounded rows for the product with codes that needs most. */
static size_t room_for_codes(const paged_decoder *model, size_t rows) {
    const size_t hidden = model->hidden, q = model->heads * model->head_size;
    size_t most = 0;
    if (model->head.codes) most = paged_codes_room(model->head.codes, rows, hidden);
    for (int64_t number = 0; number < model->num_layers; number++) {
        const paged_layer *layer = model->layers + number;
        const paged_weights *its[] = {&layer->q, &layer->k, &layer->v, &layer->gate, &layer->up, &layer->mix, &layer->o, &layer->down};
        const size_t depths[] = {hidden, hidden, hidden, hidden, hidden, hidden, layer->mix.packed ? hidden : q, model->intermediate};
        for (int i = 0; i < 8; i++)
            if (its[i]->codes) most = larger_of(most, paged_codes_room(its[i]->codes, rows, depths[i]));
    }
    return most;
}

static places places_of(const paged_decoder *model, size_t rows, char *work) {
    const size_t bytes = bytes_of(model->element), hidden = model->hidden, q = model->heads * model->head_size;
    const size_t qkv = q + 2 * model->kv_heads * model->head_size, width = model->intermediate;
    const size_t sizes[] = {
        rows * hidden * 4,
        rows * larger_of(qkv, 3 * hidden) * 4, /* for a convolution: B, C and x */
        rows * 2 * width * 4,
        rows * hidden * bytes,
        rows * larger_of(q, hidden) * bytes,
        rows * larger_of(width, hidden) * bytes,
        room_for_codes(model, rows),
    };
    size_t at[8] = {0};
    for (int i = 0; i < 7; i++) at[i + 1] = at[i] + rounded(sizes[i]);
    return (places){(float *)(work + at[0]), (float *)(work + at[1]), (float *)(work + at[2]), work + at[3], work + at[4], work + at[5],
                    work + at[6], at[7]};
}

static void multiply(const paged_decoder *model, const places *at, const void *x, size_t rows, size_t depth, const paged_product *products,
                     int64_t count) {
    paged_mixed_products(x, depth, rows, depth, model->element, products, count, at->rounded);
}

int64_t paged_decoder_room(const paged_decoder *model, int64_t rows) { return (int64_t)places_of(model, rows, (char *)0).bytes; }

/* Computes a short convolution without its norm and its last product. B * x is stored in the weights' element, as in states. */
static void convolve(const paged_decoder *model, const paged_layer *layer, const paged_step *step, const paged_place *place, const places *at) {
    const size_t hidden = model->hidden, bytes = bytes_of(model->element);
    const enum element element = model->element;
    const paged_product mix = {layer->mix.packed, layer->mix.bias, at->qkv, 3 * hidden, 3 * hidden, 0, layer->mix.codes};
    multiply(model, at, at->normed, step->tokens, hidden, &mix, 1);
#pragma omp parallel for schedule(static) if (step->tokens >= FEW)
    for (int64_t t = 0; t < step->tokens; t++) {
        const float *b = at->qkv + t * 3 * hidden, *x = b + 2 * hidden;
        char *to = (char *)at->gated + t * hidden * bytes;
        for (size_t d = 0; d < hidden; d++) store_one(to, d, b[d] * x[d], element);
    }
    paged_rows rows = step->rows;
    rows.parts = place->parts;
    rows.offsets = place->offsets;
    rows.units = place->units;
    const paged_convolution call = {at->gated, at->attended, layer->taps, layer->taps_bias, hidden, layer->num_taps, hidden, element, 0};
    paged_convolve(&call, &rows);
#pragma omp parallel for schedule(static) if (step->tokens >= FEW)
    for (int64_t t = 0; t < step->tokens; t++) {
        const float *c = at->qkv + t * 3 * hidden + hidden;
        char *to = (char *)at->attended + t * hidden * bytes;
        for (size_t d = 0; d < hidden; d++) store_one(to, d, c[d] * load_one(to, d, element), element);
    }
}

/* Computes an attention layer without its norm and its last product. */
static void attend(const paged_decoder *model, const paged_layer *layer, const paged_step *step, const paged_place *place,
                   paged_attention_call *attention, const places *at) {
    const size_t rows = step->tokens, hidden = model->hidden, q = model->heads * model->head_size;
    const size_t kv = model->kv_heads * model->head_size, stride = q + 2 * kv;
    const paged_product qkv[] = {
        {layer->q.packed, layer->q.bias, at->qkv, q, stride, 0, layer->q.codes},
        {layer->k.packed, layer->k.bias, at->qkv + q, kv, stride, 0, layer->k.codes},
        {layer->v.packed, layer->v.bias, at->qkv + q + kv, kv, stride, 0, layer->v.codes},
    };
    multiply(model, at, at->normed, rows, hidden, qkv, 3);
    place_heads(model, layer, step, place, at->qkv, stride);
    attention->keys = place->keys;
    attention->values = place->values;
    attention->key_scales = place->key_scales;
    attention->value_scales = place->value_scales;
    attention->key_part = place->key_part;
    attention->value_part = place->value_part;
    attention->window = layer->window;
    model->attend(attention);
}

/* Adds a product to the residual stream, directly or by a sum over ranks. */
static int32_t add(const paged_decoder *model, const places *at, const void *x, size_t rows, size_t depth, const paged_weights *weights) {
    const size_t hidden = model->hidden;
    float *to = model->sum ? at->qkv : at->hidden;
    const paged_product product = {weights->packed, weights->bias, to, hidden, hidden, !model->sum, weights->codes};
    multiply(model, at, x, rows, depth, &product, 1);
    return model->sum ? model->sum(to, at->hidden, rows * hidden) : 0;
}

int32_t paged_decoder_forward(const paged_decoder *model, const paged_step *step) {
    const size_t rows = step->tokens, hidden = model->hidden, size = model->head_size;
    const size_t q = model->heads * size, kv = model->kv_heads * size, stride = q + 2 * kv, width = model->intermediate;
    const places at = places_of(model, rows, step->work);
    paged_attention_call attention = step->attention;
    attention.queries = at.qkv;
    attention.query_stride = stride;
    attention.query_element = FLOAT32;
    attention.out = at.attended;
    attention.out_stride = q;
    attention.out_element = model->element;
    attention.heads = model->heads;
    attention.kv_heads = model->kv_heads;
    attention.key_size = attention.value_size = size;
    attention.scale = model->scale;

    int32_t failed = 0;
    embed(model, step, model->sum ? at.qkv : at.hidden);
    if (model->sum) {
        memset(at.hidden, 0, rows * hidden * sizeof(float));
        failed = model->sum(at.qkv, at.hidden, rows * hidden);
    }
    for (int64_t number = 0; number < model->num_layers && !failed; number++) {
        const paged_layer *layer = model->layers + number;
        norms(model, at.hidden, layer->attention_norm, rows, at.normed);
        const int has_convolution = layer->mix.packed != NULL;
        if (has_convolution)
            convolve(model, layer, step, step->places + number, &at);
        else
            attend(model, layer, step, step->places + number, &attention, &at);
        failed = add(model, &at, at.attended, rows, has_convolution ? hidden : q, &layer->o);
        if (failed) break;
        norms(model, at.hidden, layer->mlp_norm, rows, at.normed);
        const paged_product both[] = {
            {layer->gate.packed, layer->gate.bias, at.both, width, 2 * width, 0, layer->gate.codes},
            {layer->up.packed, layer->up.bias, at.both + width, width, 2 * width, 0, layer->up.codes},
        };
        multiply(model, &at, at.normed, rows, hidden, both, 2);
        gate(model, at.both, rows, at.gated);
        failed = add(model, &at, at.gated, rows, width, &layer->down);
    }
    if (failed) return failed;
    /* Moves the wanted tokens, which rise, to the front. */
    for (int64_t i = 0; i < step->num_wanted; i++)
        memmove(at.hidden + i * hidden, at.hidden + step->wanted[i] * hidden, hidden * sizeof(float));
    for (int64_t i = 0; i < step->num_wanted; i++)
        norm(at.hidden + i * hidden, model->norm, hidden, model->epsilon, step->states + i * hidden, FLOAT32);
    norms(model, at.hidden, model->norm, step->num_wanted, at.normed);
    const paged_product head = {model->head.packed, NULL, step->logits, model->vocabulary, model->vocabulary, 0, model->head.codes};
    multiply(model, &at, at.normed, step->num_wanted, hidden, &head, 1);
    return 0;
}
