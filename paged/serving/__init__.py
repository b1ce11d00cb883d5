"""Requests over HTTP: the server, its engine in a process of its own, and what one sees of it.

    client ──HTTP──> front: tokenizer, limits, streams ──ZeroMQ──> engine process: scheduler, memory, model

Knows OpenAI's interface, clients and their limits. Does not know how a step is made. Needs the `serve` extra.
"""
