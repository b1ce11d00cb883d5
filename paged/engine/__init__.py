"""Requests on one model: the engine, in one thread, for asyncio, and for a list of prompts."""
