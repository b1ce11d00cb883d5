"""Decoding on forks of paged memory: drafts of several kinds, searches, and where a text ends."""
