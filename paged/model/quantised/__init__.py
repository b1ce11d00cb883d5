"""Weights of linear layers in 8 and 4 bits.

weights.py     what such a weight is, whoever made it; making one from floats, and floats from one
"""
