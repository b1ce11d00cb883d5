"""Tensor parallelism: a model split over processes, its ranks, each with a part of the weights and of the KV heads."""
