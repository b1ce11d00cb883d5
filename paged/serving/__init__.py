"""Requests over HTTP: the server, its engine in a process of its own, and its dashboard, metrics and events.

    client ──HTTP──> front: tokenizer, limits, streams ──ZeroMQ──> engine process: scheduler, memory, model

Needs the `serve` extra.
"""
