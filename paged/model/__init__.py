"""Hugging Face's own decoders on paged memory: loading a model, handing its attention to a backend, running a batch.

`import paged` imports nothing from here, so it does not need torch.
"""
