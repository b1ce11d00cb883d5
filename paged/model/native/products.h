/* Products of rows with packed weights: see products.c. */
#ifndef PAGED_PRODUCTS_H
#define PAGED_PRODUCTS_H

#include <stdint.h>

/* How weights are coded: codes.h. */
typedef struct paged_codes paged_codes;

/* Weights [outs, depth], packed in panels of paged_columns() results, the last one padded with 0: float32 as [panels, depth, columns], bfloat16
 * as [panels, depth / 2, columns, 2]. */
typedef struct {
    const void *packed;
    const float *bias; /* [outs] or NULL */
    float *to;         /* [rows, outs], with to_stride from row to row */
    int64_t outs, to_stride;
    int32_t adds;      /* whether the product is added to `to` */
    const paged_codes *codes; /* if `packed` has codes; NULL: it has floats */
} paged_product;

/* Multiplies x [rows, depth], with x_stride from row to row, of the weights' element, by each of `count` weights. */
void paged_products(const void *x, int64_t x_stride, int64_t rows, int64_t depth, int32_t element, const paged_product *products,
                    int64_t count);

/* Results in a panel. */
int64_t paged_columns(void);

/* Whether products of bfloat16 have instructions; else they are computed in float32, at its speed. */
int32_t paged_has_bfloat16(void);

/* Whether products of bfloat16 use tiles (AMX): the processor has them, and the system allows them. */
int32_t paged_has_tiles(void);

#endif
