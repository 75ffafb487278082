"""Whether grammars mean what their schemas say: instances fed token by token through the masks.

A file of cases has one JSON object a line, as MaskBench (https://github.com/guidance-ai/jsonschemabench) has them:
{"id", "schema", "tests": [{"description", "valid", "data"}]}; other fields are ignored. Every instance is written as
JSON and cut into the model's own tokens. At each of them the mask must allow the token and the grammar must take it;
after the last the text must be accepted as a whole. A valid instance that is stopped on the way is a false reject, an
invalid one that gets through a false accept.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.constrain.bits import mask_width
from forerun.errors import ConstraintError, ConstraintWarning, InvalidConstraintError
from forerun.measure.jsonl import Named, read_entries
from forerun.measure.speculate import ALL, quantile

if TYPE_CHECKING:
    from forerun.constrain.compiler import GrammarCompiler
    from forerun.constrain.schema import Whitespace
    from forerun.constrain.spec import Constraint
    from forerun.constrain.state import GrammarState
    from forerun.models.tokenizer import Tokenizer

OTHER = "other"
"""The reason of a refusal that no single keyword is to blame for."""
_SHOWN = 160
"""Characters of a text that a finding keeps."""


class Instance(NamedTuple):
    """A JSON value, and whether the schema allows it."""

    description: str
    valid: bool
    data: Any


class Case(NamedTuple):
    """A schema with instances. `case_id`: "Category---name"; unique in its file."""

    case_id: str
    schema: Any
    instances: tuple[Instance, ...]

    @property
    def category(self) -> str:
        """What stands before "---" in the id, without the number that some end with ("BFCL_simple_19")."""
        return re.sub(r"_\d+$", "", self.case_id.split("---")[0])


class Fed(NamedTuple):
    """A text's way through a grammar.

    accepted: whether every mask allowed its token and the text was accepted in the end.
    stopped: index of the token that wasn't allowed; None where the text came to its end.
    dead_end: what the grammar said when it had no way on at all, else "".
    disagreement: where masks, the grammar's own verdict and its end tokens contradict each other, else "".
    mask_seconds: of each mask.
    """

    accepted: bool
    stopped: int | None
    dead_end: str
    disagreement: str
    mask_seconds: list[float]


@dataclass(frozen=True)
class Finding:
    """An instance that went the wrong way.

    Attributes:
        test: index among the case's instances.
        form: "compact" or "indented".
        token: index of the first token that wasn't allowed, None where the text came to its end.
        before, after: the text up to there and from there on, cut to what fits a line.
        reason: more about it, or "".
    """

    case_id: str
    test: int
    description: str
    form: str
    token: int | None
    before: str
    after: str
    reason: str


@dataclass(frozen=True)
class Refusal:
    """A schema that doesn't compile. `keyword`, `path`: what is to blame and where it stands, as a JSON pointer."""

    case_id: str
    keyword: str | None
    path: str | None
    message: str


@dataclass
class CaseResult:
    """One schema's outcome. Times in seconds; counts are of instances.

    Attributes:
        compile_seconds: from the schema to a grammar that can start; None where `refusal` says why it didn't compile.
        notices: what the schema says that has no effect.
    """

    case_id: str
    category: str
    refusal: Refusal | None = None
    compile_seconds: float | None = None
    notices: list[str] = field(default_factory=list)
    valid_accepted: int = 0
    valid_refused: int = 0
    invalid_accepted: int = 0
    invalid_refused: int = 0
    mask_seconds: list[float] = field(default_factory=list)
    false_accepts: list[Finding] = field(default_factory=list)
    false_rejects: list[Finding] = field(default_factory=list)
    disagreements: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class Times:
    """Quantiles of `count` durations in milliseconds (on the line between neighbours); None without any."""

    count: int
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Of durations in seconds."""
        if not seconds:
            return cls(0, None, None, None)
        return cls(len(seconds), 1e3 * quantile(seconds, 0.5), 1e3 * quantile(seconds, 0.99), 1e3 * max(seconds))


@dataclass(frozen=True)
class CategoryRow:
    """Schemas of one category.

    Attributes:
        schemas: all of them; compiled and refused add up to it.
        reasons: refused schemas by the keyword to blame, the most frequent first.
        valid_accepted, valid_refused, invalid_accepted, invalid_refused: instances of the compiled schemas.
        compile: times of compiling, from the schema to a grammar that can start. mask: times of single masks.
    """

    category: str
    schemas: int
    compiled: int
    refused: int
    reasons: dict[str, int]
    valid_accepted: int
    valid_refused: int
    invalid_accepted: int
    invalid_refused: int
    compile: Times
    mask: Times


@dataclass(frozen=True)
class MaskSetup:
    """What was measured, on what, and how to do it again. sha256: of the model, whose tokenizer alone is used."""

    model: str
    sha256: str
    vocab_size: int
    cpu: str
    physical_cores: int
    forerun: str
    llguidance: str
    command: str


@dataclass(frozen=True)
class MaskReport:
    """All cases.

    Attributes:
        date: when it began, UTC, ISO 8601.
        cases_sha256: of the file.
        rows: by category in the order of the file, then all of them.
        refused: schemas that don't compile.
        notices: by case, what its schema says that has no effect.
        false_accepts, false_rejects: instances that went the wrong way.
        disagreements: where a mask and the grammar's own verdict contradict each other.
    """

    setup: MaskSetup
    date: str
    cases_file: str
    cases_sha256: str
    whitespace: Whitespace
    rows: tuple[CategoryRow, ...]
    refused: tuple[Refusal, ...]
    notices: dict[str, tuple[str, ...]]
    false_accepts: tuple[Finding, ...]
    false_rejects: tuple[Finding, ...]
    disagreements: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether every instance went the right way."""
        return not (self.false_accepts or self.false_rejects or self.disagreements)


def read_cases(path: Path, limit: int | None = None) -> list[Case]:
    """The cases of a .jsonl file, in its order; with `limit` the first so many of each category.

    Raises `InvalidRequestError`, which names the line, for a file that can't be read or holds anything else.
    """
    return read_entries(
        path, "schema", _case, lambda case: Named(case.case_id, case.category), limit, expected="schema with tests"
    )


def texts_of(data: Any, whitespace: Whitespace) -> dict[str, str]:
    """A value as JSON: "compact", and where whitespace is flexible also "indented". Raises ValueError for NaN."""
    try:
        return _written(data, whitespace, ensure_ascii=False)
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can hold
        return _written(data, whitespace, ensure_ascii=True)


def feed(state: GrammarState, ids: Sequence[int], ends: Iterable[int], mask: npt.NDArray[np.uint32]) -> Fed:
    """Takes a text's tokens through a grammar that has just started.

    `ends`: the tokenizer's end tokens. mask: uint32[W], room for a mask.
    """
    seconds: list[float] = []

    def masked() -> str:
        began = time.perf_counter()
        try:
            state.mask(mask)
        except ConstraintError as error:
            return str(error)
        finally:
            seconds.append(time.perf_counter() - began)
        return ""

    for n, token in enumerate(ids):
        dead_end = masked()
        if dead_end:
            return Fed(False, n, dead_end, "", seconds)
        if not _bit(mask, token):
            return Fed(False, n, "", "", seconds)
        try:
            state.advance([token])
        except ConstraintError as error:
            return Fed(False, n, "", f"the mask allows a token that the grammar refuses: {error}", seconds)
    accepted = state.accepting
    dead_end = masked()
    if dead_end:
        wrong = "the text is accepted, but no end token is allowed" if accepted else ""
        return Fed(False, None, dead_end, wrong, seconds)
    disagreement = ""
    if any(_bit(mask, end) != accepted for end in ends):
        disagreement = f"the text is {'' if accepted else 'not '}accepted, but the mask of the end tokens differs"
    elif state.complete and not accepted:
        disagreement = "the text is complete, but not accepted"
    return Fed(accepted, None, "", disagreement, seconds)


def check(
    case: Case,
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    constrain: Callable[[Any], Constraint],
    whitespace: Whitespace,
) -> CaseResult:
    """Compiles a schema, as the constraint that `constrain` makes of it, and feeds its instances to it."""
    result = CaseResult(case.case_id, case.category)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConstraintWarning)
        began = time.perf_counter()
        try:
            grammar = compiler.compile(constrain(case.schema))
            result.compile_seconds = time.perf_counter() - began
        except InvalidConstraintError as error:
            result.refusal = Refusal(case.case_id, error.keyword, error.path, str(error))
            return result
        finally:
            result.notices = [str(one.message) for one in caught if issubclass(one.category, ConstraintWarning)]
    mask = np.zeros(mask_width(tokenizer.vocab_size), dtype=np.uint32)
    for n, instance in enumerate(case.instances):
        wrong: list[Finding] = []
        for form, text in texts_of(instance.data, whitespace).items():
            ids = tokenizer.encode_plain(text)
            fed = feed(grammar.start(), ids, tokenizer.eos_ids, mask)
            result.mask_seconds += fed.mask_seconds
            found = _finding(case, n, form, ids, tokenizer, fed)
            if fed.disagreement:
                result.disagreements.append(found)
            if fed.accepted != instance.valid:
                wrong.append(found)
        if instance.valid:
            result.valid_accepted += not wrong
            result.valid_refused += bool(wrong)
            result.false_rejects += wrong
        else:
            result.invalid_accepted += bool(wrong)
            result.invalid_refused += not wrong
            result.false_accepts += wrong
    return result


def rows_of(results: Sequence[CaseResult]) -> tuple[CategoryRow, ...]:
    """A row for each category, and one over all of them where there are several."""
    by_category: dict[str, list[CaseResult]] = {}
    for result in results:
        by_category.setdefault(result.category, []).append(result)
    if len(by_category) > 1:
        by_category[ALL] = list(results)
    return tuple(_row(name, found) for name, found in by_category.items())


def reason_of(refusal: Refusal) -> str:
    """A refusal in one word."""
    return refusal.keyword or OTHER


def _row(category: str, results: Sequence[CaseResult]) -> CategoryRow:
    refused = [result.refusal for result in results if result.refusal is not None]
    return CategoryRow(
        category=category,
        schemas=len(results),
        compiled=len(results) - len(refused),
        refused=len(refused),
        reasons=dict(Counter(map(reason_of, refused)).most_common()),
        valid_accepted=sum(result.valid_accepted for result in results),
        valid_refused=sum(result.valid_refused for result in results),
        invalid_accepted=sum(result.invalid_accepted for result in results),
        invalid_refused=sum(result.invalid_refused for result in results),
        compile=Times.of([result.compile_seconds for result in results if result.compile_seconds is not None]),
        mask=Times.of([seconds for result in results for seconds in result.mask_seconds]),
    )


def _finding(case: Case, test: int, form: str, ids: Sequence[int], tokenizer: Tokenizer, fed: Fed) -> Finding:
    at = len(ids) if fed.stopped is None else fed.stopped
    return Finding(
        case_id=case.case_id,
        test=test,
        description=case.instances[test].description,
        form=form,
        token=fed.stopped,
        before=tokenizer.decode(ids[:at], skip_special=False)[-_SHOWN:],
        after=tokenizer.decode(ids[at:], skip_special=False)[:_SHOWN],
        reason=fed.disagreement or fed.dead_end,
    )


def _bit(mask: npt.NDArray[np.uint32], token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _written(data: Any, whitespace: Whitespace, *, ensure_ascii: bool) -> dict[str, str]:
    texts = {"compact": json.dumps(data, ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":"))}
    if whitespace == "flexible":
        texts["indented"] = json.dumps(data, ensure_ascii=ensure_ascii, allow_nan=False, indent=2)
    for text in texts.values():
        text.encode()
    return texts


def _case(entry: object) -> Case:
    if not isinstance(entry, dict):
        raise ValueError("expected a JSON object")
    name = entry.get("id")
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ValueError("id must be a text that isn't empty and has no control characters")
    if "schema" not in entry:
        raise ValueError("it has no schema")
    tests = entry.get("tests")
    if not isinstance(tests, list):
        raise ValueError("tests must be a list")
    return Case(name, entry["schema"], tuple(_instance(n, test) for n, test in enumerate(tests)))


def _instance(n: int, test: object) -> Instance:
    if not isinstance(test, Mapping) or not isinstance(test.get("valid"), bool) or "data" not in test:
        raise ValueError(f"test {n} must have valid (true or false) and data")
    description = test.get("description", "")
    if not isinstance(description, str):
        raise ValueError(f"the description of test {n} must be a text")
    try:
        texts_of(test["data"], "compact")
    except ValueError as error:
        raise ValueError(f"the data of test {n} can't be written as JSON: {error}") from error
    return Instance(description, test["valid"], test["data"])
