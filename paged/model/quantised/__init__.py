"""Weights of linear layers in 8 and 4 bits.

names.py       how weights can be quantised at load, without torch
at_load.py     which layers are quantised at load, and what is refused
weights.py     what such a weight is; making one from floats, and floats from one

checkpoints.py a folder whose layers are stored as codes: its format, its layers, each layer's codes
gptq.py, awq.py, compressed.py
               the tensors of a layer in each format
stored.py      what tensors of a layer have to be; codes that share a word
files.py       safetensors of a folder, one tensor at a time
reading.py     the same, by names and shapes in the module that transformers builds
placing.py     codes to the layers that transformers builds
writing.py     a checkpoint of floats written again in codes
"""
