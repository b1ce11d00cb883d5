/* A decoder of Llama's family from token ids to logits in one call: Llama, Mistral, Qwen 2 and 3 and what shares their layers.
 *
 *     hidden += o(attention(rope(norm?(qkv(norm(hidden))))))        K and V go into the pool's slots on the way
 *     hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))
 *
 * The residual stream, sums and norms are float32 whatever the weights are; what enters a product has the weights' element. Each
 * token is computed from its own numbers in one order (products.c, attention.c), so a step's other tokens do not change it.
 */
#include "decoder.h"

#include <math.h>

#include "attention.h"
#include "products.h"
#include "quantised.h"

/* Rows below which a pass over them is not worth a second thread. */
#define FEW 8

/* Sum of squares, in LANES sums and what is left over: one order for one length. */
INLINE float squares_of(const float *x, size_t length) {
    vec sum = {0};
    size_t i = 0;
    for (; i + LANES <= length; i += LANES) sum = fused(*(const vec *)(x + i), *(const vec *)(x + i), sum);
    float total = sum_of(sum);
    for (; i < length; i++) total += x[i] * x[i];
    return total;
}

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

/* Rotary position embedding in halves (Su et al., 2021), as Hugging Face's: table [head size], cosines and then sines. */
INLINE void rotate(float *head, const float *table, size_t size) {
    const size_t half = size / 2;
    for (size_t i = 0; i < half; i++) {
        const float a = head[i], b = head[half + i];
        head[i] = a * table[i] - b * table[half + i];
        head[half + i] = b * table[i] + a * table[half + i];
    }
}

/* A token's K or V of all heads, into its slot of a page; `scales`: of the page, where there are some. */
INLINE void keep(float *x, size_t heads, size_t size, size_t place, char *page, char *scales, int stored) {
    const size_t bytes = row_bytes(size, stored);
    char *to = page + place * heads * bytes;
    if (!IS_QUANTISED(stored)) {
        for (size_t d = 0; d < heads * size; d++) store_one(to, d, x[d], (enum element)stored);
        return;
    }
    bf16 *scale = (bf16 *)scales + place * heads;
    for (size_t h = 0; h < heads; h++) quantise(x + h * size, size, to + h * bytes, scale + h, stored);
}

/* Queries and keys are normed and turned; K and V go to their slots of this layer. */
static void place_heads(const paged_decoder *model, const paged_layer *layer, const paged_step *step, const paged_attention_call *to, float *qkv,
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
        const size_t slot = step->slot_mapping[t], place = slot % to->block_size, page = slot / to->block_size * to->page_bytes;
        keep(k, kv_heads, size, place, (char *)to->keys + page, (char *)to->key_scales + page, to->stored);
        keep(v, kv_heads, size, place, (char *)to->values + page, (char *)to->value_scales + page, to->stored);
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
        const size_t id = step->token_ids[t];
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

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Where each kind of intermediate result lies in the memory that the caller gives; `work` may be NULL, to ask how much it is. */
typedef struct {
    float *hidden, *qkv, *both;
    void *normed, *attended, *gated;
    size_t bytes;
} places;

static places places_of(const paged_decoder *model, size_t rows, char *work) {
    const size_t bytes = bytes_of(model->element);
    const size_t sizes[] = {
        rows * model->hidden * 4,
        rows * (model->heads + 2 * model->kv_heads) * model->head_size * 4,
        rows * 2 * model->intermediate * 4,
        rows * model->hidden * bytes,
        rows * model->heads * model->head_size * bytes,
        rows * model->intermediate * bytes,
    };
    size_t at[7] = {0};
    for (int i = 0; i < 6; i++) at[i + 1] = at[i] + rounded(sizes[i]);
    return (places){(float *)(work + at[0]), (float *)(work + at[1]), (float *)(work + at[2]), work + at[3], work + at[4], work + at[5], at[6]};
}

int64_t paged_decoder_room(const paged_decoder *model, int64_t rows) { return (int64_t)places_of(model, rows, (char *)0).bytes; }

void paged_decoder_forward(const paged_decoder *model, const paged_step *step) {
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

    embed(model, step, at.hidden);
    for (int64_t number = 0; number < model->num_layers; number++) {
        const paged_layer *layer = model->layers + number;
        norms(model, at.hidden, layer->attention_norm, rows, at.normed);
        const paged_product qkv[] = {
            {layer->q.packed, layer->q.bias, at.qkv, q, stride, 0},
            {layer->k.packed, layer->k.bias, at.qkv + q, kv, stride, 0},
            {layer->v.packed, layer->v.bias, at.qkv + q + kv, kv, stride, 0},
        };
        paged_products(at.normed, hidden, rows, hidden, model->element, qkv, 3);
        /* K and V of every layer lie side by side on a page. */
        const char *keys = (const char *)step->pool + number * 2 * step->unit_bytes, *values = keys + step->unit_bytes;
        const size_t scales = IS_QUANTISED(attention.stored) ? attention.block_size * model->kv_heads * sizeof(bf16) : 0;
        attention.keys = keys + scales;
        attention.values = values + scales;
        attention.key_scales = keys;
        attention.value_scales = values;
        place_heads(model, layer, step, &attention, at.qkv, stride);
        attention.window = layer->window;
        model->attend(&attention);
        const paged_product o = {layer->o.packed, layer->o.bias, at.hidden, hidden, hidden, 1};
        paged_products(at.attended, q, rows, q, model->element, &o, 1);
        norms(model, at.hidden, layer->mlp_norm, rows, at.normed);
        const paged_product both[] = {
            {layer->gate.packed, layer->gate.bias, at.both, width, 2 * width, 0},
            {layer->up.packed, layer->up.bias, at.both + width, width, 2 * width, 0},
        };
        paged_products(at.normed, hidden, rows, hidden, model->element, both, 2);
        gate(model, at.both, rows, at.gated);
        const paged_product down = {layer->down.packed, layer->down.bias, at.hidden, hidden, hidden, 1};
        paged_products(at.gated, width, rows, width, model->element, &down, 1);
    }
    /* Of the tokens that are asked for alone, gathered at the front: they come in rising order. */
    for (int64_t i = 0; i < step->num_wanted; i++)
        memmove(at.hidden + i * hidden, at.hidden + step->wanted[i] * hidden, hidden * sizeof(float));
    for (int64_t i = 0; i < step->num_wanted; i++)
        norm(at.hidden + i * hidden, model->norm, hidden, model->epsilon, step->states + i * hidden, FLOAT32);
    norms(model, at.hidden, model->norm, step->num_wanted, at.normed);
    const paged_product head = {model->head, NULL, step->logits, model->vocabulary, model->vocabulary, 0};
    paged_products(at.normed, hidden, step->num_wanted, hidden, model->element, &head, 1);
}
