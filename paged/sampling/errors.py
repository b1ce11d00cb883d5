"""What a caller can get wrong about how tokens are chosen. Knows words."""

from paged.block_manager import PagedError


class InvalidSampling(PagedError, ValueError):
    """A sampling parameter outside its range, or two that contradict each other."""
