/* Products of rows with weights in codes of 8 or 4 bits: see codes.c. */
#ifndef PAGED_CODES_H
#define PAGED_CODES_H

#include <stdint.h>

#include "products.h"

/* What a product's codes mean beside `packed`, which has them in panels of paged_columns() results. A group's inputs are filled up to a multiple
 * of 8: of 8 bits as [panels, inputs / 4, columns, 4], of 4 bits as [panels, inputs / 8, columns, 4], where a byte has the codes of inputs i
 * and, in its upper half, i + 4. */
struct paged_codes {
    const float *scales;  /* [panels, groups, columns] */
    const uint8_t *zeros; /* as scales; NULL: `zero` everywhere */
    const int64_t *order; /* [depth]: the input that each code multiplies; NULL: as they come */
    int64_t group;        /* inputs that share a scale; divides depth */
    int32_t bits, zero;
};

/* Bytes that a product with these codes takes of `work`, for so many rows of so many inputs. */
int64_t paged_codes_room(const paged_codes *codes, int64_t rows, int64_t depth);

/* As paged_products, of products with codes and without. `work` has room for any of those with codes, and begins on a line of the cache. */
void paged_mixed_products(const void *x, int64_t x_stride, int64_t rows, int64_t depth, int32_t element, const paged_product *products,
                          int64_t count, void *work);

/* The numbers that a result's weights stand for, [depth], in the inputs' own order. */
void paged_code_row(const paged_codes *codes, const void *packed, int64_t depth, int64_t result, float *to);

#endif
