"""No text that a grammar lets through is refused by a validator, and no value that is valid is refused by the grammar.

Random texts come from the masks themselves, so that whatever the masks allow is met sooner or later.
"""

from __future__ import annotations

import itertools
import json
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher

from forerun.constrain import JsonSchema, formats, leaves, patterns
from forerun.constrain import lower as lowering
from forerun.constrain.schema import Whitespace
from forerun.errors import ConstraintWarning, InvalidConstraintError
from reference.schemas import random_schema, random_value
from reference.texts import MASKBENCH, TOKENIZER, DeadEndError, accepts, draw, validator, value_of

benchmark = pytest.mark.skipif(not MASKBENCH.exists(), reason=f"{MASKBENCH} isn't there")


def start_of(schema: Any, whitespace: Whitespace = "compact") -> LLMatcher | None:
    """The start of a schema's grammar; None where it is refused, with the reason in words."""
    constraint = JsonSchema(schema, whitespace)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstraintWarning)
            constraint.check()
    except InvalidConstraintError:
        return None
    matcher = LLMatcher(TOKENIZER, constraint.grammar(), log_level=0)
    if matcher.is_error():
        assert constraint.explain(matcher.get_error()).path is not None
        return None
    return matcher


def faults(schema: Any, start: LLMatcher, rng: random.Random, draws: int, count: Counter[str]) -> Iterator[str]:
    """Texts of a grammar that its schema's validator refuses."""
    check = validator(schema)
    for _ in range(draws):
        try:
            text = draw(start, rng)
        except DeadEndError:
            count["dead ends"] += 1
            continue
        if text is None:
            continue
        count["texts"] += 1
        error = next(check.iter_errors(value_of(text)), None)
        if error is not None:
            yield f"{text[:300]!r}: {error.message[:200]}"


def hunt_random(seeds: range, draws: int) -> tuple[list[str], Counter[str]]:
    found: list[str] = []
    count: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_schema(rng)
        start = start_of(schema)
        if start is not None:
            count["schemas"] += 1
            found += [
                f"{json.dumps(schema)} lets through {fault}" for fault in faults(schema, start, rng, draws, count)
            ]
    return found, count


def hunt_benchmark(draws: int, every: int) -> tuple[list[str], Counter[str]]:
    found: list[str] = []
    count: Counter[str] = Counter()
    rng = random.Random(5)
    for line in MASKBENCH.read_text().splitlines()[::every]:
        row = json.loads(line)
        start = start_of(row["schema"], rng.choice(["compact", "flexible"]))
        if start is not None:
            count["schemas"] += 1
            found += [f"{row['id']}: {fault}" for fault in faults(row["schema"], start, rng, draws, count)]
    return found, count


def test_no_false_accepts_in_random_schemas() -> None:
    found, count = hunt_random(range(400), 4)
    print(dict(count))
    assert found == []
    assert count["schemas"] > 80
    assert count["texts"] > 300
    assert count["dead ends"] < count["texts"] / 50


@pytest.mark.slow
def test_no_false_accepts_in_many_random_schemas() -> None:
    found, count = hunt_random(range(10_000, 16_000), 8)
    print(dict(count))
    assert found == []


@benchmark
def test_no_false_accepts_in_the_benchmark() -> None:
    found, count = hunt_benchmark(3, 6)
    print(dict(count))
    assert found == []
    assert count["texts"] > 100


@benchmark
@pytest.mark.slow
def test_no_false_accepts_in_the_whole_benchmark() -> None:
    found, count = hunt_benchmark(40, 1)
    print(dict(count))
    assert found == []


def judged(every: int) -> tuple[list[Any], Counter[str]]:
    """The benchmark's instances that grammar and benchmark disagree about."""
    count: Counter[str] = Counter()
    wrong = []
    for line in MASKBENCH.read_text().splitlines()[::every]:
        row = json.loads(line)
        start = start_of(row["schema"])
        count["refused" if start is None else "compiled"] += 1
        for test in row["tests"] if start is not None else ():
            assert start is not None
            text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
            count["valid" if test["valid"] else "invalid"] += 1
            if accepts(start, text) != test["valid"]:
                wrong.append((row["id"], test["valid"], text[:200]))
    return wrong, count


@benchmark
def test_instances_of_the_benchmark() -> None:
    wrong, count = judged(4)
    print(dict(count))
    assert wrong == []
    assert min(count["compiled"], count["valid"], count["invalid"]) > 60


@benchmark
@pytest.mark.slow
def test_all_instances_of_the_benchmark() -> None:
    wrong, count = judged(1)
    print(dict(count))
    assert wrong == []
    assert count["compiled"] >= 290
    assert count["valid"] >= 360
    assert count["invalid"] >= 470


def orders(value: Any) -> Iterator[Any]:
    """A value with the keys of its objects in every order."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*[list(itertools.islice(orders(item), 6)) for item in value]))
    elif isinstance(value, dict):
        for pairs in itertools.permutations(value.items()):
            inner = [list(itertools.islice(orders(item), 6)) for _, item in pairs]
            for values in itertools.product(*inner):
                yield dict(zip([key for key, _ in pairs], values, strict=True))
    else:
        yield value


def misjudged(schema: Any, start: LLMatcher, rng: random.Random, values: int, count: Counter[str]) -> Iterator[str]:
    """Values that grammar and validator disagree about; a valid one must be accepted in one order of its keys.

    Left out is what grammars narrow as documented: 1.0 for an integer, and control characters.
    """
    check = validator(schema)
    for _ in range(values):
        value = random_value(rng)
        text = json.dumps(value)
        if "1.0" in text or "u0001" in text:
            continue
        valid = check.is_valid(value)
        count["valid" if valid else "invalid"] += 1
        tried = itertools.islice(orders(value), 1000 if valid else 3)
        texts = (json.dumps(order, ensure_ascii=False, separators=(",", ":")) for order in tried)
        if any(accepts(start, text) for text in texts) != valid:
            yield f"{text}, which is {'valid' if valid else 'invalid'}"


def hunt_values(seeds: range, values: int) -> tuple[list[str], Counter[str]]:
    found: list[str] = []
    count: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_schema(rng)
        start = start_of(schema)
        if start is not None and '"format"' not in json.dumps(schema):
            found += [f"{json.dumps(schema)} and {fault}" for fault in misjudged(schema, start, rng, values, count)]
    return found, count


def test_values_of_random_schemas() -> None:
    found, count = hunt_values(range(3000, 3200), 10)
    print(dict(count))
    assert found == []
    assert count["valid"] > 100
    assert count["invalid"] > 200


@pytest.mark.slow
def test_values_of_many_random_schemas() -> None:
    found, count = hunt_values(range(30_000, 33_000), 25)
    print(dict(count))
    assert found == []


def _no_leaves(*_: Any) -> list[Any]:
    return []


A = {"type": "string", "maxLength": 1}

FAULTS: dict[str, tuple[Any, str, Any, Any]] = {
    "a pattern that is lost": (
        *(lowering, "_add_to", lambda *_: None),
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": A}},
    ),
    "no pattern adds keys": (
        *(lowering, "_adds", lambda *_: False),
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"b": {}}, "additionalProperties": False},
    ),
    "a required name that is lost": (
        *(lowering, "_required", lambda value, *_: value[1:]),
        {"type": "object", "required": ["a"]},
    ),
    "keywords that are ignored": (lowering._Lowering, "_leaves", _no_leaves, A),
    "dependencies that are ignored": (
        *(lowering._Lowering, "_dependencies", _no_leaves),
        {"type": "object", "properties": {"a": A, "b": A}, "dependentRequired": {"a": ["b"]}},
    ),
    "bounds that are ignored": (leaves, "numbers", lambda *_, **__: {}, {"type": "number", "minimum": 1}),
    "patterns that are ignored": (leaves, "pattern", lambda *_, **__: "(?s:.)*", {"type": "string", "pattern": "^a"}),
    "too few further keys": (
        patterns,
        "none_of",
        lambda _: "b",
        {"type": "object", "properties": {"a": {"const": "\u0001"}}},
    ),
    "no uniqueness": (
        *(lowering, "_says_nothing", lambda *_: True),
        {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}},
    ),
    "dates of every month": (
        formats.PATTERNS,
        "date",
        "[0-9]{4}-[0-3][0-9]-[0-3][0-9]",
        {"format": "date", "type": "string"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_hunt_finds_planted_faults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, part, fault, schema = FAULTS[name]

    def found() -> bool:
        start = start_of(schema)
        assert start is not None
        rng, count = random.Random(1), Counter[str]()
        values = iter(()) if "format" in schema else misjudged(schema, start, rng, 150, count)
        return any(values) or any(faults(schema, start, rng, 100, count))

    if name != "no uniqueness":
        assert not found()
    (monkeypatch.setitem if isinstance(target, dict) else monkeypatch.setattr)(target, part, fault)
    assert found()
