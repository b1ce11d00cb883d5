"""Models with state layers on pages of one pool: a hand-made allocator, rows that take turns, states that move with every step."""
