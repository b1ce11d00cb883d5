"""Linear layers, experts, recurrences, and whole decoders of Llama's family, in C for the processor that runs them.

products.c, packed.py            rows times packed weights, each number summed in one order; a module's linear layers, packed once
codes.c, coded.py                the same with weights in codes of 8 or 4 bits
experts.c, experts.py            rows through the experts that they chose; a module's experts, packed once
recurrences.c, recurrences.py    recurrences of state layers, on states that lie on pages
decoder.c, fused.py              token ids to logits in one call
large_pages.py                   memory for packed weights
"""
