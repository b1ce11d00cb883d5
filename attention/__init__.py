"""Attention over paged KV memory: pools of tensors, slot mappings, and the backends that read them through block tables.

Empty in this version. It will know tensors and nothing of requests, ref counts or policies: it imports neither
`block_manager` nor `scheduler`, and torch only when a backend is asked for.
"""

__all__: list[str] = []
