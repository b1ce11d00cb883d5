/* A decoder of Llama's family over paged K and V: see decoder.c. */
#ifndef PAGED_DECODER_H
#define PAGED_DECODER_H

#include <stdint.h>

#include "attention.h"

/* Packed as products.h says. */
typedef struct {
    const void *packed;
    const float *bias;
} paged_weights;

typedef struct {
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *query_norm, *key_norm;     /* [head size] or NULL */
    paged_weights q, k, v, o, gate, up, down;
    int64_t window;                         /* as paged_attention_call's */
} paged_layer;

typedef struct {
    const paged_layer *layers;
    const void *embedding; /* [vocabulary, hidden], or the head's packed weights */
    const void *head;      /* packed */
    const float *norm;     /* [hidden] */
    const float *rotary;   /* [positions, head size]: cosines of half a head, then sines */
    void (*attend)(const paged_attention_call *); /* paged_attention, which is in a library of its own */
    int64_t num_layers, hidden, intermediate, heads, kv_heads, head_size, vocabulary;
    float epsilon, scale;
    int32_t element, has_packed_embedding; /* enum element; whether `embedding` is packed */
} paged_decoder;

typedef struct {
    const int64_t *token_ids, *positions, *slot_mapping; /* [tokens] */
    const int64_t *wanted;       /* [num_wanted], rising: tokens whose states and logits are asked for */
    void *pool;                  /* [pages, layers, 2, unit_bytes]: [block_size, kv_heads, head_size], codes behind their scales */
    char *work;                  /* paged_decoder_room bytes */
    float *states, *logits;      /* [num_wanted, hidden] behind the last norm, [num_wanted, vocabulary] */
    int64_t tokens, num_wanted, unit_bytes;
    paged_attention_call attention; /* tables, query_start, seq_lens, table_stride, column_stride, block_size, page_bytes, n, stored */
} paged_step;

int64_t paged_decoder_room(const paged_decoder *model, int64_t rows);

void paged_decoder_forward(const paged_decoder *model, const paged_step *step);

#endif
