"""The outputs of each request in a step, in vLLM's form.

Most outputs are a request's id and one token; all of these are made at once. Further fields (log-probabilities, the prompt's
prefix hit in the first output, events, a grammar's verdict) are filled in one by one.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from paged.errors import WrongAnswer
from paged.integrations.vllm.live import Live
from paged.integrations.vllm.translation import stop_reason_of
from paged.scheduler import FINISH_REASONS, Batch, Outputs

# Below vLLM's own, whose handlers and level are what its users have set.
logger = init_logger(f"vllm.{__name__}")

_REASONS = {
    "stop": (FinishReason.STOP, RequestStatus.FINISHED_STOPPED),
    "length": (FinishReason.LENGTH, RequestStatus.FINISHED_LENGTH_CAPPED),
    "abort": (FinishReason.ABORT, RequestStatus.FINISHED_ABORTED),
    "rejected": (FinishReason.ERROR, RequestStatus.FINISHED_ERROR),
}


def sampled_by_row(batch: Batch, answer: Any, *, drafts: bool) -> tuple[list[int], NDArray[np.int64] | None]:
    """Return the sampled tokens in the order of the batch's rows, packed, and their number for each row, int64 [n] (None: one each). `drafts`: the batch
    may have drafts. Raises WrongAnswer for a row without an output, or with more tokens than its drafts and one."""
    ids, sampled, places = batch.ids.tolist(), answer.sampled_token_ids, answer.req_id_to_index
    if not sampled:
        return [], np.zeros(len(ids), np.int64)
    try:
        rows = [sampled[places[id]] for id in ids]
    except (KeyError, IndexError):
        missing = next(id for id in ids if not 0 <= places.get(id, -1) < len(sampled))
        raise WrongAnswer(f'the runner was given request "{missing}", and its output has nothing of it.') from None
    if not drafts:
        try:
            tokens = [token for (token,) in rows]
        except ValueError:
            # Some rows are in the middle of their prompts.
            pass
        else:
            if batch.samples.all():
                return tokens, None
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    if len(counts) and int(counts.max()) > 1 and (counts > batch.num_drafts + 1).any():
        place = int((counts > batch.num_drafts + 1).argmax())
        raise WrongAnswer(
            f'the runner sampled {counts[place]} tokens for request "{ids[place]}", which has {batch.num_drafts[place]} drafts.'
        )
    return list(chain.from_iterable(rows)), counts


class Answers:
    """Makes outputs, and keeps the requests whose outputs have more than tokens.

    grammars    vLLM's StructuredOutputManager
    block_size  of cached prompt tokens; 0: nothing is cached
    """

    def __init__(self, grammars: Any, block_size: int) -> None:
        self.num_grammars = 0
        self._block_size = block_size
        self._grammars = grammars
        # Requests whose next output has more than tokens.
        self._special: dict[str, Live] = {}
        self._num_other_clients = 0

    def add(self, live: Live) -> None:
        """Count a request, until `forget`."""
        self.num_grammars += live.request.use_structured_output
        self._num_other_clients += live.request.client_index != 0

    def note(self, live: Live) -> None:
        """Note that the request's next output has more than tokens."""
        self._special[live.id] = live

    def forget(self, live: Live) -> None:
        """Forget a request that has ended."""
        self._special.pop(live.id, None)
        self.num_grammars -= live.request.use_structured_output
        self._num_other_clients -= live.request.client_index != 0

    def made_of(self, outputs: Outputs, lives: dict[str, Live], answer: Any) -> tuple[list[Any], list[Live]]:
        """Make the outputs of a step. Return them, and the requests that have ended with it."""
        ids, counts, tokens = outputs.ids.tolist(), outputs.counts, outputs.token_ids.tolist()
        if len(tokens) == len(ids) and (not ids or int(counts.min()) == 1):
            packed = [[token] for token in tokens]
        else:
            stops = counts.cumsum().tolist()
            packed = [tokens[stop - count : stop] for stop, count in zip(stops, counts.tolist())]
        made = list(map(EngineCoreOutput, ids, packed))
        ended = []
        for place in outputs.finish.nonzero()[0].tolist():
            ended.append(_end(lives[ids[place]], made[place], str(FINISH_REASONS[int(outputs.finish[place])])))
        for other in outputs.others:
            live = lives.get(other.id)
            if live is not None:
                made.append(EngineCoreOutput(other.id, other.token_ids))
                if other.finish_reason is not None:
                    ended.append(_end(live, made[-1], other.finish_reason))
        if self._special:
            for output in made:
                live = self._special.get(output.request_id)
                if live is not None and self._put_in_the_rest(live, output, answer):
                    ended.append(live)
        if answer.num_nans_in_logits is not None:
            for output in made:
                output.num_nans_in_logits = answer.num_nans_in_logits.get(output.request_id, 0)
        if len(tokens) < len(made):
            made = [output for output in made if output.new_token_ids or output.finish_reason is not None]
        return made, ended

    def refusal_of(self, live: Live) -> Any:
        """Make the only output of a request that is refused."""
        live.request.status = RequestStatus.FINISHED_ERROR
        return EngineCoreOutput(
            live.id,
            [],
            finish_reason=FinishReason.ERROR,
            events=live.request.take_events(),
            trace_headers=live.request.trace_headers,
        )

    def by_client(self, made: list[Any], lives: dict[str, Live]) -> dict[int, list[Any]]:
        """Group outputs by client."""
        if not self._num_other_clients:
            return {0: made} if made else {}
        clients: dict[int, list[Any]] = {}
        for output in made:
            clients.setdefault(lives[output.request_id].request.client_index, []).append(output)
        return clients

    def _put_in_the_rest(self, live: Live, output: Any, answer: Any) -> bool:
        """Fill in the further fields of an output. Return whether a grammar or a repetition, and nothing else, has ended the request here."""
        request, tokens, sampling = live.request, output.new_token_ids, live.request.sampling_params
        has_ended = live.is_watched and bool(tokens) and self._watch(live, output)
        place = answer.req_id_to_index.get(live.id)
        if sampling.num_logprobs is not None and answer.logprobs and place is not None:
            output.new_logprobs = answer.logprobs.slice_request(place, len(tokens))
        output.new_prompt_logprobs_tensors = answer.prompt_logprobs_dict.get(live.id)
        output.events = request.take_events()
        output.trace_headers = request.trace_headers
        stats = request.take_prefill_stats()
        if stats is not None:
            size = self._block_size
            stats.finalize(request.num_prompt_tokens // size * size if size else 0)
            output.prefill_stats = stats
        if not live.wants_more:
            del self._special[live.id]
        return has_ended

    def _watch(self, live: Live, output: Any) -> bool:
        """Add the new tokens to vLLM's own Request, and return whether a grammar or a repetition ends it; tokens after that are cut off."""
        request, repetition = live.request, live.request.sampling_params.repetition_detection
        tokens, had_ended = output.new_token_ids, output.finish_reason is not None
        for place, token in enumerate(tokens, 1):
            request.append_output_token_ids(token)
            is_last = had_ended and place == len(tokens)
            enough = request.num_output_tokens >= request.sampling_params.min_tokens
            if (
                repetition is not None
                and not is_last
                and enough
                and check_sequence_repetition(request.output_token_ids, repetition)
            ):
                output.new_token_ids, output.finish_reason = tokens[:place], FinishReason.REPETITION
                request.stop_reason = output.stop_reason = "repetition_detected"
                request.status = RequestStatus.FINISHED_REPETITION
                break
        if not self._grammars.accept_tokens(request, output.new_token_ids):
            logger.error(
                'paged: request "%s": its grammar does not take %s, which was sampled under it.', live.id, tokens
            )
            output.finish_reason, request.status = FinishReason.ERROR, RequestStatus.FINISHED_ERROR
        return output.finish_reason is not None and not had_ended


def _end(live: Live, output: Any, reason: str) -> Live:
    request = live.request
    output.finish_reason, request.status = _REASONS[reason]
    if reason == "stop" and output.new_token_ids:
        output.stop_reason = request.stop_reason = stop_reason_of(request, output.new_token_ids[-1])
    return live


def speculation_of(batch: Batch, counts: NDArray[np.int64], num_drafts: int) -> Any:
    """Return the statistics of a step's drafts; None without drafts, or without answers to them."""
    places = ((batch.num_drafts > 0) & (counts > 0)).nonzero()[0]
    if not len(places):
        return None
    stats = SpecDecodingStats.new(num_drafts)
    for drafted, given in zip(batch.num_drafts[places].tolist(), counts[places].tolist()):
        stats.observe_draft(num_draft_tokens=drafted, num_accepted_tokens=given - 1)
    return stats


def packed_for_clients(
    clients: dict[int, list[Any]], finished: dict[int, set[str]] | None, stats: Any
) -> dict[int, Any]:
    """Return EngineCoreOutputs by client, with the statistics for one of them, and the ended requests of each if `finished` has them."""
    packed = {client: EngineCoreOutputs(outputs=made) for client, made in clients.items()}
    for client, ids in (finished or {}).items():
        packed.setdefault(client, EngineCoreOutputs()).finished_requests = ids
    if stats is not None:
        if not packed:
            packed[0] = EngineCoreOutputs()
        next(iter(packed.values())).scheduler_stats = stats
    return packed
