"""Decoding on forks of paged memory: drafts of several kinds, searches, and where a text ends.

Knows tokens, their likelihoods and the scheduler's rows. Does not know logits: what is guessed here is checked where every token is chosen.
"""
