/* Attention over paged K and V: see attention.c. */
#ifndef PAGED_ATTENTION_H
#define PAGED_ATTENTION_H

#include <stdint.h>

/* One layer's attention in one step. Strides are in elements. n sequences, their tokens packed. */
typedef struct {
    const void *queries;           /* [tokens, heads, head_size], query_stride from one token to the next */
    void *out;                     /* [tokens, heads, head_size], out_stride; may be the queries */
    const void *keys, *values;     /* [slots, kv_heads, head_size], without gaps */
    const int32_t *tables;         /* [n, table_stride], blocks of each sequence */
    const int64_t *query_start;    /* [n + 1], the tokens of sequence i are query_start[i] to query_start[i + 1] - 1, its last ones */
    const int64_t *seq_lens;       /* [n], tokens of each sequence, those of this step included */
    const float *sinks;            /* [heads] or NULL: a score that every token of a head sees, and that has no value */
    int64_t query_stride, out_stride, table_stride, block_size;
    int64_t n, heads, kv_heads, head_size;
    int64_t window;                /* a token attends to so many, itself included; 0: to all before it */
    float scale, soft_cap;         /* soft_cap 0: none */
    int32_t pool_element, query_element, out_element; /* enum element */
} paged_attention_call;

#define PAGED_MOST_HEAD_SIZE 256

void paged_attention(const paged_attention_call *call);

#endif
