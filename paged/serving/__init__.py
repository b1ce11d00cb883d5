"""Requests over HTTP: the server, its engine in a process of its own, and what one sees of it.

    client ──HTTP──> front: tokenizer, limits, streams ──ZeroMQ──> engine process: scheduler, memory, model

Needs the `serve` extra.
"""
