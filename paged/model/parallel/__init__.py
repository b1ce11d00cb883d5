"""A model split over processes, its ranks, each of which has a part of the weights and of the KV heads."""
