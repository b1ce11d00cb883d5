"""KvHintsEnvelope: what each action becomes here, and what is refused before anything is done."""

import json

import pytest
from pydantic import ValidationError

from paged import Hint, HintOutcome
from paged.serving.errors import ApiError
from paged.serving.kv_hints import MAX_DIRECTIVES, KvHintsEnvelope, Origin, Planned, actions_of, level_of, scoped

from ..shown import shown_in  # noqa: TID252

OF_REQUEST = Origin("research", "cmpl-1-0", prompt_len=100)
OF_TURN = Origin("research", "cmpl-1-0", "agent", 100)
WITHOUT = Origin("research")
AGENT = scoped("research", "agent")
DONE = HintOutcome("accepted", "4 blocks are retained.", 64)


def action(kind, payload, version="1.0", name="a1"):
    return {"action_id": name, "action_type": kind, "action_version": version, "payload": payload}


def planned(asked, *actions):
    envelope = KvHintsEnvelope(protocol_version="0.1", message_id="m1", actions=list(actions))
    return actions_of(envelope, asked)


def one(asked, kind, payload, version="1.0"):
    (found,) = planned(asked, action(kind, payload, version))
    return found


def test_priorities_of_1_to_100_are_three_levels_and_0_is_none():
    assert [level_of(each) for each in (0, 1, 33, 34, 66, 67, 100, 5000)] == [0, 1, 1, 2, 2, 3, 3, 3]


def test_vllms_directives_become_retentions_of_prefixes_when_the_request_has_finished():
    directives = [{"start": 0, "end": 32, "priority": 80, "duration": 60}, {"start": 32, "end": None, "priority": 40}]
    found = one(OF_TURN, "kv.retain", {"directives": directives, "waits_for": "tool"})
    whole = Hint(action="retain", session=AGENT, priority=2, waits_for="tool")
    assert found.hints == [Planned(whole, True), Planned(Hint(action="retain", priority=3, lasts=60.0), True, 32)]
    assert found.concluded([DONE, DONE], "research").status == "accepted"
    # Of a request without a session the scheduler keeps it for the end.
    whole, prefix = one(OF_REQUEST, "kv.retain", {"directives": directives}).hints
    assert (whole.hint.request, whole.hint.priority, whole.at_end, prefix.prefix) == ("cmpl-1-0", 2, False, 32)


@pytest.mark.parametrize(("payload", "why"), shown_in("serving/clipped_payloads.txt", "kv.retain"))
def test_a_part_that_cannot_be_done_is_clipped_and_said(payload, why):
    found = one(OF_REQUEST, "kv.retain", json.loads(payload))
    outcome = found.concluded([DONE for _ in found.hints], "research")
    assert outcome.status == "clipped"
    assert why.strip() in outcome.reason


def test_dynamos_actions_are_of_the_session_or_else_of_the_request():
    of_blocks = {
        "execute_at": "request_completion", "include_current_request": True, "block_hashes": ["11", str(2**64 - 1)],
    }  # fmt: skip
    kept = one(OF_TURN, "kv.retain", of_blocks | {"priority": 3, "ttl_seconds": 2.5})
    assert kept.hints == [Planned(Hint(action="retain", session=AGENT, priority=1, lasts=2.5), True)]
    assert one(OF_TURN, "kv.evict", of_blocks).hints == [Planned(Hint(action="demote", session=AGENT), True)]
    assert one(OF_REQUEST, "kv.evict", of_blocks).hints == [Planned(Hint(action="demote", request="cmpl-1-0"), False)]
    by_hash_alone = one(OF_REQUEST, "kv.evict", {"block_hashes": ["11"]})
    assert "without include_current_request it names neither" in by_hash_alone.rejected


@pytest.mark.parametrize(
    ("asked", "kind", "payload", "expected"),
    [
        (OF_TURN, "kv.deref", {}, Planned(Hint(action="end", session=AGENT), True)),
        (OF_TURN, "kv.demote", {}, Planned(Hint(action="demote", session=AGENT), True)),
        (OF_TURN, "kv.demote", {"session_id": "b"}, Planned(Hint(action="demote", session=scoped("research", "b")), False)),
        (OF_TURN, "kv.prefetch", {}, Planned(Hint(action="prefetch", request="cmpl-1-0"), False)),
        (OF_TURN, "kv.pin", {"ttl_seconds": 9}, Planned(Hint(action="pin", session=AGENT, lasts=9, tenant="research"), True)),
        (OF_TURN, "kv.unpin", {}, Planned(Hint(action="unpin", session=AGENT, tenant="research"), True)),
        # Without a session it is of the prompt, so that its outcome is known.
        (OF_REQUEST, "kv.pin", {}, Planned(Hint(action="pin", tenant="research"), True, 100)),
    ],
)  # fmt: skip
def test_other_actions_become_hints_of_ours(asked, kind, payload, expected):
    assert one(asked, kind, payload).hints == [expected]


@pytest.mark.parametrize(("call", "why"), shown_in("serving/rejected_actions.txt", ">>>"))
def test_what_cannot_be_carried_out_is_rejected_by_name(call, why):
    found = eval(call)
    assert found.hints == []
    outcome = found.concluded([], "research")
    assert (outcome.action_id, outcome.status, f"{outcome.reason}\n") == ("a1", "rejected", why)


@pytest.mark.parametrize(("payload", "shown"), shown_in("serving/refused_payloads.txt", "kv.retain"))
def test_a_malformed_payload_is_refused_with_its_field(payload, shown):
    with pytest.raises(ApiError) as error:
        one(OF_REQUEST, "kv.retain", json.loads(payload))
    assert (error.value.status, f"{error.value.param}\n") == (400, f"kv_hints.actions.0.payload.{shown}")


def test_actions_of_one_envelope_may_not_contradict_each_other_and_there_is_a_most_of_directives():
    with pytest.raises(ApiError, match="directives"):
        one(OF_REQUEST, "kv.retain", {"directives": [{"priority": 1}] * (MAX_DIRECTIVES + 1)})
    first = action("kv.retain", {"directives": [{"end": 16, "priority": 30}]})
    with pytest.raises(ApiError, match="priorities must not rise along the tokens: 80 at 16 comes after 30"):
        planned(OF_REQUEST, first, action("kv.retain", {"directives": [{"start": 16, "priority": 80}]}))
    with pytest.raises(ApiError, match="one scope"):
        planned(OF_REQUEST, first, action("kv.retain", {"scope": "b", "directives": []}))


@pytest.mark.parametrize(
    "wrong",
    [{"protocol_version": "2.0"}, {"protocol_version": 1}, {"message_id": ""}, {"actions": [{}]}, {"actions": "a"}, {"more": 1}],
)  # fmt: skip
def test_a_malformed_envelope_is_refused(wrong):
    with pytest.raises(ValidationError):
        KvHintsEnvelope.model_validate({"protocol_version": "0.1", "message_id": "m1", "actions": []} | wrong)


def test_an_outcome_of_several_hints_is_clipped_if_one_is_not_done_and_names_no_other_tenant():
    found = one(OF_TURN, "kv.retain", {"directives": [{"priority": 50}, {"end": 16, "priority": 50}]})
    missing = HintOutcome("missing", f'no session "{AGENT}" is known.')
    assert found.concluded([DONE, missing], "research").status == "clipped"
    none = found.concluded([missing, missing], "research")
    assert (none.status, none.num_tokens) == ("missing", 0)
    assert none.reason.endswith('No session "agent" is known.')


def test_of_a_request_that_was_not_finished_what_was_to_come_with_its_end_is_rejected():
    at_end, by_scheduler = one(OF_TURN, "kv.pin", {}), one(OF_REQUEST, "kv.evict", {"include_current_request": True})
    deferred = [HintOutcome("deferred", "it is carried out when it finishes.")]
    for action, begun in ((at_end, []), (by_scheduler, deferred)):
        outcome = action.undone(begun, "research")
        assert (outcome.status, outcome.reason) == ("rejected", "The request was not finished.")
    elsewhere = one(OF_TURN, "kv.pin", {"session_id": "b"})
    assert elsewhere.undone([DONE], "research").status == "accepted"
