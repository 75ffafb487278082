"""From a text like "suffix" or "model:NAME" to a drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType

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
    shared_bytes: the most memory of what is kept of finished texts for later requests; 0: nothing is kept.
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
    shared_bytes: int


def _lookup(context: DraftContext) -> Drafter:  # noqa: ARG001
    from forerun.draft.lookup import PromptLookup

    return PromptLookup()


def _suffix(context: DraftContext) -> Drafter:
    from forerun.draft.suffix import SuffixDrafter

    shared = context.shared_bytes
    return SuffixDrafter(shared=shared > 0, shared_bytes=shared, tokenizer=context.tokenizer)


def _model(context: DraftContext) -> Drafter:
    from forerun.draft.model import ModelDrafter

    return ModelDrafter(context)


def _combined(context: DraftContext) -> Drafter:
    from forerun.draft.combined import CombinedDrafter
    from forerun.draft.model import ModelDrafter

    return CombinedDrafter(_suffix(context), ModelDrafter(context))


_BUILT_IN: Mapping[str, tuple[Callable[[DraftContext], Drafter], bool]] = MappingProxyType(
    {
        "lookup": (_lookup, False),
        "suffix": (_suffix, False),
        "model": (_model, True),
        "combined": (_combined, True),
    }
)
"""Name: factory, and whether it needs an argument."""


DrafterFactory = Callable[[DraftContext], Drafter]


def drafter_factory(draft: object) -> DrafterFactory | None:
    """What makes the drafter that a setting names, or hands over the one that it is; None for "none".

    Raises `ConfigurationError` for a name that nobody registered and for a missing model name; so does the factory for
    a registered one that makes something else.
    """
    if not isinstance(draft, str):
        if isinstance(draft, Drafter) and not isinstance(draft, type):
            return lambda _: draft
        shown = f"the class {draft.__name__}; make one" if isinstance(draft, type) else type(draft).__name__
        raise ConfigurationError(f"draft must be a name or a Drafter, got {shown}")
    name, colon, argument = draft.partition(":")
    if draft == "none":
        return None
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        factory, needs_argument = built_in
        if needs_argument != bool(argument) or bool(colon) != bool(argument):
            form = f"{name}:NAME, a model of the catalog or a path" if needs_argument else name
            raise ConfigurationError(f"draft={draft!r} is not allowed; expected {form}")
        return lambda context: factory(replace(context, argument=argument))
    registered = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name in registered:
        entry = registered[name]

        def make(context: DraftContext) -> Drafter:
            made = entry.load()(replace(context, argument=argument))
            if isinstance(made, Drafter):
                return made
            raise ConfigurationError(
                f"the drafter {name!r} of {entry.value} made a {type(made).__name__}, which is no Drafter; update the "
                "package that registers it"
            )

        return make
    built_in_forms = [f"{known}:NAME" if argues else known for known, (_, argues) in _BUILT_IN.items()]
    known = ", ".join(["none", *built_in_forms, *sorted(registered)])
    raise ConfigurationError(f"draft={draft!r} is not known; expected one of {known}")
