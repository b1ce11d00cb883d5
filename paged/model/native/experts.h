/* Mixtures of experts over packed weights: see experts.c. */
#ifndef PAGED_EXPERTS_H
#define PAGED_EXPERTS_H

#include <stdint.h>

#include "products.h"

/* The activation between an expert's two products, of a gate g and an up u:
 *
 *     g' = min(g, most_gate);  g' / (1 + exp(-slope * (g' + cubic * g'^3))) * (min(max(u, -most_up), most_up) + plus)
 *
 * Without gates there is no second factor; with `is_square` the first one is max(g, 0)^2. */
typedef struct {
    float slope, cubic, most_gate, most_up, plus;
    int32_t is_square;
} paged_activation;

typedef struct {
    const void *x;              /* [rows, hidden], of the weights' element */
    const int64_t *chosen;      /* [rows, choices]: each row's experts; a number outside 0 to experts - 1 adds nothing */
    const float *shares;        /* [rows, choices]: factors of the experts' results */
    float *out;                 /* [rows, hidden] */
    const void *up, *down;      /* packed as in products.h, expert after expert: to all gates and then all ups, [2 * width], or without
                                   gates to [width]; and back to [hidden] */
    const float *up_bias, *down_bias; /* [experts, results] or NULL */
    const paged_product *coded_up, *coded_down; /* [experts]: weights in codes with biases, instead; `to` is not read. NULL: floats */
    char *work;                 /* paged_experts_room bytes */
    int64_t rows, choices, experts, hidden, width;
    int32_t element, has_gates; /* enum element */
    paged_activation activation;
} paged_experts_call;

int64_t paged_experts_room(const paged_experts_call *call);

void paged_experts(const paged_experts_call *call);

#endif
