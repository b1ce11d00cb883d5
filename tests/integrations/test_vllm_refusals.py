"""Configurations of vLLM that the plug-in does not carry, options that are wrong, and a vLLM that does not fit: refused before anything runs."""

import re
from abc import abstractmethod
from types import SimpleNamespace

import pytest
from integrations import vllm_things
from integrations.vllm_things import IS_REAL, asked_tier, plug_in, spec
from shown import assert_refused, shown_in

from paged.errors import RefusedByPaged, UnsupportedVllm
from paged.integrations.vllm import Scheduler, needed
from paged.integrations.vllm.refusals import REFUSALS

NGRAM = SimpleNamespace(method="ngram")


def options(given):
    return {"additional_config": {"paged": given}}


def host_tier(host_blocks):
    return {"kv_transfer_config": asked_tier(host_blocks)}


def layers(*kinds, **given):
    return {"specs": [spec(kind, 2, **given) for kind in kinds]}


STATES = layers("FullAttentionSpec", "MambaSpec")
FEATURES = shown_in("integrations/refused_features.txt", ">>>")


@pytest.mark.parametrize(("call", "shown"), [*FEATURES, *shown_in("integrations/refused_by_the_plug_in.txt", ">>>")])
def test_what_is_not_carried_or_is_wrong_is_refused_with_a_sentence(call, shown):
    assert_refused(call, shown, vars(vllm_things) | globals())


def test_every_refusal_is_tried_and_stands_in_the_table_of_the_docs(repository):
    refused = {refusal.feature for refusal in REFUSALS}
    assert refused == {re.search(r"does not carry: (.*) \(", row.values[1])[1] for row in FEATURES}
    page = (repository / "docs" / "integrations" / "vllm.md").read_text()
    told = set(re.findall(r"^\| (.*?) \| refused", page, re.MULTILINE))
    assert refused | {"speculation beside asynchronous scheduling"} <= told


def test_options_come_from_the_environment_too_and_the_configuration_counts(monkeypatch):
    monkeypatch.setenv("PAGED_VLLM", '{"policy": "vllm"}')
    assert plug_in().decisions.policy.name == "vllm"
    assert plug_in(additional_config={"paged": {}}).decisions.policy.name == "paged"
    monkeypatch.setenv("PAGED_VLLM", "policy=vllm")
    with pytest.raises(RefusedByPaged, match="PAGED_VLLM has to be a JSON object"):
        plug_in()


def test_vllms_limits_are_ours():
    core = plug_in(max_num_seqs=5, max_num_batched_tokens=99, max_model_len=33, long_prefill_token_threshold=7)
    limits = core.decisions.limits
    assert (limits.max_sequences, limits.max_tokens_per_step, limits.max_model_len, limits.max_chunk) == (5, 99, 33, 7)
    core = plug_in(max_num_active_seqs=3, max_num_scheduled_tokens=50, enable_chunked_prefill=False)
    limits = core.decisions.limits
    assert (limits.max_sequences, limits.max_tokens_per_step) == (3, 50)
    assert not core.decisions.policy.chunked


def test_what_vllm_lacks_or_wants_besides_is_told_with_the_versions_that_were_tried(monkeypatch):
    all_needed = needed.NEEDED
    needed.must_have_all()
    lacking = {"vllm.v1.request:RequestStatus": ("RUNNING", "ASLEEP"), "vllm.v1.nowhere:Nothing": ()}
    monkeypatch.setattr(needed, "NEEDED", lacking)
    said = r"RequestStatus has no ASLEEP; it has no vllm\.v1\.nowhere\.Nothing.*Tried versions: 0\.32\.0, 0\.33\.0"
    with pytest.raises(UnsupportedVllm, match=said):
        needed.must_have_all()
    name = "vllm.v1.core.sched.output:NewRequestData"
    monkeypatch.setattr(needed, "NEEDED", {name: all_needed[name][1:]})
    with pytest.raises(UnsupportedVllm, match="NewRequestData asks for req_id"):
        needed.must_have_all()


def test_a_method_that_vllm_asks_for_and_ours_lacks_is_told():
    later = type("Scheduler", (Scheduler,), {"wake_up": abstractmethod(lambda self: None)})
    with pytest.raises(UnsupportedVllm, match=r"vLLM .* does not fit: it asks Scheduler for wake_up\. Tried versions"):
        needed.must_define_all(later)


@pytest.mark.skipif(IS_REAL, reason="vLLM is installed here")
def test_all_that_the_plug_in_does_it_does_on_the_interface_of_the_later_version(run_python, repository):
    tests = repository / "tests" / "integrations" / "test_vllm_plug_in.py"
    env = {"VLLM_RECORD": "0.33", "PYTHONPATH": str(repository)}
    ended = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), cwd=repository, env=env)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-2000:]


NOT_HERE = "plugs into vLLM, which is not installed here; paged never installs it. See docs.vllm.ai, or `make vllm`."
RUN = """
import runpy, conformance.vllm.programs
sys.argv = ["run.py"]
runpy.run_module("conformance.vllm.run", run_name="__main__")
"""
WITHOUT = [("import paged.integrations.vllm", NOT_HERE), (RUN, "vLLM is not installed for this Python")]


@pytest.mark.parametrize(("program", "said"), WITHOUT, ids=["plug-in", "conformance"])
def test_without_vllm_the_import_and_the_command_of_the_conformance_say_so(run_without, program, said):
    ended = run_without(["vllm"], program)
    assert ended.returncode == 1
    assert said in ended.stderr.splitlines()[-1]
    assert "During handling" not in ended.stderr
