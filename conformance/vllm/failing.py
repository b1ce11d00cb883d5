"""vLLM's example connector, whose loads fail: nothing is written, and the blocks are reported. Knows vLLM's example."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class FailingConnector(ExampleConnector):
    """The worker's side loads nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing of what the step asks for, and remember its blocks."""
        size = self._block_size
        wanted = [each for each in self._get_connector_metadata().requests if not each.is_store]
        self._failed = {int(slot) // size for each in wanted for slot in each.slot_mapping[::size]}

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of this step's loads."""
        failed, self._failed = getattr(self, "_failed", set()), set()
        return failed
