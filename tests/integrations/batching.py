"""transformers' continuous batching on a model of two layers, run step by step in the test's own thread."""

from functools import cache

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from paged.integrations.transformers import install


@cache
def tiny_llama():
    """The same random weights every time, large enough that greedy text does not repeat one word at once."""
    config = LlamaConfig(
        vocab_size=7, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for name, weights in model.named_parameters():
                if "norm" not in name:
                    weights.normal_(0.0, 0.6)
    return model


@cache
def alone(prompt, num_tokens):
    """What `generate` answers to this prompt, a tuple of token ids, when it is alone; greedy."""
    given = torch.tensor([prompt])
    with torch.no_grad():
        found = tiny_llama().generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1,
            pad_token_id=0,
        )  # fmt: skip
    return found[0, len(prompt) :].tolist()


def manager_of(**sizes):
    greedy = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    usual = {"page_size": 4, "num_blocks": 12, "max_batch_tokens": 16, "max_requests_per_batch": 4}
    config = ContinuousBatchingConfig(**usual | sizes)
    return tiny_llama().init_continuous_batching(generation_config=greedy, continuous_batching_config=config)


class Stepped:
    """A manager whose loop runs here: `step` is what its thread does once."""

    def __init__(self, *, policy="paged", costs=None, num_answers=1, **sizes):
        self.manager = manager_of(**sizes)
        # A GenerationConfig takes several only where they are sampled, and then nothing says what they have to be.
        self.manager.num_return_sequences = num_answers
        self.installed = install(self.manager, policy=policy, costs=costs)
        self.manager.batch_processor = self.processor = self.manager._create_batch_processor()
        self.scheduler = self.installed.scheduler
        self.decisions = self.scheduler.decisions
        self.ended = {}

    def close(self):
        model = self.manager.model
        model.destroy_cached_continuous_batching_manager()
        if self.manager._original_attn_impl is not None:
            model.set_attn_implementation(self.manager._original_attn_impl)

    def add(self, prompt, num_tokens=8, **more):
        return self.manager.add_request(list(prompt), max_new_tokens=num_tokens, **more)

    def step(self):
        """Whether anything ran."""
        with torch.no_grad():
            ran = self.processor.prepare_next_batch()
            if ran:
                self.processor._generation_step(self.manager.model)
                self.processor.update_batch()
        assert self.scheduler.check() == []
        while not self.manager.output_router.output_queue.empty():
            output = self.manager.output_router.output_queue.get()
            if output.is_finished():
                assert output.request_id not in self.ended
                self.ended[output.request_id] = output
        return ran

    def run(self, most=2_000):
        for _ in range(most):
            if not self.step() and not self.processor.has_pending_requests() and self.manager.input_queue.empty():
                return
        raise AssertionError(f"requests are left after {most} steps: {self.decisions.counts()}")
