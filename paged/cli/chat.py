"""`paged chat`: a conversation in the terminal, each turn of which reuses the last one's blocks."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paged import SamplingParams
from paged.base.words import counted
from paged.cli.commands import takes
from paged.cli.show import console, loading, printed, say
from paged.engine.config import EngineConfig
from paged.errors import InvalidRequest, NeverFits
from paged.model.checkpoint import NAMES

if TYPE_CHECKING:
    from paged.engine.results import Completion, EngineOutput

FAILED = 1


@takes(engine=EngineConfig())
def chat(
    system: Annotated[str | None, typer.Option(help="A system message, before the first question.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of each answer's sampling.", show_default="one of each answer's number")] = None,
    *,
    engine: dict[str, Any],
) -> None:  # fmt: skip
    """Talk to a model. Earlier turns are not computed again: their blocks are in the cache.

    A line is a message; an empty one, or the end of the input, ends the conversation. The model that ships is small, and has only read Python's
    documentation: it continues text, and does not converse. Status 1 if a request failed, or the conversation has become too long.

    Example: `echo "What is a list?" | paged chat`
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    config = EngineConfig.from_environment(**engine)
    with loading(config.model.model):
        from paged import LLM

        llm = LLM(config)
    is_terminal = console().is_terminal and sys.stdin.isatty()
    if is_terminal:
        if config.model.model in (None, *NAMES):
            say("the model that ships continues text from Python's documentation; it does not converse")
        say("an empty line or Ctrl-D ends the conversation")
    messages = [] if system is None else [{"role": "system", "content": system}]
    while line := _message(is_terminal):
        messages.append({"role": "user", "content": line})

        def write(output: "EngineOutput") -> None:
            sys.stdout.write(output.text)
            sys.stdout.flush()

        try:
            (answer,) = llm.chat(messages, params, on_output=write, use_tqdm=False)
        except NeverFits as error:
            say(f"the conversation has become too long, begin another one: {error}")
            raise typer.Exit(FAILED) from None
        printed("")
        if answer.error is not None:
            say(f"no answer: {answer.error}")
            raise typer.Exit(FAILED)
        printed(_shared(answer, llm.engine.manager.block_size))
        messages.append({"role": "assistant", "content": answer.text})


def _message(is_terminal: bool) -> str:
    """Return the next message; "" at the end."""
    if is_terminal:
        sys.stdout.write("> ")
        sys.stdout.flush()
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input: byte {error.object[error.start]:#04x} is not UTF-8.") from None
    if is_terminal and not line:
        # Ctrl-D ends no line.
        printed("")
    return line.strip()


def _shared(answer: "Completion", block_size: int) -> str:
    found, total = 0, -(-len(answer.prompt_token_ids) // block_size)
    if answer.usage is not None:
        found = answer.usage.hit_tokens // block_size
    return f"[{found} of {counted(total, 'block')} of the conversation found; {len(answer.token_ids)} tokens said]"
