"""Plans as text and as JSON: the tried values, the answer in a sentence, by how much the targets were missed, and what binds."""

import math
from collections.abc import Callable, Sequence

import msgspec

from paged.base.budget import as_bytes
from paged.base.words import counted
from paged.cli.scenario_options import device_document
from paged.cli.show import as_time, printed, table
from paged.cli.trace_words import described, print_limits, unsettled
from paged.study.simulator import UNBOUNDED, Binding, Effect, Miss, P99s, Plan, Progress, Scenario
from paged.study.simulator.trace_facts import per_second

_LATENCIES = {"ttft_s": "p99 first", "gap_s": "p99 gap", "itl_s": "p99 between"}
_NO_VALUE = ["–"] * len(_LATENCIES)
_HARDEST = {"rate": "highest rate", "memory": "smallest memory", "devices": "fewest replicas"}
_ANY = {"rate": "rate", "memory": "memory", "devices": "number of replicas"}
_END = {
    "rate": "the highest that is tried",
    "memory": "all that the longest request takes",
    "devices": "the least there is",
}


def as_document(plan: Plan, binding: Binding | None = None) -> dict[str, object]:
    """Return the JSON of a plan: the answer and what binds first, then the question and the tried values."""
    scenario, found = plan.scenario, msgspec.to_builtins(plan)
    del found["scenario"]
    asked = {
        "trace": scenario.load.trace,
        "policy": policy_of(scenario),
        "tensor_parallel": scenario.device.tensor_parallel,
        **device_document(scenario.device),
        "notes": [*filter(None, [unsettled(plan.load)]), *scenario.device.notes()],
        "rate_scale": scenario.load.rate,
        "seed": scenario.load.seed,
        "max_tokens_per_step": scenario.max_tokens_per_step,
    }
    first = {
        "find": plan.find,
        "answer": plan.answer,
        "missed": plan.missed,
        "requests_per_s": _per_s(plan, plan.answer) if plan.find == "rate" and plan.answer is not None else None,
        "best": plan.best.value,
        "cost_per_hour": plan.cost_per_hour,
        "cost_per_million_tokens": plan.cost_per_million_tokens,
        "binding": msgspec.to_builtins(binding),
    }
    probes = [{"met": probe.met, **shown} for probe, shown in zip(plan.probes, found["probes"])]
    return first | asked | found | {"probes": probes}


def in_order(plan: Plan) -> Plan:
    """Return a plan with its tried values in rising order."""
    return msgspec.structs.replace(plan, probes=tuple(sorted(plan.probes, key=lambda probe: probe.value)))


def print_probes(plan: Plan, why: Sequence[str] = ()) -> None:
    """Print all tried values, the answer if there is one, and then these lines."""
    columns = [*_value_columns(plan), *_LATENCIES.values(), "outcome", "steps", "took"]
    rows = [
        [
            *_value_cells(plan, probe.value),
            *_p99_cells(probe.p99),
            "; ".join(map(missed, probe.misses)) or "met",
            f"{probe.steps:,}",
            as_time(probe.wall_s),
        ]
        for probe in plan.probes
    ]
    outcome = columns.index("outcome")
    table(_title(plan), columns, rows, right=[i for i in range(len(columns)) if i != outcome])
    said = [] if plan.answer is None else [answer(plan), *remarks(plan)]
    for line in [
        *said[:1],
        *why,
        *said[1:],
        f"{described(plan.load)}.",
        f"Steps are timed by {plan.scenario.device.timed_by()}.",
    ]:
        printed(line)
    print_limits([plan.scenario], [plan.load])


def print_answers(plans: Sequence[Plan], binds: Sequence[str] = ()) -> None:
    """Print a line for each plan; all look for the same, with one trace. `binds`: a word for each plan, or none."""
    varied = [(name, value) for name, value in _VARIED if len({value(plan) for plan in plans}) > 1]
    columns = ["policy", *(name for name, _ in varied), *_value_columns(plans[0]), *_LATENCIES.values(), "misses at"]
    columns += ["binds"] if binds else []
    rows = []
    for place, plan in enumerate(plans):
        cells = [policy_of(plan.scenario), *(value(plan) for _, value in varied)]
        if plan.answer is None:
            cells += ["none", *_NO_VALUE[1 : len(_value_columns(plan))], *_NO_VALUE]
        else:
            cells += [*_value_cells(plan, plan.answer), *_p99_cells(plan.best.p99)]
        rows.append([*cells, "–" if plan.missed is None else _plain(plan.missed), *binds[place : place + 1]])
    table(_title(plans[0]), columns, rows, right=range(1, len(columns)))
    is_paced = len({plan.scenario.load.rate for plan in plans}) == 1
    printed(f"{described(plans[0].load, with_pace=is_paced)}.")
    print_limits([plan.scenario for plan in plans], [plan.load for plan in plans])


def answer(plan: Plan) -> str:
    """Return the answer in a sentence."""
    assert plan.answer is not None
    said = f"{_HARDEST[plan.find].capitalize()} with {targets_of(plan)}: {value_of(plan, plan.answer)}"
    if plan.missed is None:
        return f"{said}, {_END[plan.find]}."
    nearest = next(probe for probe in plan.probes if probe.value == plan.missed)
    return f"{said}; missed at {value_of(plan, plan.missed)}: {'; '.join(map(missed_by, nearest.misses))}."


def nothing_meets(plan: Plan) -> str:
    """Return a sentence: no value meets the targets, and by how much the nearest one misses."""
    best = plan.best
    said = f"with policy {policy_of(plan.scenario)} no {_ANY[plan.find]} meets {targets_of(plan)}"
    said += f"; nearest of {len(plan.probes)} tried is {value_of(plan, best.value)}, {'; '.join(map(missed_by, best.misses))}"
    if {miss.promise for miss in best.misses} & {"rejected", "cut_off"} and plan.find != "memory":
        said += f". The pool of {counted(plan.num_blocks, unit_of(plan))} cannot hold these requests whole; --context clips or leaves out what is longer"
    return said


def under_way(progress: Progress, value: float) -> str:
    """Return a line for a search that is trying this value."""
    # The latest probe that met and the latest that missed are the bracket's ends.
    ends = {
        probe.met: f", {_plain(probe.value)} {'meets' if probe.met else 'misses'}" for probe in progress.plan.probes
    }
    return f"{policy_of(progress.plan.scenario)}: trying {_plain(value)}{''.join(ends.values())}"


def missed(miss: Miss) -> str:
    """Return which target was missed."""
    if miss.promise == "rejected":
        return "requests rejected" if miss.found is None else f"{counted(int(miss.found), 'request')} rejected"
    if miss.promise == "cut_off":
        return f"{counted(int(miss.found or 0), 'output token')} cut off"
    return f"{_LATENCIES[miss.promise]} over {as_time(miss.limit)}"


def missed_by(miss: Miss) -> str:
    """Return which target was missed, and by how much if that is known."""
    if miss.found is None or miss.promise not in _LATENCIES:
        return missed(miss)
    over = f"{as_time(miss.found - miss.limit)} over {as_time(miss.limit)}"
    return f"{_LATENCIES[miss.promise]} {as_time(miss.found)}, {over}"


def targets_of(plan: Plan) -> str:
    """Return the targets of a plan."""
    promised = " and ".join(f"{_LATENCIES[name]} within {as_time(seconds)}" for name, seconds in plan.targets.given())
    return promised + (f", with each of {plan.seeds} seeds" if plan.seeds > 1 else "")


def value_of(plan: Plan, value: float) -> str:
    """Return a value with its unit, and what it amounts to."""
    if plan.find == "rate":
        return f"{per_second(_per_s(plan, value))} requests/s ({_plain(value)} × the trace's)"
    if plan.find == "memory":
        return counted(int(value), unit_of(plan)) + (f" ({_kv(plan, value)} of KV a device)" if plan.kv_bytes else "")
    degree = plan.scenario.device.tensor_parallel
    return counted(int(value), "replica") + (f" of {degree} devices" if degree > 1 else "")


def unit_of(plan: Plan) -> str:
    """Return the unit of a plan's memory."""
    return "page" if plan.groups else "block"


def policy_of(scenario: Scenario) -> str:
    """Return the name of a scenario's policy."""
    return scenario.policy if isinstance(scenario.policy, str) else scenario.policy.name


def _plain(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _per_s(plan: Plan, rate: float) -> float:
    return rate * (plan.arrivals_per_s or 0.0)


def _kv(plan: Plan, value: float) -> str:
    return as_bytes(value * (plan.kv_bytes or 0))


def _title(plan: Plan) -> str:
    return f"{plan.scenario.load.trace}: {_HARDEST[plan.find]} with {targets_of(plan)}"


def _value_columns(plan: Plan) -> list[str]:
    if plan.find == "rate":
        return ["× trace", "requests/s"]
    if plan.find == "devices":
        return ["replicas"]
    return [f"{unit_of(plan)}s", *(["KV"] if plan.kv_bytes else [])]


def _value_cells(plan: Plan, value: float) -> list[str]:
    if plan.find == "rate":
        return [_plain(value), per_second(_per_s(plan, value))]
    return [_plain(value), _kv(plan, value)] if plan.find == "memory" and plan.kv_bytes else [_plain(value)]


def _p99_cells(p99: P99s | None) -> list[str]:
    if p99 is None:
        return _NO_VALUE
    return [as_time(getattr(p99, name)) for name in _LATENCIES]


def remarks(plan: Plan) -> list[str]:
    """Return remarks on the answer, a sentence a line."""
    best = plan.best
    quarters = ", ".join(map(as_time, best.ttft_by_quarter_s))
    lines = []
    if plan.cost_per_hour is not None:
        cost, each = plan.cost_per_hour, plan.cost_per_million_tokens
        tokens = "" if each is None else f", {each:,.3g} per million output tokens at the rate at which requests arrive"
        lines.append(f"Cost: {cost:,.2f} an hour{tokens}.")
    lines += [f"Median time to first token by quarter of the trace: {quarters}."]
    if plan.scenario.blocks is None:
        lines.append(f"The device has room for {counted(plan.num_blocks, unit_of(plan))}.")
    if plan.groups:
        lines.append(f"Blocks have {counted(plan.scenario.block_size, 'token')}; {'; '.join(plan.groups)}.")
    if plan.exceptions:
        values = ", ".join(_plain(probe.value) for probe in plan.exceptions)
        lines.append(f"More is not better here: {values} missed, too.")
    return lines


_VARIED: tuple[tuple[str, Callable[[Plan], str]], ...] = (
    ("at", lambda plan: plan.load.pace(plan.scenario.load.rate)),
    ("of blocks", lambda plan: "all" if plan.scenario.blocks is None else f"{plan.scenario.blocks:,}"),
    ("budget", lambda plan: "none" if plan.scenario.budget() == UNBOUNDED else f"{plan.scenario.budget():,}"),
)
"""Columns beside the policy that may tell plans apart."""


def why(plan: Plan, binding: Binding | None) -> list[str]:
    """Return how the token budget was chosen and what binds, a sentence a line; `binding` None: without what binds."""
    said = [budget_of(plan), *([] if binding is None else binding_lines(plan, binding))]
    return [line for line in said if line]


def binds(binding: Binding) -> str:
    """Return what binds, in a word."""
    return binding.binds.knob if binding.binds is not None else "–"


def budget_of(plan: Plan) -> str:
    """Return how the token budget was chosen; "" if it was given, or is the policy's own."""
    weighed = plan.weighed
    if weighed is None:
        return ""
    budget = plan.scenario.budget()
    step = f"a full step takes about {as_time(weighed.step_s)}"
    if weighed.limit_s is not None:
        step += f", where {as_time(weighed.limit_s)} between two tokens are promised"
    if not weighed.against:
        # Nothing is harder than the answer, so no other budget could do better.
        return f"Token budget: {budget:,}, chosen: {step}."
    choices = [budget, *weighed.against]
    said = f"Token budget: {budget:,}, chosen from {min(choices):,} to {max(choices):,}: {step}"
    if budget != weighed.first:
        said += f"; the search began with {weighed.first:,}"
    better = "no other gives a better answer" if plan.answer is not None else "no other meets, either"
    return f"{said}; {better}."


def binding_lines(plan: Plan, binding: Binding) -> list[str]:
    """Return what binds, a sentence a line."""
    if binding.tried_at is None:
        return ["What binds: nothing; the answer is the last value there is."]
    changing = [effect for effect in binding.effects if effect.gain > 1]
    lines = []
    if binding.binds is None:
        lines.append(
            f"What binds: none by itself; with each of these steps {value_of(plan, binding.tried_at)} misses, too."
        )
    else:
        lines.append(f"What binds: {binding.binds.knob}; {effect_words(plan, binding.binds)}.")
        changing.remove(binding.binds)
    if changing:
        lines.append(f"Less so: {'; '.join(f'{effect.knob}, {effect_words(plan, effect)}' for effect in changing)}.")
    same = [step_words(plan, effect) for effect in binding.effects if effect.gain == 1]
    if same:
        lines.append(f"No change with {', '.join(same)}.")
    if binding.not_varied:
        lines.append(f"Not varied: {'; '.join(f'{knob} ({why})' for knob, why in binding.not_varied.items())}.")
    return lines


def effect_words(plan: Plan, effect: Effect) -> str:
    """Return what a step changed, and the answer with it."""
    assert effect.answer is not None
    return f"with {step_words(plan, effect)}: {value_of(plan, effect.answer)}"


def step_words(plan: Plan, effect: Effect) -> str:
    """Return what a step changed."""
    if effect.knob == "memory":
        return f"{effect.becomes:,.0f} {unit_of(plan)}s instead of {effect.was:,.0f}"
    if effect.knob == "token budget":
        return f"{effect.becomes:,.0f} tokens a step instead of {effect.was:,.0f}"
    if effect.knob == "rows":
        return f"{effect.becomes:,.0f} sequences instead of {effect.was:,.0f}"
    if effect.knob == "host" and math.isinf(effect.becomes):
        return "no time for the host"
    return f"{effect.knob} × {effect.becomes:g}"
