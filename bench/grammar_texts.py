#!/usr/bin/env python3
"""Whether constrained texts of a real model obey their schemas, and are the same with and without drafters.

    python bench/grammar_texts.py maskbench.jsonl -m qwen2.5-coder-1.5b-instruct --results texts.jsonl

--schemas of the file (spread evenly over those that compile) are each asked for an instance, at temperatures 0 and 1,
without drafts and with each of --drafters. A text that ended by itself must be JSON that the package jsonschema
accepts; one that max_tokens cut off must say so; texts with drafts must equal those without, token for token.

A long run can be split: schemas that --results has already are not done again, and after --minutes no other one begins.
The exit code is 1 if any text is wrong or differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from forerun import Engine, RequestOutput, SamplingParams
from forerun.cli.bench_setup import file_hash
from forerun.constrain.schema import JsonSchema
from forerun.errors import ConstraintError, ConstraintWarning, ForerunError, InvalidConstraintError, InvalidRequestError
from forerun.measure.constrain import Check, json_schema_check
from forerun.measure.masks import Case, read_cases
from forerun.models.download import resolve

TEMPERATURES = (0.0, 1.0)
SHOWN_CHARACTERS = 1000
"""Of a schema in its prompt; the constraint has all of it."""


class Way(NamedTuple):
    """How a text is made. drafter: "none" is the text that the others must equal."""

    temperature: float
    drafter: str

    @property
    def name(self) -> str:
        """As results have it."""
        return f"{self.drafter} at {self.temperature:g}"


def prompt_of(case: Case) -> str:
    """The user's message."""
    shown = json.dumps(case.schema, ensure_ascii=False)
    cut = " ... (cut)" if len(shown) > SHOWN_CHARACTERS else ""
    return f"Write one realistic JSON value that fulfils this JSON schema:\n\n{shown[:SHOWN_CHARACTERS]}{cut}"


def spread(cases: Sequence[Case], engine: Engine, n: int) -> list[Case]:
    """At most n cases, evenly over those that compile."""
    compiling = []
    # Not in the first schema's time.
    engine.prepare_constraints()
    for case in cases:
        try:
            engine.prepare_constraints(JsonSchema(case.schema))
        except InvalidConstraintError:
            continue
        compiling.append(case)
    n = min(n, len(compiling))
    return [compiling[i * len(compiling) // n] for i in range(n)] if n else []


class Texts:
    """Makes texts, with one engine for each drafter; the first one also makes those without drafts."""

    def __init__(self, model: Path, drafters: Sequence[str], max_tokens: int, batch: int) -> None:
        room = batch * (max_tokens + 2 * SHOWN_CHARACTERS)
        engines = {
            name: Engine(model, kv_tokens=room, max_rows=max(32, batch), draft=name) for name in drafters or ("none",)
        }
        self.plain = next(iter(engines.values()))
        self._engines = {"none": self.plain, **engines}
        self._max_tokens = max_tokens

    def ways(self) -> Iterator[Way]:
        """All of them, those without drafts first."""
        for temperature in TEMPERATURES:
            for drafter in self._engines:
                yield Way(temperature, drafter)

    def make(self, cases: Sequence[Case], way: Way) -> list[RequestOutput | ConstraintError]:
        """The texts of several schemas, made together."""
        engine = self._engines[way.drafter]
        handles = []
        try:
            for case in cases:
                params = SamplingParams(
                    max_tokens=self._max_tokens,
                    temperature=way.temperature,
                    seed=sum(case.case_id.encode()),
                    constraint=JsonSchema(case.schema),
                )
                prompt = engine.chat_ids([{"role": "user", "content": prompt_of(case)}])
                handles.append(engine.submit(prompt, params, speculate=way.drafter != "none"))
            found: list[RequestOutput | ConstraintError] = []
            for handle in handles:
                try:
                    found.append(handle.result())
                except ConstraintError as error:
                    found.append(error)
        finally:
            for handle in handles:
                handle.cancel()
        failure = None if engine.speculator is None else engine.speculator.failure
        if failure is not None:
            raise failure
        return found


def judged(case: Case, way: Way, made: RequestOutput | ConstraintError, plain: Any, check: Check) -> dict[str, Any]:
    """One text as a line of results."""
    if isinstance(made, ConstraintError):
        tokens: list[int] | None = None
        fields: dict[str, Any] = {"text": None, "finish_reason": f"error: {made}", "valid": None}
    else:
        tokens = list(made.token_ids)
        ended = made.finish_reason == "stop"
        valid = valid_by(case, made.text, check) if ended else None
        counts = made.stats.speculation
        fields = {"text": made.text, "finish_reason": made.finish_reason, "valid": valid}
        fields |= {"emitted": counts.emitted, "decisions": counts.decisions, "accepted": counts.accepted}
    fields["tokens"] = tokens
    fields["equal"] = None if plain is None else (tokens, fields["finish_reason"]) == plain
    return {"way": way.name, **fields}


def valid_by(case: Case, text: str, check: Check) -> bool:
    """Whether jsonschema accepts a text."""
    return check(text, case.schema if isinstance(case.schema, dict) else {"allOf": [case.schema]})


def do_group(cases: Sequence[Case], texts: Texts, check: Check) -> list[dict[str, Any]]:
    """Several schemas in every way; a result for each."""
    entries: list[list[dict[str, Any]]] = [[] for _ in cases]
    plain: dict[tuple[float, int], Any] = {}
    for way in texts.ways():
        for n, (case, made) in enumerate(zip(cases, texts.make(cases, way), strict=True)):
            entry = judged(case, way, made, plain.get((way.temperature, n)), check)
            plain.setdefault((way.temperature, n), (entry["tokens"], entry["finish_reason"]))
            entries[n].append(entry)
    return [{"case_id": case.case_id, "texts": found} for case, found in zip(cases, entries, strict=True)]


def read_results(path: Path | None, key: dict[str, Any]) -> list[dict[str, Any]]:
    """Results so far. Raises InvalidRequestError if they were made otherwise."""
    if path is None or not path.exists():
        return []
    results = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    for result in results:
        if result["key"] != key:
            raise InvalidRequestError(
                f"{path} has results that were made otherwise ({result['key']}); use another file"
            )
    return results


def summary(results: Sequence[dict[str, Any]], wanted: int) -> dict[str, Any]:
    """Counts by way, and what went wrong."""
    ways: dict[str, Counter[str]] = {}
    faults = []
    for result in results:
        for text in result["texts"]:
            counts = ways.setdefault(text["way"], Counter())
            ended = text["finish_reason"] == "stop"
            counts["texts"] += 1
            counts["stop"] += ended
            counts["length"] += text["finish_reason"] == "length"
            counts["valid"] += bool(text["valid"])
            counts["equal"] += bool(text["equal"])
            counts["compared"] += text["equal"] is not None
            counts["emitted"] += text.get("emitted", 0)
            counts["decisions"] += text.get("decisions", 0)
            wrong = [
                name
                for name, bad in (
                    ("invalid", ended and not text["valid"]),
                    ("differs", text["equal"] is False),
                    (text["finish_reason"], text["finish_reason"] not in ("stop", "length")),
                )
                if bad
            ]
            faults += [{"case_id": result["case_id"], "way": text["way"], "fault": what} for what in wrong]
    return {
        "schemas": len(results),
        "wanted": wanted,
        "ways": {name: dict(counts) for name, counts in ways.items()},
        "faults": faults,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="schemas, a line each, as `forerun bench masks` reads them")
    parser.add_argument("-m", "--model", required=True, help="catalog name or path")
    parser.add_argument("--schemas", type=int, default=100, help="how many")
    parser.add_argument("--limit", type=int, help="do only so many of them in this run")
    parser.add_argument("--drafters", default="suffix,lookup", help="names, with commas between them")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="schemas at a time")
    parser.add_argument("--results", type=Path, help="a file of JSON lines, added to")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no schema after so long")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if min(arguments.schemas, arguments.max_tokens, arguments.batch, arguments.limit or 1) < 1:
        parser.error("--schemas, --limit, --max-tokens and --batch must be at least 1")
    check = json_schema_check()
    if check is None:
        parser.error("needs the package jsonschema")
    # What a schema says to no effect is `forerun bench masks`' affair.
    warnings.simplefilter("ignore", ConstraintWarning)
    began = time.monotonic()
    drafters = [name for name in arguments.drafters.split(",") if name]
    try:
        cases = read_cases(arguments.file)
        path = resolve(arguments.model)
        key = {
            "sha256": file_hash(arguments.model, path), "schemas": arguments.schemas,
            "max_tokens": arguments.max_tokens, "drafters": drafters,
        }  # fmt: skip
        results = read_results(arguments.results, key)
        texts = Texts(path, drafters, arguments.max_tokens, arguments.batch)
        chosen = spread(cases, texts.plain, arguments.schemas)
        have = {result["case_id"] for result in results}
        left = [case for case in chosen if case.case_id not in have][: arguments.limit]
        for start in range(0, len(left), arguments.batch):
            if time.monotonic() - began > 60 * arguments.minutes:
                break
            group = left[start : start + arguments.batch]
            for result in do_group(group, texts, check):
                results.append({**result, "key": key, "date": datetime.now(UTC).isoformat(timespec="seconds")})
                if arguments.results is not None:
                    with arguments.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(results[-1]) + "\n")
            print(f"{len(results)} of {len(chosen)}", file=sys.stderr)
    except (ForerunError, OSError, ValueError) as error:
        sys.exit(f"grammar_texts: {error}")
    found = {"model": arguments.model, **key, **summary(results, len(chosen))}
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"{arguments.model}, sha256 {key['sha256']}, at most {arguments.max_tokens} tokens a text")
        print(f"{found['schemas']} of {found['wanted']} schemas")
        for name, counts in found["ways"].items():
            print(
                f"{name:>18s}: {counts['texts']} texts, {counts['stop']} ended, {counts['valid']} of them valid, "
                f"{counts['length']} cut off, {counts['equal']} of {counts['compared']} equal to those without drafts, "
                f"{counts['emitted'] / max(1, counts['decisions']):.2f} tokens a step"
            )
        for fault in found["faults"]:
            print(f"{fault['case_id']}, {fault['way']}: {fault['fault']}")
    if found["faults"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
