"""Strategies of systems that are modelled for comparison: static batches, Orca's regions, TGI's router.

Only strategies.py imports them, where a policy's words choose them.
"""
