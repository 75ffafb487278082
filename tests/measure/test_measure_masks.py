"""Instances fed through masks: what counts as accepted, and that wrong grammars and wrong masks show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from forerun.constrain.compiler import GrammarCompiler
from forerun.constrain.schema import Json, JsonSchema
from forerun.constrain.state import GrammarState
from forerun.errors import InvalidConstraintError, InvalidRequestError
from forerun.measure.masks import Case, CaseResult, Instance, Times, check, feed, read_cases, rows_of, texts_of
from reference.vocabularies import byte_level

MASKBENCH = Path(__file__).parents[3] / "shared" / "data" / "maskbench.jsonl"
TOKENIZER = byte_level()
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}
IMPOSSIBLE = {"type": "integer", "minimum": 5, "maximum": 1}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER)
    yield compiler
    compiler.close()


def case(schema: Any, *values: tuple[bool, Any], case_id: str = "Some---one") -> Case:
    return Case(case_id, schema, tuple(Instance(f"number {n}", *value) for n, value in enumerate(values)))


CASE = case(POINT, (True, {"x": 1, "on": True}), (True, {"x": -20}), (False, {"on": True}), (False, {"x": "1"}))


def checked(
    compiler: GrammarCompiler, one: Case, constrain: Any = JsonSchema, whitespace: Any = "compact"
) -> CaseResult:
    return check(one, TOKENIZER, compiler, constrain, whitespace)


def counts(result: CaseResult) -> tuple[int, int, int, int]:
    return result.valid_accepted, result.valid_refused, result.invalid_refused, result.invalid_accepted


def test_valid_instances_are_accepted_and_invalid_ones_refused(compiler: GrammarCompiler) -> None:
    result = checked(compiler, CASE)
    assert counts(result) == (2, 0, 2, 0)
    assert (result.false_accepts, result.false_rejects, result.disagreements) == ([], [], [])
    assert result.refusal is None
    assert result.compile_seconds is not None
    assert result.compile_seconds > 0
    # One mask before each token up to the refused one, and one after the end of an accepted text.
    n = [len(TOKENIZER.encode_plain(text)) + 1 for text in ('{"x":1,"on":true}', '{"x":-20}')]
    refused = [len(TOKENIZER.encode_plain(text)) + 1 for text in ('{"', '{"x":')]
    assert len(result.mask_seconds) == sum(n) + sum(refused)


def test_flexible_whitespace_writes_each_instance_twice(compiler: GrammarCompiler) -> None:
    assert list(texts_of({"x": [1]}, "compact").items()) == [("compact", '{"x":[1]}')]
    assert texts_of({"x": [1]}, "flexible")["indented"] == '{\n  "x": [\n    1\n  ]\n}'
    result = checked(compiler, CASE, partial(JsonSchema, whitespace="flexible"), "flexible")
    assert counts(result) == (2, 0, 2, 0)
    # A compact grammar refuses the indented form: both forms count.
    result = checked(compiler, CASE, JsonSchema, "flexible")
    assert counts(result) == (0, 2, 2, 0)
    assert {found.form for found in result.false_rejects} == {"indented"}


def test_a_surrogate_is_written_as_an_escape_and_other_text_as_it_is() -> None:
    assert texts_of("é\U0001f600", "compact") == {"compact": '"é\U0001f600"'}
    assert texts_of("a\ud83d", "compact") == {"compact": r'"a\ud83d"'}


def test_a_grammar_that_is_too_wide_is_a_false_accept(compiler: GrammarCompiler) -> None:
    result = checked(compiler, CASE, lambda _schema: Json())
    assert counts(result) == (2, 0, 0, 2)
    assert [(found.test, found.form, found.token, found.before) for found in result.false_accepts] == [
        (2, "compact", None, '{"on":true}'),
        (3, "compact", None, '{"x":"1"}'),
    ]
    assert result.false_accepts[0].description == "number 2"
    assert result.false_rejects == []


def test_a_grammar_that_is_too_narrow_is_a_false_reject(compiler: GrammarCompiler) -> None:
    narrow = {**POINT, "properties": {"x": {"type": "integer", "minimum": 0}, "on": {"type": "boolean"}}}
    result = checked(compiler, CASE, lambda _schema: JsonSchema(narrow))
    assert counts(result) == (1, 1, 2, 0)
    (found,) = result.false_rejects
    assert (found.case_id, found.test, found.before, found.after) == ("Some---one", 1, '{"x":', "-20}")
    assert found.token == len(TOKENIZER.encode_plain('{"x":'))


def test_a_text_that_only_begins_well_is_not_accepted(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(JsonSchema(POINT))
    mask = np.zeros(-(-TOKENIZER.vocab_size // 32), dtype=np.uint32)
    fed = feed(grammar.start(), TOKENIZER.encode_plain('{"x":1'), TOKENIZER.eos_ids, mask)
    assert (fed.accepted, fed.stopped, fed.disagreement) == (False, None, "")


class Wide(GrammarState):
    """Its masks allow everything."""

    def mask(self, out: npt.NDArray[np.uint32]) -> None:
        super().mask(out)
        out[:] = 2**32 - 1


class Careless(GrammarState):
    """Says of every text that it is whole."""

    accepting = property(lambda _self: True)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("faulty", "text", "words"),
    [
        (Wide, '{"y', "allows a token that the grammar refuses"),
        (Wide, '{"x":1', "the mask of the end tokens differs"),
        (Careless, '{"x":1', "the mask of the end tokens differs"),
    ],
)
def test_masks_that_contradict_their_grammar_show(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, faulty: type[GrammarState], text: str, words: str
) -> None:
    grammar = compiler.compile(JsonSchema(POINT))
    mask = np.zeros(-(-TOKENIZER.vocab_size // 32), dtype=np.uint32)
    ids = TOKENIZER.encode_plain(text)
    assert feed(grammar.start(), ids, TOKENIZER.eos_ids, mask).disagreement == ""
    monkeypatch.setattr("forerun.constrain.compiler.GrammarState", faulty)
    state = grammar.start()
    assert isinstance(state, faulty)
    assert words in feed(state, ids, TOKENIZER.eos_ids, mask).disagreement


class Closed(GrammarState):
    """Its masks allow nothing."""

    def mask(self, out: npt.NDArray[np.uint32]) -> None:
        super().mask(out)
        out[:] = 0


def test_a_mask_that_is_too_narrow_is_a_false_reject(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.constrain.compiler.GrammarState", Closed)
    result = checked(compiler, CASE)
    assert counts(result) == (0, 2, 2, 0)
    assert {found.token for found in result.false_rejects} == {0}


def test_a_schema_that_does_not_compile_names_its_reason(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidConstraintError) as caught:
        compiler.compile(JsonSchema(IMPOSSIBLE))
    result = checked(compiler, case(IMPOSSIBLE, (False, 3)))
    assert result.refusal is not None
    assert (result.refusal.keyword, result.refusal.path) == (caught.value.keyword, caught.value.path)
    assert result.refusal.message == str(caught.value) != ""
    assert (result.compile_seconds, counts(result), result.mask_seconds) == (None, (0, 0, 0, 0), [])


def test_rows_add_up(compiler: GrammarCompiler) -> None:
    cases: Sequence[Case] = [
        CASE,
        case(IMPOSSIBLE, case_id="Some---two"),
        case(True, (True, [1]), case_id="BFCL_simple_19---three"),
        case({"type": "string"}, (False, 1), case_id="BFCL_simple_7---four"),
    ]
    rows = rows_of([checked(compiler, one) for one in cases])
    assert [(row.category, row.schemas, row.compiled, row.refused) for row in rows] == [
        ("Some", 2, 1, 1), ("BFCL_simple", 2, 2, 0), ("all", 4, 3, 1),
    ]  # fmt: skip
    assert [(row.valid_accepted, row.valid_refused, row.invalid_refused, row.invalid_accepted) for row in rows] == [
        (2, 0, 2, 0), (1, 0, 1, 0), (3, 0, 3, 0),
    ]  # fmt: skip
    assert [sum(row.reasons.values()) for row in rows] == [1, 0, 1]
    assert [row.compile.count for row in rows] == [1, 2, 3]
    assert rows[2].mask.count == rows[0].mask.count + rows[1].mask.count
    assert len(rows_of([checked(compiler, CASE)])) == 1


def test_times() -> None:
    assert Times.of([]) == Times(0, None, None, None)
    times = Times.of([n / 1000 for n in range(101)])
    assert (times.count, times.p50_ms, times.max_ms) == (101, pytest.approx(50), pytest.approx(100))
    assert times.p99_ms == pytest.approx(99)


def line(**changes: Any) -> str:
    entry = {"id": "A---b", "schema": {}, "tests": [{"valid": True, "data": 1}], **changes}
    return json.dumps({key: value for key, value in entry.items() if value is not ...})


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    lines = [line(), "", line(id="A---c", schema=True, tests=[], more=1), line(id="B---d"), line(id="A---e")]
    path.write_text("\n".join(lines))
    assert [one.case_id for one in read_cases(path)] == ["A---b", "A---c", "B---d", "A---e"]
    assert [one.case_id for one in read_cases(path, limit=1)] == ["A---b", "B---d"]
    assert read_cases(path)[0].instances == (Instance("", True, 1),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no schemas"),
        ("{", "line 1 of .* is no JSON"),
        ("[]", "line 1 of .* expected a JSON object"),
        (line() + "\n" + line(), "line 2 of .* is there twice"),
        (line(id=3), "id must be a text"),
        (line(id="a\tb"), "control characters"),
        (line(schema=...), "it has no schema"),
        (line(tests=...), "tests must be a list"),
        (line(tests=[{"valid": 1, "data": 1}]), "test 0 must have valid"),
        (line(tests=[{"valid": True}]), "test 0 must have valid .* and data"),
        (line(tests=[{"valid": True, "data": 1, "description": 3}]), "the description of test 0 must be a text"),
        (line().replace('"data": 1', '"data": 1e999'), "the data of test 0 can't be written as JSON"),
        ("[" * 100_000, "is no schema with tests"),
    ],
)
def test_lines_that_are_no_cases(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=words):
        read_cases(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="can't be read: No such file or directory; check the path"):
        read_cases(tmp_path / "none.jsonl")
    path = tmp_path / "cases.jsonl"
    path.write_bytes(line().encode() + b"\xff")
    with pytest.raises(InvalidRequestError, match="isn't UTF-8"):
        read_cases(path)


@pytest.mark.skipif(not MASKBENCH.exists(), reason="maskbench.jsonl isn't here: it is data that the project lacks")
@pytest.mark.parametrize("whitespace", ["compact", pytest.param("flexible", marks=pytest.mark.slow)])
def test_maskbench(compiler: GrammarCompiler, whitespace: Any) -> None:
    cases = read_cases(MASKBENCH)
    assert len(cases) == 410
    results = [checked(compiler, one, partial(JsonSchema, whitespace=whitespace), whitespace) for one in cases]
    total = rows_of(results)[-1]
    assert [found for result in results for found in result.false_accepts] == []
    assert [found for result in results for found in result.false_rejects] == []
    assert [found for result in results for found in result.disagreements] == []
    assert total.compiled > 280
    assert total.valid_accepted > 350
    assert total.invalid_refused > 450
    for result in results:
        if result.refusal is not None:
            assert result.refusal.message
