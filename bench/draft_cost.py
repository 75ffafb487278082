#!/usr/bin/env python3
"""What the drafters that need no model cost, in microseconds, without an engine around them.

    python bench/draft_cost.py

- proposal: one call of `propose` for one row after one more token, the usual case of decoding; it includes the token's
  way into the index. Prompt lookup at 32,768 tokens of context, suffix at 8,192 without a shared store and
  with one filled to its cap by texts that are shuffled pieces of the same tokens, so that nearly every context has many
  occurrences. With --model, also without a store and with the words that begin like the one being written.
- append: per token, when a whole prompt arrives at once.
- free: one finished text of the context's length put into the full store, where others must leave for it.

The tokens are a text's: with --model its tokenizer over --data (JSON lines; strings and lists of strings of each are
joined), otherwise seeded text from a Markov chain with a vocabulary of 32,000. Contexts start at different places.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median, quantiles

from forerun import SamplingParams
from forerun.draft.base import Drafter, DraftRow
from forerun.draft.lookup import PromptLookup
from forerun.draft.suffix import SuffixDrafter
from forerun.errors import ForerunError
from forerun.models.tokenizer import Tokenizer

LOOKUP_CONTEXT = 32_768
SUFFIX_CONTEXT = 8_192
BUDGET = 16
WIDTH = 72
PARAMS = SamplingParams()


def strings(value: object) -> Iterator[str]:
    """Every text of some length inside a JSON value."""
    if isinstance(value, str):
        if len(value) > 40:
            yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, dict):
        yield from strings(list(value.values()))


def real_tokens(model: str, files: list[Path]) -> tuple[Tokenizer, list[int]]:
    """The model's tokenizer, and the files' texts in its tokens."""
    from forerun.models.download import resolve
    from forerun.models.source import open_model

    # Not splitlines(): a JSON string may hold U+2028.
    lines = [line for file in files for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    texts = [text for line in lines for text in strings(json.loads(line))]
    random.Random(1).shuffle(texts)
    with open_model(resolve(model)) as source:
        tokenizer = source.tokenizer()
        return tokenizer, [token for text in texts for token in tokenizer.encode_plain(text + "\n")]


def markov_tokens(n: int) -> list[int]:
    """Text-like tokens: Zipf's law, few likely successors of each, and repeats of earlier stretches."""
    rng = random.Random(1)
    tokens = [0]
    while len(tokens) < n:
        if rng.random() < 0.02 and len(tokens) > 100:
            start = rng.randrange(len(tokens) - 60)
            tokens += tokens[start : start + rng.randrange(4, 60)]
        else:
            choice = int(rng.paretovariate(0.6)) % 1000
            tokens.append((tokens[-1] * 7919 + choice * 104_729) % 32_000)
    return tokens[:n]


def microseconds(work: Callable[[], object]) -> float:
    """Duration of one call."""
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1000


def line(what: str, times: list[float]) -> None:
    """One row of the table."""
    print(f"{what:{WIDTH}s} {median(times):9.2f} {quantiles(times, n=100)[98]:9.2f}")


def measure(drafter: Drafter, tokens: list[int], context: int, repeats: int, texts: int) -> None:
    """Prints proposals, appends and frees of one drafter."""
    proposals, appends, frees, nodes = [], [], [], 0
    for text in range(texts):
        start = text * 7919 % (len(tokens) - context - repeats)
        live = tokens[start : start + context]
        row = DraftRow(text, live, BUDGET, PARAMS, 0)
        drafter.begin(text, None)
        appends.append(microseconds(partial(drafter.propose, [row])) / context)
        for token in tokens[start + context : start + context + repeats]:
            live.append(token)
            proposals.append(microseconds(partial(drafter.propose, [row])))
            nodes += len(drafter.propose([row])[0])
        frees.append(microseconds(partial(drafter.free, row.key, row.tokens)))
    name = f"{drafter.name} at {context} tokens"
    line(f"{name}: proposal, budget {BUDGET}, {nodes / len(proposals):.1f} nodes on average", proposals)
    line(f"{name}: append, per token", appends)
    line(f"{name}: free", frees)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="whose tokenizer, a catalog name or path; needs --data")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="JSON-lines files to take text from")
    parser.add_argument("--repeats", type=int, default=200, help="proposals for each text")
    parser.add_argument("--texts", type=int, default=10, help="texts, at least 2")
    arguments = parser.parse_args()
    if bool(arguments.model) != bool(arguments.data):
        parser.error("--model and --data go together")
    if arguments.texts < 2 or arguments.repeats < 1:
        parser.error("--texts must be at least 2 and --repeats at least 1")
    tokenizer = None
    try:
        if arguments.model:
            tokenizer, tokens = real_tokens(arguments.model, arguments.data)
        else:
            tokens = markov_tokens(1_000_000)
    except OSError as error:
        sys.exit(f"draft_cost: {error.filename} can't be read: {error.strerror}")
    except (ForerunError, ValueError) as error:
        sys.exit(f"draft_cost: {error}")
    need = LOOKUP_CONTEXT + arguments.repeats + 1
    if len(tokens) < need:
        parser.error(f"needs {need} tokens for these --repeats, there are {len(tokens)}")

    print(f"{len(tokens)} tokens of {'text' if arguments.model else 'a Markov chain'}; microseconds")
    print(f"{'':{WIDTH}s} {'median':>9s} {'p99':>9s}")
    measure(PromptLookup(), tokens, LOOKUP_CONTEXT, arguments.repeats, arguments.texts)
    alone = SuffixDrafter(shared=False)
    print("suffix without a shared store")
    measure(alone, tokens, SUFFIX_CONTEXT, arguments.repeats, arguments.texts)
    if tokenizer is not None:
        print("suffix with words, without a shared store")
        words = SuffixDrafter(shared=False, tokenizer=tokenizer)
        measure(words, tokens, SUFFIX_CONTEXT, arguments.repeats, arguments.texts)
    drafter = SuffixDrafter()
    store = drafter.store
    assert store is not None
    filler = random.Random(2)
    key = -1
    while store.evicted < 10:
        starts = [filler.randrange(len(tokens) - 40) for _ in range(filler.randrange(2, 40))]
        drafter.begin(key, None)
        drafter.free(key, [token for start in starts for token in tokens[start : start + 40]])
        key -= 1
    print(f"suffix with a shared store of {store.n_documents} texts, {store.n_tokens} tokens, {store.used_bytes} bytes")
    measure(drafter, tokens, SUFFIX_CONTEXT, arguments.repeats, arguments.texts)


if __name__ == "__main__":
    main()
