"""The composition table of the README, cell by cell: every feature under every condition, with the same answer.

Each cell compares outputs with those of an engine that computes each request alone, in one piece and without drafts,
and sees to it that the condition really held: that something was preempted, found in the prefix cache, drafted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun import Engine, RequestOutput, SamplingParams
from forerun.constrain import JsonSchema
from forerun.sample.noise import nth_seed
from reference.speculation import Unspeculated, emptied, engine_for, same

pytestmark = pytest.mark.usefixtures("steady_times")

PHRASE = (20, 31, 7, 250, 99, 64, 3)
PROMPT = (*PHRASE, 11, *PHRASE, 12, *PHRASE, 11, *PHRASE, 12, *PHRASE)
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["A", "B"]},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 4},
    },
    "required": ["kind", "tags"],
    "additionalProperties": False,
}
BASE = SamplingParams(max_tokens=90, ignore_eos=True)
# A few favoured tokens make text repeat itself, so that there is something to look up.
FAVOURED = dict.fromkeys(range(40, 43), 9.0)
SAMPLED = replace(BASE, temperature=0.8, seed=4, logit_bias=FAVOURED)

FEATURES: dict[str, SamplingParams] = {
    "greedy": BASE,
    "sampled": SAMPLED,
    "n > 1": replace(SAMPLED, n=3),
    "logprobs": replace(BASE, logprobs=3),
    "penalties": replace(SAMPLED, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
    "min-p": replace(SAMPLED, min_p=0.1),
    "logit bias": replace(BASE, logit_bias=FAVOURED),
    "stop strings": replace(SAMPLED, stop=("e", "a", "+*"), min_tokens=12),
    "constraint": SamplingParams(max_tokens=60, temperature=0.9, seed=9, constraint=JsonSchema(SCHEMA)),
}
BEAM = "beam search"


class Condition:
    """How an engine is run, and what shows that it was.

    options: of the engine. crowd: other requests that run beside the feature's. before: requests that run first.
    """

    def __init__(
        self,
        held: Callable[[Engine, Sequence[RequestOutput]], bool],
        *,
        crowd: int = 0,
        before: bool = False,
        draft: str = "none",
        **options: Any,
    ) -> None:
        self.held = held
        self.options = {"draft_len": 4, "prefix_cache": False} | options
        self.crowd = crowd
        self.before = before
        self.draft = draft


def _drafted(name: str) -> Callable[[Engine, Sequence[RequestOutput]], bool]:
    def held(_: Engine, outputs: Sequence[RequestOutput]) -> bool:
        counts = [output.stats.speculation.by_drafter for output in outputs]
        return any(part.startswith(("grammar", name)) for by_drafter in counts for part in by_drafter)

    return held


CONDITIONS: dict[str, Condition] = {
    "chunked prefill": Condition(
        lambda _, outputs: outputs[0].stats.speculation.steps > outputs[0].stats.speculation.decisions + 3,
        max_step_tokens=9, max_rows=9,
    ),
    "prefix cache": Condition(
        lambda engine, _: engine.stats().prefix_hit_tokens > 0, before=True, prefix_cache=True
    ),
    "preemption": Condition(lambda engine, _: engine.stats().preemptions > 0, crowd=6, kv_tokens=288),
    "lookup": Condition(_drafted("lookup"), draft="lookup"),
    "suffix": Condition(_drafted("suffix"), draft="suffix"),
    "model drafter": Condition(_drafted("model"), draft="model"),
}  # fmt: skip


def _engine(model: Path, condition: Condition) -> Engine:
    draft = f"model:{model}" if condition.draft == "model" else condition.draft
    engine = engine_for(model, draft, **condition.options)
    if condition.before:
        engine.generate([PROMPT], BASE)
    return engine


def _crowd(engine: Engine, condition: Condition) -> list[Any]:
    crowd = replace(BASE, max_tokens=60)
    return [engine.submit((*PROMPT[:30], n), crowd) for n in range(condition.crowd)]


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_under_a_condition(model: Path, alone: Unspeculated, feature: str, condition: str) -> None:
    params, how = FEATURES[feature], CONDITIONS[condition]
    assert params.seed is not None or params.greedy
    truths = [
        alone.answer(PROMPT, replace(params, n=1, seed=None if params.seed is None else nth_seed(params.seed, index)))
        for index in range(params.n)
    ]
    engine = _engine(model, how)
    crowd = _crowd(engine, how)
    [output] = engine.generate([PROMPT], params)
    for handle in crowd:
        handle.result()
    assert len(output.samples) == params.n
    for sample, truth in zip(output.samples, truths, strict=True):
        same(sample, truth)
    assert how.held(engine, output.samples)
    emptied(engine)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_beam_search_under_a_condition(model: Path, alone: Unspeculated, condition: str) -> None:
    """Beams never draft: under a drafter they are the same, and nothing is proposed."""
    how = CONDITIONS[condition]
    expected = alone.engine.beam_search(PROMPT, beams=3, max_tokens=20)
    engine = _engine(model, how)
    crowd = _crowd(engine, how)
    output = engine.beam_search(PROMPT, beams=3, max_tokens=20)
    for handle in crowd:
        handle.cancel()
    assert [(s.token_ids, s.score) for s in output.sequences] == [(s.token_ids, s.score) for s in expected.sequences]
    if how.draft != "none":
        assert engine.stats().speculation.proposed == 0
    elif condition == "chunked prefill":
        assert engine.stats().steps > 20 + 3
    else:
        assert how.held(engine, ())
    emptied(engine)


def test_a_condition_that_does_not_hold_shows(model: Path) -> None:
    """Planted: a pool that is large enough preempts nobody, and a text of which nothing repeats is not looked up."""
    roomy = engine_for(model, "none", kv_tokens=4096)
    outputs = roomy.generate([PROMPT], BASE)
    assert not CONDITIONS["preemption"].held(roomy, outputs)
    assert not CONDITIONS["prefix cache"].held(roomy, outputs)
    assert not CONDITIONS["lookup"].held(roomy, outputs)
    assert not CONDITIONS["chunked prefill"].held(roomy, outputs)


def test_the_readme_has_this_table() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    lines = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in readme.splitlines() if "|" in line
    ]
    start = next(i for i, cells in enumerate(lines) if cells[1:] == list(CONDITIONS))
    rows = {cells[0]: cells[1:] for cells in lines[start + 2 : start + 3 + len(FEATURES)]}
    assert list(rows) == [*FEATURES, BEAM]
    for feature, cells in rows.items():
        for condition, cell in zip(CONDITIONS, cells, strict=True):
            drafts = CONDITIONS[condition].draft != "none"
            expected = "yes, without drafts" if feature == BEAM and drafts else "yes"
            assert re.sub(r"[*`]", "", cell) == expected, (feature, condition)
