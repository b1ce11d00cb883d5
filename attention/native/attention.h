/* Attention over paged K and V: see attention.c. */
#ifndef PAGED_ATTENTION_H
#define PAGED_ATTENTION_H

#include <stdint.h>

/* One layer's attention in one step, for n sequences with packed tokens. Strides are in elements. Of a block table only
 * entries that the sequence's tokens see are read. */
typedef struct {
    const void *queries;           /* [tokens, heads, key_size], query_stride from one token to the next */
    void *out;                     /* [tokens, heads, value_size], out_stride; may be the queries */
    const char *keys, *values;     /* of page 0: [block_size, kv_heads, key_size] and [.., value_size] without gaps; page_bytes to the next page's */
    const char *key_scales, *value_scales; /* bfloat16 [block_size, kv_heads] of page 0, where keys and values are codes; else NULL */
    const int32_t *tables;         /* [n, table_stride], column_stride pages for each block */
    const int64_t *query_start;    /* [n + 1], the tokens of sequence i are query_start[i] to query_start[i + 1] - 1, its last ones */
    const int64_t *seq_lens;       /* [n], tokens of each sequence, those of this step included */
    const float *sinks;            /* [heads] or NULL: one more score for each head, without a value */
    int64_t query_stride, out_stride, table_stride, column_stride, block_size, page_bytes;
    int64_t key_part, value_part;  /* which of a block's pages K and V lie on */
    int64_t n, heads, kv_heads, key_size, value_size;
    int64_t window;                /* a token attends to the last `window` tokens, itself included; 0: no window */
    int64_t chunk;                 /* a token attends to tokens from the last multiple of `chunk` on; 0: no chunks */
    float scale, soft_cap;         /* soft_cap 0: none */
    int32_t stored, query_element, out_element; /* K and V as quantised.h has them; enum element */
} paged_attention_call;

#define PAGED_MOST_HEAD_SIZE 256

void paged_attention(const paged_attention_call *call);

#endif
