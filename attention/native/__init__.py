"""Attention in C, compiled on the machine that runs it: reads K and V where they lie, and needs a compiler once.

vector.h       vectors as wide as the machine's
amx.h          matrix units, where the machine has them
attention.c    one layer's attention of one step
build.py       a shared library from sources, made at first use and kept
backend.py     the backend `native`
"""
