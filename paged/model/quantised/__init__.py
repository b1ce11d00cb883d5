"""Weights of linear layers in codes of 8 and 4 bits.

names.py         kinds of quantisation, and the bytes of codes, without torch
weights.py       a weight in codes; making one of floats, and floats of one
at_load.py       quantisation of floats when a model is loaded
placing.py       putting codes into the layers that transformers builds

checkpoints.py   a folder whose layers are stored as codes: its format, its layers, each layer's codes
gptq.py, awq.py, compressed.py
                 the tensors of a layer in each format
stored.py        checks of a layer's tensors; codes that share a word
files.py         safetensors of a folder, one tensor at a time
reading.py       the same, by the names in transformers' module
writing.py       writing a checkpoint of floats again in codes
"""
