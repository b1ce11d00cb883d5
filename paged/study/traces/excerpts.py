"""The excerpts of published traces that ship with the package, so that every command can be tried without a download.

`data/README.md` says the same beside the files.
"""

from pathlib import Path

import msgspec


class Excerpt(msgspec.Struct, frozen=True):
    """Some requests of a published trace, in their order; `summary` says which. Nothing in them was changed.

    note  what a reader of figures should know that the requests do not say: what was left out
    """

    name: str
    file: str
    summary: str
    note: str
    source: str
    licence: str


EXCERPTS = {
    "azure": Excerpt(
        name="azure",
        file="azure_conversation.csv",
        summary="the first 500 requests of a conversation service's hour, November 2023",
        note="excerpt: the first 500 of 19,366 requests",
        source="Microsoft, Azure Public Dataset (Splitwise, ISCA '24), github.com/Azure/AzurePublicDataset",
        licence="CC-BY 4.0",
    ),
    "mooncake": Excerpt(
        name="mooncake",
        file="mooncake_conversation.jsonl",
        summary="the first 300 requests with prompts of up to 4,096 tokens of a chat service's hour, with the prefixes they share",
        note="excerpt: 300 of 12,031 requests, the first with prompts of up to 4,096 tokens, as a third of all have",
        source="Moonshot AI, Mooncake (FAST '25), github.com/kvcache-ai/Mooncake",
        licence="Apache-2.0",
    ),
}


def excerpt_path(name: str) -> Path:
    """Where an excerpt lies. Raises KeyError for a name that is not in EXCERPTS."""
    return Path(__file__).parent / "data" / EXCERPTS[name].file
