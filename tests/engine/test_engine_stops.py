"""When an answer ends: end tokens, stop tokens, stop strings, minimum and maximum, alone and together.

The reference takes one step at a time from `Engine.score`, forbids what must be forbidden, and looks for every stop
everywhere in the text. Cases named by number are those of the project's list of what broke other engines.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import Engine, RequestOutput, SamplingParams
from forerun.errors import InvalidRequestError
from reference.bigram import write_bigram_gguf
from reference.tiny import VOCAB_SIZE, TinySpec, tiny_tokens, write_tiny_gguf

PROMPTS = ((1, 2, 3), (250, 7), (99,))
LONGEST = 12


class Answer(NamedTuple):
    """What a caller must get."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def engine_for(path: Path) -> Engine:
    return Engine(path, kv_tokens=1024, threads=1, cache_weights=False)


def answer_of(output: RequestOutput) -> Answer:
    return Answer(output.token_ids, output.text, output.finish_reason)


def emptied(engine: Engine) -> None:
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    assert not engine.step()


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A random model whose end token it never chooses by itself in these tests."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return engine_for(write_tiny_gguf(path, TinySpec("llama", layers=1)))


@pytest.fixture(scope="module")
def ending(free: Engine, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Engine]:
    """The same model with the token that greedy chooses at `position` of an answer declared its end token (case 3)."""

    @cache
    def make(position: int) -> Engine:
        tokens = free.generate([PROMPTS[0]], SamplingParams(max_tokens=LONGEST, ignore_eos=True))[0].token_ids
        spec = TinySpec("llama", layers=1, metadata={"tokenizer.ggml.eos_token_id": tokens[position]})
        return engine_for(write_tiny_gguf(tmp_path_factory.mktemp("model") / "ending.gguf", spec))

    return make


def whole_characters(engine: Engine, tokens: Sequence[int]) -> str:
    tokenizer = engine.tokenizer
    data = b"".join(tokenizer.token_bytes(t) for t in tokens if not tokenizer.is_special(t))
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)


@cache
def ranking(engine: Engine, tokens: tuple[int, ...]) -> list[int]:
    """All tokens from the most to the least probable after `tokens`."""
    return engine.score(tokens, top=VOCAB_SIZE).ids[-1].tolist()  # type: ignore[no-any-return]


def expected_answer(engine: Engine, prompt: tuple[int, ...], params: SamplingParams) -> Answer:
    """Greedy decoding with every rule spelt out."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else engine.tokenizer.eos_ids)}
    out: list[int] = []
    while True:
        ranked = ranking(engine, (*prompt, *out))
        early = len(out) < params.min_tokens
        out.append(next(t for t in ranked if not (early and t in ends)))
        before, text = whole_characters(engine, out[:-1]), whole_characters(engine, out)
        if out[-1] in ends:
            return Answer(tuple(out), engine.tokenizer.decode(out[:-1]), "stop")
        found = [
            (start, -len(stop))
            for stop in params.stop_strings
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > len(before)
        ]
        if found and len(out) >= params.min_tokens:
            start, negative = min(found)
            kept = text[: start - negative] if params.include_stop_str_in_output else text[:start]
            return Answer(tuple(out), kept, "stop")
        if len(out) == params.max_tokens:
            return Answer(tuple(out), engine.tokenizer.decode(out), "length")


@st.composite
def asks(draw: st.DrawFn, engine: Engine) -> tuple[tuple[int, ...], SamplingParams]:
    """A prompt and parameters whose stops are likely to be met: they are taken from the answer itself."""
    prompt = draw(st.sampled_from(PROMPTS))
    answer = engine.generate([prompt], SamplingParams(max_tokens=LONGEST, ignore_eos=True))[0]
    text = answer.text
    span = st.integers(0, len(text) - 1).flatmap(
        lambda a: st.integers(a + 1, min(a + 4, len(text))).map(lambda b: text[a:b])
    )
    max_tokens = draw(st.integers(1, LONGEST))
    return prompt, SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        ignore_eos=draw(st.booleans()),
        stop=draw(st.lists(span, max_size=2)),
        stop_token_ids=draw(st.lists(st.sampled_from(answer.token_ids), max_size=2)),
        include_stop_str_in_output=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )


@given(data=st.data(), position=st.sampled_from([0, 3, 7]))
@settings(max_examples=80, deadline=None)
def test_answers_end_where_the_reference_ends_them(
    ending: Callable[[int], Engine], data: st.DataObject, position: int
) -> None:
    engine = ending(position)
    mix = data.draw(st.lists(asks(engine), min_size=1, max_size=4))
    outputs = engine.generate([prompt for prompt, _ in mix], [params for _, params in mix])
    for (prompt, params), output in zip(mix, outputs, strict=True):
        assert answer_of(output) == expected_answer(engine, prompt, params)
        assert output.stats.output_tokens == len(output.token_ids)
        assert len(output.logprobs) == (0 if params.logprobs is None else len(output.token_ids))
        assert all(entry.token_id == token for entry, token in zip(output.logprobs, output.token_ids, strict=False))
    emptied(engine)


@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.8, 3.0]),
    position=st.integers(0, LONGEST - 1),
    by_string=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_sampled_answers_are_those_without_stops_cut(
    free: Engine, seed: int, temperature: float, position: int, by_string: bool
) -> None:
    params = SamplingParams(max_tokens=LONGEST, temperature=temperature, seed=seed, ignore_eos=True)
    whole = free.generate([PROMPTS[0]], params)[0]
    if by_string:
        # What an unfinished last character leaves in the text completes no stop string.
        stop = whole_characters(free, whole.token_ids)[position : position + 2]
        if not stop:
            return
        output = free.generate([PROMPTS[0]], replace(params, stop=stop))[0]
        assert output.text == whole.text[: whole.text.index(stop)]
    else:
        token = whole.token_ids[position]
        output = free.generate([PROMPTS[0]], replace(params, stop_token_ids=[token]))[0]
        assert output.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("position", range(6))
def test_an_end_token_cuts_greedy_at_its_place(free: Engine, ending: Callable[[int], Engine], position: int) -> None:
    """Case 3, for every position of the end token."""
    params = SamplingParams(max_tokens=LONGEST)
    greedy = free.generate([PROMPTS[0]], replace(params, ignore_eos=True))[0]
    cut = greedy.token_ids.index(greedy.token_ids[position])
    output = ending(position).generate([PROMPTS[0]], params)[0]
    assert answer_of(output) == Answer(
        greedy.token_ids[: cut + 1], free.tokenizer.decode(greedy.token_ids[:cut]), "stop"
    )
    ignored = ending(position).generate([PROMPTS[0]], replace(params, ignore_eos=True))[0]
    assert ignored.token_ids == greedy.token_ids


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """An engine whose greedy answers follow scripts, see `write_bigram_gguf`."""

    def make(*scripts: Sequence[int], eos: int | None = None) -> Engine:
        metadata = None if eos is None else {"tokenizer.ggml.eos_token_id": eos}
        return engine_for(write_bigram_gguf(tmp_path_factory.mktemp("model") / "b.gguf", *scripts, metadata=metadata))

    return make


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [(5, ((10, 11, 42), "stop")), (3, ((10, 11, 42), "stop")), (2, ((10, 11), "length")), (1, ((10,), "length"))],
)
def test_a_stop_at_the_budget_stops_and_one_past_it_does_not(
    scripted: Callable[..., Engine], max_tokens: int, expected: tuple[tuple[int, ...], str]
) -> None:
    """Cases 1, 2 and 4."""
    engine = scripted([9, 10, 11, 42, 20, 21, 22])
    output = engine.generate([[9]], SamplingParams(max_tokens=max_tokens, stop_token_ids=[42, 43]))[0]
    assert (output.token_ids, output.finish_reason) == expected
    assert output.text == engine.tokenizer.decode([10, 11][:max_tokens])


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 6])
def test_min_tokens_counts_tokens_and_bans_the_end_until_then(scripted: Callable[..., Engine], min_tokens: int) -> None:
    """Case 8. The end token is always the most probable; forbidden, it leaves the rest at equal odds: 0 comes first."""
    engine = scripted(*([token, 42] for token in range(VOCAB_SIZE) if token != 42), eos=42)
    params = SamplingParams(max_tokens=8, min_tokens=min_tokens, logprobs=1)
    output = engine.generate([[9]], params)[0]
    assert output.token_ids == (*(0,) * min_tokens, 42)
    assert output.finish_reason == "stop"
    # The log-probabilities are the model's own: the banned token keeps its place at the top.
    assert all(entry.top[0][0] == 42 and entry.top[0][1] > -0.01 for entry in output.logprobs)
    assert all(entry.logprob < -10 for entry in output.logprobs[:-1])
    quiet = engine.generate([[9]], replace(params, logprobs=None))[0]
    sampled = engine.generate([[9]], replace(params, temperature=0.5, seed=4))[0]
    assert quiet.token_ids == output.token_ids
    assert 42 not in sampled.token_ids[:min_tokens]
    assert sampled.token_ids[min_tokens] == 42
    longest = engine.generate([[9]], replace(params, max_tokens=max(min_tokens, 1)))[0]
    assert (longest.finish_reason, len(longest.token_ids)) == (("length", min_tokens) if min_tokens else ("stop", 1))


def test_a_stop_token_from_the_parameters_is_banned_like_the_end_token(scripted: Callable[..., Engine]) -> None:
    engine = scripted([9, 10, 42, 11], [0, 42])
    params = SamplingParams(max_tokens=8, min_tokens=4, stop_token_ids=[10, 42], ignore_eos=True)
    assert engine.generate([[9]], params)[0].token_ids == (0, 0, 0, 0, 42)


def test_a_ban_on_every_token_is_refused(free: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="every token of the vocabulary"):
        free.submit([1], SamplingParams(min_tokens=1, stop_token_ids=range(VOCAB_SIZE)))
    most = SamplingParams(min_tokens=1, stop_token_ids=[t for t in range(VOCAB_SIZE) if t != 17], max_tokens=2)
    assert free.generate([[1]], most)[0].token_ids[0] == 17
    emptied(free)


def test_no_limit_ends_at_the_context(tmp_path: Path) -> None:
    engine = engine_for(write_tiny_gguf(tmp_path / "tiny.gguf", TinySpec("llama", layers=1, context=40)))
    output = engine.generate([[1] * 25], SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert (len(output.token_ids), output.finish_reason) == (15, "length")
    clamped = engine.generate([[1] * 36], SamplingParams(max_tokens=64, ignore_eos=True))[0]
    assert (len(clamped.token_ids), clamped.finish_reason) == (4, "length")


EMOJI = "😀".encode()
ING = tiny_tokens().index("ing")
THE = tiny_tokens().index("Ġthe")


class Case(NamedTuple):
    """A scripted answer, its stop strings, and what is left of the text and the tokens."""

    script: tuple[int, ...]
    stop: tuple[str, ...]
    text: str
    n_tokens: int


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case((*b"x", ING, *b"s", THE, *b"y"), ("gs t",), "xin", 4),  # over three tokens, ending inside the last
        Case((*b"a", *EMOJI, *b"b", *b"c"), ("😀b",), "a", 6),  # begins with a character of four tokens
        Case((*b"a", *EMOJI, *b"b"), ("a😀",), "", 5),  # ends with its last byte
        Case((*b"ab", *EMOJI[:2], *b"c"), ("\ufffdc",), "ab", 5),  # what a broken character became
        Case((*b"abcd", ING), ("cd", "bc"), "a", 3),  # the one completed first
        Case((*b"z", ING), ("n", "in", "ing"), "z", 2),  # the one that begins first, then the longest
        Case((*b"abc",), ("bcd", "c!", "zz"), "abc", 3),  # none: held back at the end, and given
    ],
)
def test_stop_strings_over_token_borders(scripted: Callable[..., Engine], case: Case, include: bool) -> None:
    engine = scripted([0xFF, *case.script])
    params = SamplingParams(max_tokens=len(case.script), stop=case.stop, include_stop_str_in_output=include, logprobs=1)
    output = engine.generate([[0xFF]], params)[0]
    ended = case.text != engine.tokenizer.decode(case.script)
    assert output.finish_reason == ("stop" if ended else "length")
    # Case 5: text, ids and log-probabilities end at one boundary.
    assert output.token_ids == case.script[: case.n_tokens]
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    if include and ended:
        assert any(output.text == case.text + stop for stop in case.stop)
    else:
        assert output.text == case.text
    assert "".join(engine.stream([0xFF], params)) == output.text
    emptied(engine)


def test_a_stop_string_counts_from_min_tokens_on(scripted: Callable[..., Engine]) -> None:
    engine = scripted([0xFF, *b"abcdefg"])
    for min_tokens, text in ((0, "a"), (3, "a"), (4, "abcdefg"), (7, "abcdefg")):
        params = SamplingParams(max_tokens=7, min_tokens=min_tokens, stop="bc")
        assert engine.generate([[0xFF]], params)[0].text == text


def test_the_stop_string_of_a_prompt_is_not_searched(scripted: Callable[..., Engine]) -> None:
    engine = scripted([ord("a"), ord("b"), ord("c")])
    output = engine.generate(["xa"], SamplingParams(max_tokens=2, stop="ab"))[0]
    assert output.text == "bc"


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<|im_start|>b")])
def test_special_tokens_in_an_answer(scripted: Callable[..., Engine], skip: bool, text: str) -> None:
    start = tiny_tokens().index("<|im_start|>")
    engine = scripted([9, ord("a"), start, ord("b"), 42], eos=42)
    params = SamplingParams(max_tokens=9, skip_special_tokens=skip)
    # The token that ends the answer has no text in either case.
    assert answer_of(engine.generate([[9]], params)[0]) == Answer((97, start, 98, 42), text, "stop")


def test_a_fork_finds_a_stop_string_that_its_parent_began(scripted: Callable[..., Engine]) -> None:
    engine = scripted([9, *b"abcdef"])
    parent = engine.submit([9], SamplingParams(max_tokens=6))
    for _ in range(3):
        engine.step()
    child = engine.fork(parent, SamplingParams(max_tokens=6, stop=["cd", "ab"]))
    assert child.result().text == "ab"  # which was complete before the fork asked for it
    assert "".join(parent) == parent.result().text == "abcdef"
    emptied(engine)
