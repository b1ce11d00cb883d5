"""Linear layers, and whole decoders of Llama's family, in C on the processor that runs them.

products.c     rows times packed weights, each number summed in one order
decoder.c      token ids to logits in one call
codes.c        rows times weights in codes of 8 or 4 bits, the same way
packed.py      a transformers module's linear layers, packed once
coded.py       linear layers whose weights are codes, put in the place of a module's
fused.py       a transformers module of Llama's family as one call
"""
