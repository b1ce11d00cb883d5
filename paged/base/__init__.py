"""What every room checks and counts with: numbers from callers, growing arrays, and objects that cannot be copied."""
