"""What `paged demo` runs when torch is there: a real service's arrivals and lengths, over real text, on the model that ships.

Knows traces, a tokenizer and a model runner. Does not know terminals.
"""
