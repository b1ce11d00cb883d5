"""Weights of linear layers in 8 and 4 bits.

names.py       how weights can be quantised at load, without torch
at_load.py     which layers are quantised at load, and what is refused
weights.py     what such a weight is, whoever made it; making one from floats, and floats from one
"""
