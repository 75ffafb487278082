"""Whether a draft model speaks the target's language: the same token behind every id.

A drafter passes token ids, never text, so ids are what has to agree. Merges and the splitting of text into words are
the target's business alone. Rows of an embedding that were only added to round its size up (tokens of the kind
"unused") mean nothing and may differ, in number and in name.
"""

from __future__ import annotations

from forerun.errors import ConfigurationError
from forerun.models.tokenizer import Tokenizer
from forerun.models.tokenizer_gguf import TokenKind, Vocabulary


def check_compatible(target: Tokenizer, draft: Tokenizer, name: str) -> int:
    """The number of ids that may be proposed: those from 0 on that both models have.

    Refused are, naming the first id that is wrong: an id with different tokens in the two; a token of the draft model
    whose id is past the target's last; an end token that the other model doesn't have under this id; and different
    tokens for the begin of a text. Tokens that only the target has are allowed (they can't be proposed).

    name: of the draft model, for the message. Raises `ConfigurationError`.
    """
    ours, theirs = target.vocabulary, draft.vocabulary
    shared = min(len(ours.texts), len(theirs.texts))
    if ours.texts[:shared] != theirs.texts[:shared]:
        for index in range(shared):
            if ours.texts[index] != theirs.texts[index] and _is_real(ours, index) and _is_real(theirs, index):
                raise _refusal(
                    name,
                    f"token {index} is {ours.texts[index]!r} in the target, but {theirs.texts[index]!r} in the draft "
                    "model",
                )
    if ours.byte_level != theirs.byte_level:
        raise _refusal(name, f"one tokenizer is byte-level BPE ({_which(ours)}), the other SentencePiece")
    for index in range(shared, len(theirs.texts)):
        if _is_real(theirs, index):
            raise _refusal(
                name,
                f"the draft model has token {index}, {theirs.texts[index]!r}, but the target's ids end at {shared - 1}",
            )
    for index in sorted(ours.eos_ids | theirs.eos_ids):
        for vocabulary, owner in ((ours, "target"), (theirs, "draft model")):
            if not (index < len(vocabulary.texts) and _is_real(vocabulary, index)):
                other = theirs if vocabulary is ours else ours
                raise _refusal(
                    name, f"token {index}, {other.texts[index]!r}, ends a text, but the {owner} doesn't have it"
                )
    if ours.bos_id != theirs.bos_id and ours.bos_id is not None and theirs.bos_id is not None:
        raise _refusal(
            name, f"a text begins with token {ours.bos_id} in the target and {theirs.bos_id} in the draft model"
        )
    return shared


def _is_real(vocabulary: Vocabulary, index: int) -> bool:
    return vocabulary.kinds[index] != TokenKind.UNUSED


def _which(ours: Vocabulary) -> str:
    return "the target's" if ours.byte_level else "the draft model's"


def _refusal(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} can't draft for this model: {reason}; choose a draft model of the same family, with the same tokenizer"
    )
