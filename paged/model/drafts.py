"""The draft model for a model: which one it is, and whether it fits."""

from __future__ import annotations

from pathlib import Path

from paged.errors import InvalidConfig
from paged.model.checkpoint import draft_path, is_shipped
from paged.model.loading import LoadedModel, load_model


def draft_for(model: LoadedModel, named: LoadedModel | str | Path | None) -> LoadedModel:
    """Return the named draft model, or, for a model that ships, the draft model that ships; on the same device, and loaded in the same dtype.

    Raises InvalidConfig if none is named for any other model, or it has another vocabulary or device, and as `load_model` does.
    """
    if named is None:
        if not is_shipped(model.path):
            raise InvalidConfig(
                f'{model.path}: speculate="draft" needs a draft_model; the one that ships speaks other tokens.'
            )
        named = draft_path()
    dtype = str(model.dtype).removeprefix("torch.")
    draft = named if isinstance(named, LoadedModel) else load_model(named, dtype=dtype, device=model.device)
    if draft.vocabulary_size != model.vocabulary_size:
        raise InvalidConfig(
            f"{draft.path}: a draft model of {draft.vocabulary_size:,} tokens guesses for {model.path} of "
            f"{model.vocabulary_size:,}; both have to have the same vocabulary."
        )
    if None not in (draft.tokenizer, model.tokenizer) and draft.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise InvalidConfig(
            f"{draft.path}: its tokenizer has other tokens than that of {model.path}; both have to have the same vocabulary."
        )
    if draft.device != model.device:
        raise InvalidConfig(
            f"{draft.path} is on {draft.device}, and {model.path} on {model.device}; both have to be on one."
        )
    return draft


def check_length(draft: LoadedModel, longest: int | None) -> None:
    """Raise InvalidConfig if a sequence may be longer than the draft model allows; `longest` None: any length."""
    if draft.max_length is not None and (longest is None or longest > draft.max_length):
        raise InvalidConfig(
            f"{draft.path}: the draft model takes {draft.max_length} tokens of a sequence, which may have {longest or 'any number'}; "
            "name a smaller max_model_len."
        )
