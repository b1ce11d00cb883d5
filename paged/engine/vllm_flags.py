"""vLLM's flags that are no settings of ours: granted, because paged always works that way, or refused in one line.

    --enable-chunked-prefill   granted: prompts are always computed in chunks
    --pipeline-parallel-size 2 refused: a model is not split by its layers

Flags with the same meaning as one of our options are second names of it. The same table refuses arguments of vLLM's LLM
that ours does not have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

import msgspec

from paged.errors import InvalidConfig


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """How one of vLLM's flags is treated.

    values    the values that are granted, () if all are refused; None: the flag takes no value
    becomes   our options in its place; empty if none is needed
    granted   a flag without a value is granted
    why       for the message, and for readers
    """

    values: tuple[str, ...] | None = None
    becomes: tuple[str, ...] = ()
    granted: bool = False
    why: str


def _granted(why: str, *becomes: str) -> Flag:
    return Flag(granted=True, becomes=becomes, why=why)


def _refused(why: str) -> Flag:
    return Flag(why=why)


def _valued(why: str, *granted: str) -> Flag:
    return Flag(values=granted, why=why)


_ONE_STAGE = _valued("a model is not split by its layers; --tensor-parallel-size splits each of them.", "1")
_ONE_ENGINE = _valued("one engine runs the model.", "1")
_NO_LORA = "adapters are not served."
_NO_TOOLS = "tool calls are not parsed out of an answer's text."
_FOLDER = "MODEL is a folder, and nothing is fetched."

FLAGS: dict[str, Flag] = {
    "--api-server-count": _valued("one process answers HTTP.", "1"),
    "--pipeline-parallel-size": _ONE_STAGE,
    "-pp": _ONE_STAGE,
    "--data-parallel-size": _ONE_ENGINE,
    "-dp": _ONE_ENGINE,
    "--nnodes": _valued("one machine runs the model.", "1"),
    "--enable-expert-parallel": _refused("experts are not split."),
    "--distributed-executor-backend": _valued(
        "--tensor-parallel-size starts a process a rank, and 1 none.", "uni", "mp"
    ),
    "--enable-chunked-prefill": _granted("prompts are always computed in chunks."),
    "--no-enable-chunked-prefill": _refused("prompts are always computed in chunks."),
    "--async-scheduling": _granted("--steps-ahead 1 is the same.", "--steps-ahead", "1"),
    "--no-async-scheduling": _granted("--steps-ahead 0 is the same.", "--steps-ahead", "0"),
    "--scheduling-policy": _valued(
        "smaller priorities are served first, equal ones as they come, tenants by their shares; without priorities and tenants that is fcfs.",
        "priority",
    ),
    "--scheduler-cls": _valued("--policy names who decides; `paged policies` lists them."),
    "--gpu-memory-utilization": _valued("memory is named in bytes or blocks: --kv-cache-bytes 8G, or --blocks 4096."),
    "--swap-space": _valued("host memory is named in blocks: --host-blocks 4096."),
    "--kv-offloading-size": _valued("host memory is named in blocks: --host-blocks 4096 --host-caching."),
    "--cpu-offload-gb": _valued("all weights lie on the device.", "0"),
    "--prefix-caching-hash-algo": _valued(
        "a hit is equality of tokens, whatever the hash.", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"
    ),
    "--max-num-queued-reqs": _valued("it counts running requests, too; --max-waiting counts those that wait."),
    "--max-num-queued-tokens": _valued(
        "it counts prompts that are being computed, too; --max-waiting-tokens counts those that wait."
    ),
    "--long-prefill-token-threshold": _valued("--max-chunk is the most of one prompt in a step.", "0"),
    "--speculative-config": _valued("drafts are named by --speculate, --num-drafts and --draft-model."),
    "--attention-backend": _valued("--backend names ours; `paged doctor` lists them."),
    "--stream-interval": _valued("each step's tokens are sent as they come.", "1"),
    "--model": _valued("the model is the argument: paged serve MODEL."),
    "--tokenizer": _valued("the tokenizer is that of the model's folder."),
    "--tokenizer-mode": _valued("the tokenizer is that of the model's folder.", "auto"),
    "--trust-remote-code": _granted(
        "no code of a checkpoint is run; a model that needs it is refused when it is loaded."
    ),
    "--load-format": _valued("weights are read from safetensors.", "auto", "safetensors"),
    "--revision": _valued(_FOLDER),
    "--hf-token": _valued(_FOLDER),
    "--download-dir": _valued(_FOLDER),
    "--generation-config": _valued("sampling begins with OpenAI's defaults, not with the folder's.", "vllm"),
    "--chat-template": _valued("the chat template is that of the model's folder."),
    "--enable-lora": _refused(_NO_LORA),
    "--lora-modules": _valued(_NO_LORA),
    "--enable-auto-tool-choice": _refused(_NO_TOOLS),
    "--tool-call-parser": _valued(_NO_TOOLS),
    "--reasoning-parser": _valued("reasoning is not parsed out of an answer's text."),
    "--limit-mm-per-prompt": _valued("prompts are text or token ids."),
    "--runner": _valued("models generate; there are no embeddings.", "auto", "generate"),
    "--enable-prompt-tokens-details": _granted("usage always says how much of a prompt was cached."),
    "--enable-server-load-tracking": _granted("/load always counts."),
    "--enable-request-id-headers": _granted("every answer has X-Request-Id."),
    "--enable-force-include-usage": _refused("a stream says its usage to clients that ask by stream_options."),
    "--disable-log-requests": _granted("--log off is the same.", "--log", "off"),
    "--no-enable-log-requests": _granted("--log off is the same.", "--log", "off"),
    "--enable-log-requests": _granted("--log json is the same.", "--log", "json"),
    "--disable-log-stats": _granted("figures are at /metrics, and not in the log."),
    "--disable-uvicorn-access-log": _granted("there is none beside our own, --log."),
    "--uvicorn-log-level": _valued("uvicorn says warnings and errors alone.", "warning"),
    "--ssl-cert-reqs": _valued("with --tls-client-ca clients need a certificate.", "2"),
    "--uds": _valued("it listens at an address and a port."),
}
"""By name. A flag that is neither here nor an option is refused as unknown."""


def why_not(name: str, known: Sequence[str], of_what: str) -> str:
    """Return the message for a name that is no setting of `of_what`, and what to use instead; `known` are settings."""
    flag = FLAGS.get(f"--{name.replace('_', '-')}")
    if flag is not None:
        # Options of the command line become arguments.
        instead = ": " + re.sub(r"--([a-z-]+)(?: (\d+G?)\b)?", _as_argument, flag.why)
    else:
        near = get_close_matches(name, known, n=1)
        instead = f". Did you mean {near[0]}?" if near else f"; there are {', '.join(known)}."
    return f"{name} is no setting of {of_what}{instead}"


def _as_argument(option: re.Match[str]) -> str:
    name, value = option[1].replace("-", "_"), option[2]
    name = "num_blocks" if name == "blocks" else name
    if value is None:
        return name
    return f"{name}={value.replace('G', ' * 2**30')}"


def translated(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with our options in place of granted flags. Raises InvalidConfig for a refused flag."""
    found: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if argument == "--":
            return [*found, argument, *left]
        name, has_value, value = argument.partition("=")
        flag = FLAGS.get(name)
        if flag is None:
            found.append(argument)
            continue
        if flag.values is not None and not has_value and left:
            value = left.pop(0)
        elif flag.values is None and has_value:
            raise InvalidConfig(f"{name} takes no value; got {value}.")
        if not (flag.granted if flag.values is None else value in flag.values):
            raise InvalidConfig(f"{name} {value}".rstrip() + f" is refused: {flag.why}")
        found += flag.becomes
    return found
