/* Products of rows with weights that were packed once: see products.c. */
#ifndef PAGED_PRODUCTS_H
#define PAGED_PRODUCTS_H

#include <stdint.h>

/* How weights are coded: codes.h. */
typedef struct paged_codes paged_codes;

/* Weights of `outs` results of `depth` numbers each. Packed in panels of paged_columns() results, the last one filled up with 0:
 * float32 as [panels, depth, columns], bfloat16 as [panels, depth / 2, columns, 2]. */
typedef struct {
    const void *packed;
    const float *bias; /* [outs] or NULL */
    float *to;         /* [rows, outs], to_stride from row to row */
    int64_t outs, to_stride;
    int32_t adds;      /* whether `to` is kept, and the product comes on top of it */
    const paged_codes *codes; /* of packed codes; NULL: `packed` has numbers */
} paged_product;

/* x[rows, depth], x_stride from row to row, of the weights' element, with each of `count` weights. */
void paged_products(const void *x, int64_t x_stride, int64_t rows, int64_t depth, int32_t element, const paged_product *products,
                    int64_t count);

/* Results in a panel. */
int64_t paged_columns(void);

/* Whether products of bfloat16 have an instruction of their own; else they are computed in float32, at its speed. */
int32_t paged_has_bfloat16(void);

#endif
