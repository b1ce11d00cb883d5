"""Hugging Face's own decoders on paged memory: loading them, handing their attention to a backend, running a batch.

Nothing here is imported before a model is wanted: `paged` itself does without torch.
"""
