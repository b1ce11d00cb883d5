"""Attention in C, compiled on the machine that runs it: it reads K and V where they lie, and needs a compiler once.

vector.h, amx.h, matrix.h   vectors as wide as the machine's; matrix units, and products by them
quantised.h                 K and V as they are stored
attention.c, attention.h    one layer's attention of one step
build.py                    a shared library from sources, made at first use and kept
backend.py                  the backend `native`
"""
