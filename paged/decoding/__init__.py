"""Decoding on forks of paged memory: drafts from a sequence's own text, beam searches, and where a text ends.

Knows tokens, their likelihoods and the scheduler's rows. Does not know logits: what is guessed here is checked where every token is chosen.
"""
