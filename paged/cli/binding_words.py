"""Sentences about an answer: how its token budget was chosen, and which limit binds it."""

import math

from paged.cli.plan_words import unit_of, value_of
from paged.cli.show import as_time
from paged.study.simulator import Binding, Effect, Plan


def why(plan: Plan, binding: Binding | None) -> list[str]:
    """All of it, a sentence a line; None: what binds was not sought."""
    said = [budget_of(plan), *([] if binding is None else binding_lines(plan, binding))]
    return [line for line in said if line]


def binds(binding: Binding) -> str:
    """What binds, in a word."""
    return binding.binds.knob if binding.binds is not None else "–"


def budget_of(plan: Plan) -> str:
    """That a token budget was chosen, and why. Nothing where it was named, or is the policy's own."""
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
    """What binds, a sentence a line."""
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
    """What was changed, and what the answer is then."""
    assert effect.answer is not None
    return f"with {step_words(plan, effect)}: {value_of(plan, effect.answer)}"


def step_words(plan: Plan, effect: Effect) -> str:
    """What was changed by a step."""
    if effect.knob == "memory":
        return f"{effect.becomes:,.0f} {unit_of(plan)}s instead of {effect.was:,.0f}"
    if effect.knob == "token budget":
        return f"{effect.becomes:,.0f} tokens a step instead of {effect.was:,.0f}"
    if effect.knob == "rows":
        return f"{effect.becomes:,.0f} sequences instead of {effect.was:,.0f}"
    if effect.knob == "host" and math.isinf(effect.becomes):
        return "no time for the host"
    return f"{effect.knob} × {effect.becomes:g}"
