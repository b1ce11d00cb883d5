"""Checks and helpers for all packages: numbers from callers, growing arrays, and objects that cannot be copied."""
