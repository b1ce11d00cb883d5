/* The work of products in pieces, a panel of one of them with a chunk of rows each, over threads. */
#ifndef PAGED_PANELS_H
#define PAGED_PANELS_H

#include "products.h"
#include "vector.h"

/* Rows that one piece of work has, where there are many: a multiple of ROWS. */
#define CHUNK 96

/* Rows first to last - 1 with one panel of a product; `x` is what the caller says of its rows. */
typedef void (*panel_work)(const void *x, size_t first, size_t last, const paged_product *product, size_t panel);

/* All rows with all panels; `choose` says what computes those of a product. */
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
