"""Layouts of pages: tensors that are views of them, a file for each layout.

entries    what a layer keeps of each token: K or V, a latent, an index key
quantised  K or V in 8 or 4 bits, with a scale a token and head
state      one value a sequence: a recurrent state, the tail of a convolution
"""
