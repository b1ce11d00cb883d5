"""State layers of transformers' modules, on states that lie in memory of ours: found, called token by token or in chunks, checked."""
