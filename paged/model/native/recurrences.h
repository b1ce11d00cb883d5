/* Recurrences of state layers, on states that lie on pages: see recurrences.c. */
#ifndef PAGED_RECURRENCES_H
#define PAGED_RECURRENCES_H

#include <stdint.h>

/* The rows of a pass and one piece of their states: `units` units a row, unit u on page parts[u] of a state, offsets[u] bytes from its start. */
typedef struct {
    char *pages;                      /* page_bytes each */
    const int32_t *read, *write;      /* [n, stride]: pages of each row's state before its tokens, and after them; -1: zeros; not written */
    const int64_t *parts, *offsets;   /* [units] */
    const int64_t *starts;            /* [n + 1]: row i has places starts[i] to starts[i + 1] - 1 */
    int64_t page_bytes, stride, units, n;
    int64_t *lacks_memory;            /* becomes 1 if memory is short: results and states are not whole then */
} paged_rows;

/* A short convolution over time, over `taps` tokens, for each channel alone. A state is [channels, taps - 1] of `element`, the last tokens; all units
 * but the last have equally many channels. */
typedef struct {
    const void *x;          /* [places, channels] of `element`, x_stride from place to place */
    void *out;              /* [places, channels] of `element` */
    const float *weight;    /* [taps, channels] */
    const float *bias;      /* [channels] or NULL */
    int64_t channels, taps, x_stride;
    int32_t element, has_silu; /* enum element; whether SiLU follows */
} paged_convolution;

/* The gated delta rule (Yang et al., 2024), and Kimi's, with a decay for each number of a key. A state has a unit a head, float32
 * [key_size, value_size]. */
typedef struct {
    const float *queries, *keys;      /* [places, key_heads, key_size]; each serves heads / key_heads consecutive heads */
    const float *values;              /* [places, heads, value_size] */
    const float *decay;               /* [places, heads, decay_size]: logarithms */
    const float *beta;                /* [places, heads]: the share of the correction */
    float *out;                       /* [places, heads, value_size] */
    int64_t heads, key_heads, key_size, value_size;
    int64_t decay_size;               /* 1 or key_size */
    float scale;                      /* factor of queries */
    int32_t is_normed;                /* whether queries and keys are scaled to length 1 first */
} paged_delta_rule;

/* Mamba 2's selective scan (Dao and Gu, 2024). A state has a unit a head, float32 [head_size, state_size]. */
typedef struct {
    const float *x;                   /* [places, heads, head_size] */
    const float *step;                /* [places, heads]: the time step of a token */
    const float *decay;               /* [heads]: A, below 0 */
    const float *input, *reading;     /* [places, groups, state_size]: B and C; each group serves heads / groups consecutive heads */
    const float *skip;                /* [heads]: D, or NULL */
    float *out;                       /* [places, heads, head_size] */
    int64_t heads, groups, head_size, state_size;
} paged_scan;

/* Mamba 1's selective scan (Gu and Dao, 2023), for each channel alone. A state is float32 [channels, state_size]; all units but the last have
 * equally many channels. */
typedef struct {
    const float *x, *step;            /* [places, channels]; step: the time step of a token */
    const float *decay;               /* [channels, state_size]: A, below 0 */
    const float *input, *reading;     /* [places, state_size]: B and C */
    const float *skip;                /* [channels]: D, or NULL */
    float *out;                       /* [places, channels] */
    int64_t channels, state_size;
} paged_selective_scan;

void paged_convolve(const paged_convolution *call, const paged_rows *rows);
void paged_advance_delta_rule(const paged_delta_rule *call, const paged_rows *rows);
void paged_advance_scan(const paged_scan *call, const paged_rows *rows);
void paged_advance_selective_scan(const paged_selective_scan *call, const paged_rows *rows);

/* Most numbers of a key of the delta rule, and most taps of a convolution. */
#define PAGED_MOST_KEY_SIZE 512
#define PAGED_MOST_TAPS 16

#endif
