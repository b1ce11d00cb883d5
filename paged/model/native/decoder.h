/* A decoder of Llama's family over paged K and V: see decoder.c. */
#ifndef PAGED_DECODER_H
#define PAGED_DECODER_H

#include <stdint.h>

#include "attention.h"
#include "codes.h"
#include "recurrences.h"

/* Packed as products.h says, or in codes. */
typedef struct {
    const void *packed;
    const float *bias;
    const paged_codes *codes; /* NULL: numbers of the decoder's element */
} paged_weights;

typedef struct {
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *query_norm, *key_norm;     /* [head size] or NULL */
    paged_weights q, k, v, o, gate, up, down; /* for a short convolution, o is the product after it */
    paged_weights mix;                      /* for a short convolution: to B, C and x, [3 * hidden]; else NULL */
    const float *taps, *taps_bias;          /* for a short convolution: paged_convolution's weight and bias */
    int64_t num_taps;
    int64_t window;                         /* that of paged_attention_call */
} paged_layer;

/* The place of a layer's memory. For an attention layer: K and V on page 0 with their scales, and the pages of a block on which they are, as in
 * paged_attention_call; for a short convolution: its units, as in paged_rows. */
typedef struct {
    char *keys, *values, *key_scales, *value_scales;
    const int64_t *parts, *offsets;
    int64_t key_part, value_part, units;
} paged_place;

/* Adds all ranks' parts, [count] each, to `to`. Returns 0, or an error. */
typedef int32_t (*paged_sum)(const float *part, float *to, int64_t count);

typedef struct {
    const paged_layer *layers;
    const void *embedding; /* [vocabulary, hidden], or the head's packed weights */
    paged_weights head;
    const float *norm;     /* [hidden] */
    const float *rotary;   /* [positions, head size]: cosines of half a head, then sines */
    void (*attend)(const paged_attention_call *); /* paged_attention, which is in a library of its own */
    paged_sum sum;         /* for a rank's part of a split model; else NULL */
    int64_t num_layers, hidden, intermediate, heads, kv_heads, head_size, vocabulary;
    int64_t first_token;   /* the first id of the rank's part of the vocabulary; ids of other parts embed as zeros */
    float epsilon, scale;
    int32_t element, has_packed_embedding; /* enum element; whether `embedding` is packed */
} paged_decoder;

typedef struct {
    const int64_t *token_ids, *positions; /* [tokens] */
    const int64_t *slot_mapping;          /* [tokens, parts]: on each page of a block; -1: nowhere */
    const int64_t *wanted;       /* [num_wanted], rising: tokens whose states and logits are computed */
    const paged_place *places;   /* [num_layers] */
    char *work;                  /* paged_decoder_room bytes */
    float *states, *logits;      /* [num_wanted, hidden], after the last norm; [num_wanted, vocabulary] */
    int64_t tokens, num_wanted, parts;
    paged_rows rows;             /* rows of states, without units */
    paged_attention_call attention; /* tables, query_start, seq_lens, table_stride, column_stride, block_size, page_bytes, n, stored */
} paged_step;

int64_t paged_decoder_room(const paged_decoder *model, int64_t rows);

/* Returns 0, or the error of a sum; then all results are invalid. */
int32_t paged_decoder_forward(const paged_decoder *model, const paged_step *step);

#endif
