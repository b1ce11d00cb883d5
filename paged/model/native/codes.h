/* Products of rows with weights in codes of 8 or 4 bits: see codes.c. */
#ifndef PAGED_CODES_H
#define PAGED_CODES_H

#include <stdint.h>

#include "products.h"

/* What a product's codes mean. The product's `packed` has them in panels of paged_columns() results, with a group's inputs padded to a multiple
 * of 8: codes of 8 bits as [panels, inputs / 4, columns, 4], codes of 4 bits as [panels, inputs / 8, columns, 4], where a byte has the codes of
 * inputs i and, in its upper half, i + 4. */
struct paged_codes {
    const float *scales;  /* [panels, groups, columns] */
    const uint8_t *zeros; /* the codes that mean 0, as scales; NULL: `zero` everywhere */
    const int64_t *order; /* [depth]: the input that each code multiplies; NULL: input i for code i */
    int64_t group;        /* inputs that share a scale; divides depth */
    int32_t bits, zero;
};

/* Bytes of `work` that a product with these codes needs. */
int64_t paged_codes_room(const paged_codes *codes, int64_t rows, int64_t depth);

/* As paged_products, for products with and without codes. `work` has room for each product with codes, and begins at a cache line. */
void paged_mixed_products(const void *x, int64_t x_stride, int64_t rows, int64_t depth, int32_t element, const paged_product *products,
                          int64_t count, void *work);

/* The weights of a result as floats, [depth], in the inputs' own order. */
void paged_code_row(const paged_codes *codes, const void *packed, int64_t depth, int64_t result, float *to);

#endif
