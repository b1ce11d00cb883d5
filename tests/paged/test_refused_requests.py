"""Requests and engines that cannot be: each is refused with the reason, and leaves nothing behind."""
# ruff: noqa: F401  # the calls of the file take names from here

import dataclasses
from math import inf, nan

import numpy as np
import pytest
import torch

import paged
from paged import LLM, PagedError, SamplingParams, StructuredOutputsParams
from paged.sampling import sample
from paged.testing.tiny_model import tiny_model

from ..shown import assert_refused, shown_in  # noqa: TID252
from .files_of_others import offered  # noqa: TID252


def form(**description):
    return SamplingParams(structured_outputs=StructuredOutputsParams(**description))


def sampled(logits=None, **wrong):
    """A token for each of three rows, with a column that does not fit them."""
    columns = {"temperature": np.ones(3), "top_k": np.ones(3, np.int64), "top_p": np.ones(3)}
    columns |= {"seeds": np.ones(3, np.uint64), "places": np.ones(3, np.int64)}
    return sample(torch.zeros(3, 5) if logits is None else logits, **columns | wrong)


@pytest.fixture(scope="module")
def llms(model):
    return {"tiny": LLM(tiny_model(), num_blocks=8), "shipped": LLM(model)}


@pytest.mark.parametrize(("call", "shown"), shown_in("paged/fixtures/refused_requests.txt", ">>>"))
def test_what_cannot_be_answered_is_refused_and_leaves_nothing(llms, call, shown):
    assert_refused(call, shown, offered(paged) | globals() | llms, PagedError)
    for llm in llms.values():
        assert not llm.engine.has_unfinished and not llm.engine.scheduler.has_unfinished
