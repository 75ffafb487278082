"""From a text like "suffix" or "model:NAME" to a drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path

from forerun.draft.base import Drafter
from forerun.errors import ConfigurationError
from forerun.models.config import ModelConfig
from forerun.models.tokenizer import Tokenizer

ENTRY_POINTS = "forerun.drafters"
"""Group under which packages register a factory: a callable that takes a `DraftContext` and returns a `Drafter`."""


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may want to know of the engine that it drafts for.

    argument: what followed the colon of the draft's name ("model:NAME"), else "".
    config, tokenizer: the target's.
    kv_tokens, max_model_len, max_rows, max_step_tokens, threads: the engine's settings.
    cache: directory for packed weights; None: keep them in memory.
    """

    argument: str
    config: ModelConfig
    tokenizer: Tokenizer
    kv_tokens: int
    max_model_len: int
    max_rows: int
    max_step_tokens: int
    threads: int
    cache: Path | None


def _lookup(context: DraftContext) -> Drafter:  # noqa: ARG001
    from forerun.draft.lookup import PromptLookup

    return PromptLookup()


def _suffix(context: DraftContext) -> Drafter:  # noqa: ARG001
    from forerun.draft.suffix import SuffixDrafter

    return SuffixDrafter()


def _model(context: DraftContext) -> Drafter:
    from forerun.draft.model import ModelDrafter

    return ModelDrafter(context)


def _combined(context: DraftContext) -> Drafter:
    from forerun.draft.combined import CombinedDrafter
    from forerun.draft.model import ModelDrafter
    from forerun.draft.suffix import SuffixDrafter

    return CombinedDrafter(SuffixDrafter(), ModelDrafter(context))


_BUILT_IN: dict[str, tuple[Callable[[DraftContext], Drafter], bool]] = {
    "lookup": (_lookup, False),
    "suffix": (_suffix, False),
    "model": (_model, True),
    "combined": (_combined, True),
}
"""Name: factory, and whether it needs an argument."""


def make_drafter(draft: object, context: DraftContext) -> Drafter | None:
    """The drafter that a setting names, or the one that it is; None for "none".

    Raises `ConfigurationError` for a name that nobody registered or a missing model name, and what the factory raises.
    """
    if not isinstance(draft, str):
        if isinstance(draft, Drafter):
            return draft
        raise ConfigurationError(f"draft must be a name or a Drafter, got {type(draft).__name__}")
    name, _, argument = draft.partition(":")
    if draft == "none":
        return None
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        factory, needs_argument = built_in
        if needs_argument != bool(argument):
            form = f"{name}:NAME, a model of the catalog or a path" if needs_argument else name
            raise ConfigurationError(f"draft={draft!r} is not allowed; expected {form}")
        return factory(replace(context, argument=argument))
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name == name:
            made = entry.load()(replace(context, argument=argument))
            if not isinstance(made, Drafter):
                raise ConfigurationError(
                    f"the drafter {name!r} of {entry.value} made a {type(made).__name__}, which has no propose(); "
                    "update the package that registers it"
                )
            return made
    known = ", ".join(["none", *_BUILT_IN, *sorted({e.name for e in entry_points(group=ENTRY_POINTS)})])
    raise ConfigurationError(f"draft={draft!r} is not known; expected one of {known}")
