/* The work of products over threads, in pieces of one panel of a product and a chunk of rows. */
#ifndef PAGED_PANELS_H
#define PAGED_PANELS_H

#include "products.h"
#include "vector.h"

/* Most rows of a piece of work: a multiple of ROWS. */
#define CHUNK 96

/* Multiplies rows first to last - 1 by one panel of a product; `x` is the caller's description of its rows. */
typedef void (*panel_work)(const void *x, size_t first, size_t last, const paged_product *product, size_t panel);

/* Multiplies all rows by all panels; `choose` returns the function for a product. */
INLINE void over_panels(const void *x, int64_t rows, const paged_product *products, int64_t count,
                        panel_work (*choose)(const paged_product *product, const void *x)) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += (products[i].outs + COLUMNS - 1) / COLUMNS;
    const int64_t chunks = (rows + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int64_t number = 0; number < total; number++)
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            int64_t product = 0, panel = number, panels;
            while (panel >= (panels = (products[product].outs + COLUMNS - 1) / COLUMNS)) {
                panel -= panels;
                product++;
            }
            const int64_t first = chunk * CHUNK, last = first + CHUNK < rows ? first + CHUNK : rows;
            choose(products + product, x)(x, first, last, products + product, panel);
        }
}

INLINE void add_bias(const paged_product *product, size_t first, size_t last, size_t column, size_t width) {
    if (!product->bias) return;
    float *to = product->to + column;
    for (size_t r = first; r < last; r++)
        for (size_t c = 0; c < width; c++) to[r * product->to_stride + c] += product->bias[column + c];
}

#endif
