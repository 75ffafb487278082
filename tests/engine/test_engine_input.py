"""What an engine accepts, and that everything else is refused by name, at once, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import Engine, SamplingParams
from forerun.errors import (
    CapacityError,
    ConfigurationError,
    ForerunError,
    InvalidRequestError,
    ModelNotFoundError,
)
from reference.tiny import BOS_ID, VOCAB_SIZE, TinySpec, write_tiny_gguf

FREE = SamplingParams(max_tokens=4, ignore_eos=True)
KV_TOKENS = 256
CONTEXT = 300


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec("llama", layers=1, context=CONTEXT))


@pytest.fixture(scope="module")
def shared(path: Path) -> Engine:
    return Engine(path, kv_tokens=KV_TOKENS, max_rows=4, threads=1, cache_weights=False)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """Must be empty and in order after every test, and still give the answer that it gave before."""
    expected = shared.generate([[1, 2, 3]], FREE)[0].token_ids
    yield shared
    shared.check_integrity()
    assert shared.stats().kv_blocks_used == 0
    assert not shared.step()
    assert shared.generate([[1, 2, 3]], FREE)[0].token_ids == expected


def start(path: Path, **settings: Any) -> Engine:
    return Engine(path, **{"cache_weights": False, "threads": 1, **settings})


def test_shapes_of_prompts(engine: Engine) -> None:
    text, ids = "the end", engine.tokenizer.encode("the end")
    expected = engine.generate([ids], FREE)[0].token_ids
    forms: list[Any] = [
        text, ids, tuple(ids), np.array(ids), np.array(ids, dtype=np.uint16), [np.int64(t) for t in ids],
        [text], (text,), [ids], np.array([ids]), [np.array(ids)], [tuple(ids)], iter([text]),
    ]  # fmt: skip
    for form in forms:
        outputs = engine.generate(form, FREE)
        assert [o.token_ids for o in outputs] == [expected]
        assert outputs[0].prompt_token_ids == tuple(ids)
    mixed = engine.generate([text, ids, np.array(ids), range(3)], FREE)
    assert [o.token_ids for o in mixed[:3]] == [expected] * 3
    assert mixed[3].prompt_token_ids == (0, 1, 2)
    assert engine.generate(range(3), FREE)[0].token_ids == mixed[3].token_ids
    for prompt in (text, ids, tuple(ids), np.array(ids)):
        assert [t for p in engine.stream(prompt, FREE) for t in p.token_ids] == list(expected)
        assert engine.submit(prompt, FREE).result().token_ids == expected
    for tokens in (ids, tuple(ids), np.array(ids), range(3)):
        assert len(engine.score(tokens, top=2).ids) == len(tokens)


def test_no_prompts_are_no_outputs(engine: Engine) -> None:
    assert engine.generate([]) == []
    assert engine.generate([], FREE) == []
    assert engine.generate([], []) == []
    assert engine.chat([], FREE) == []


def test_parameters_for_all_or_for_each(engine: Engine) -> None:
    prompts = [[1], [2], [3]]
    assert [len(o.token_ids) for o in engine.generate(prompts, [replace(FREE, max_tokens=n) for n in (1, 2, 3)])] == [
        1, 2, 3,
    ]  # fmt: skip
    assert len(engine.generate([[1]])[0].token_ids) <= 16
    assert len(engine.generate(prompts, [FREE, None, FREE])) == 3
    for wrong in ([FREE], [FREE] * 4, []):
        with pytest.raises(InvalidRequestError, match=f"3 prompts, but {len(wrong)} sets .* one for each"):
            engine.generate(prompts, wrong)
    for other in (FREE.max_tokens, "greedy", {"max_tokens": 3}, [FREE, {"max_tokens": 3}, FREE]):
        with pytest.raises(InvalidRequestError, match="must be SamplingParams"):
            engine.generate(prompts, other)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="must be SamplingParams, got dict"):
        engine.submit([1], {"max_tokens": 3})  # type: ignore[arg-type]


def test_shapes_of_conversations(engine: Engine) -> None:
    one = [{"role": "user", "content": "hi"}]
    expected = engine.chat(one, FREE)[0].token_ids
    assert [o.token_ids for o in engine.chat([one, one], FREE)] == [expected] * 2
    assert [o.token_ids for o in engine.chat(tuple(one), FREE)] == [expected]
    assert [t for p in engine.stream_chat(one, FREE) for t in p.token_ids] == list(expected)
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert engine.chat_ids(one) == engine.tokenizer.encode(rendered)
    for wrong in (None, 5, "hi", {"role": "user", "content": "hi"}, [5], [[]], ["hi"], [{"role": "user"}], [one, 5]):
        with pytest.raises(InvalidRequestError, match=r"message|conversation"):
            engine.chat(wrong, FREE)  # type: ignore[arg-type]


def test_a_model_without_a_template_says_what_to_use(tmp_path: Path) -> None:
    spec = TinySpec("llama", layers=1, metadata={"tokenizer.chat_template": None})
    engine = start(write_tiny_gguf(tmp_path / "tiny.gguf", spec), kv_tokens=64)
    with pytest.raises(InvalidRequestError, match=r"no chat template; use generate\(\)"):
        engine.chat([{"role": "user", "content": "hi"}], FREE)
    assert len(engine.generate("hi", FREE)[0].token_ids) == 4


def test_a_begin_token_is_added_once(tmp_path: Path) -> None:
    spec = TinySpec("llama", layers=1, metadata={"tokenizer.ggml.add_bos_token": True})
    engine = start(write_tiny_gguf(tmp_path / "tiny.gguf", spec), kv_tokens=64)
    assert engine.generate("hi", FREE)[0].prompt_token_ids[:1] == (BOS_ID,)
    ids = engine.chat_ids([{"role": "user", "content": "hi"}])
    assert ids.count(BOS_ID) == 1
    assert ids[0] == BOS_ID
    assert engine.generate("", FREE)[0].prompt_token_ids == (BOS_ID,)  # not empty for such a model


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "empty.*at least one token"),
    ([[]], "empty.*at least one token"),
    (np.array([], dtype=np.int32), "empty.*at least one token"),
    ([[VOCAB_SIZE]], f"token id {VOCAB_SIZE} at position 0 is outside the vocabulary; expected 0 to {VOCAB_SIZE - 1}"),
    ([1, 2, -1], "token id -1 at position 2 is outside"),
    ([[1, 2**70]], "token id 1180591620717411303424 at position 1 is outside"),
    (np.array([1, 2**63], dtype=np.uint64), "at position 1 is outside"),
    ([1, True], "token id True at position 1 is a bool; expected an integer"),
    ([[1, np.True_]], "is a bool"),
    ([[1, 2.0]], "token id 2.0 at position 1 is a float; expected an integer"),
    (np.array([1.5, 2.0]), "is a float; expected an integer"),
    ([[1, Fraction(1)]], "is a Fraction"),
    ([[1, "2"]], "token id '2' at position 1 is a str"),
    ([[1, None]], "is a NoneType"),
    ([[[1]]], "token id .* is a list"),
    (np.zeros((1, 1, 1), dtype=np.int32), "one dimension .* or two"),
    (np.int64(5), "text or a sequence of token ids"),
    (np.array(5), "one dimension .* or two"),
    (5, "text or a sequence of token ids.*got int"),
    (None, "got NoneType"),
    (b"abc", "got bytes"),
    (bytearray(b"abc"), "got bytearray"),
    ([b"abc"], "got bytes"),
    ({"prompt": "x"}, "got dict"),
    ([{1, 2}], "text or a sequence of token ids, got set"),
    ([5, "text"], "text or a sequence of token ids, got int"),
    ([None], "got NoneType"),
    ("a\ud800b", "lone surrogate.*replace or remove"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS)
def test_bad_prompts_are_refused_before_anything_runs(engine: Engine, prompts: Any, message: str) -> None:
    steps = engine.stats().steps
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate(prompts, FREE)
    good_first = [[1, 2], prompts[0]] if isinstance(prompts, list) and not isinstance(prompts[0], int) else None
    if good_first is not None:
        with pytest.raises(InvalidRequestError, match=message):
            engine.generate(good_first, FREE)
    assert engine.stats().steps == steps
    engine.check_integrity()
    assert not engine.step()


@pytest.mark.parametrize("call", ["submit", "stream", "score"])
@pytest.mark.parametrize("prompt", [[], [VOCAB_SIZE], [-1], [1.0], [True], 5, None, b"ab", {1: 2}, np.array(3)])
def test_other_calls_refuse_them_too(engine: Engine, call: str, prompt: Any) -> None:
    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: engine.submit(prompt, FREE),
        "stream": lambda: list(engine.stream(prompt, FREE)),
        "score": lambda: engine.score(prompt),
    }
    with pytest.raises(InvalidRequestError, match=r"expected|sequence of token ids|empty"):
        calls[call]()


def test_a_text_can_not_be_scored(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="must be a sequence of token ids, got str"):
        engine.score("text")  # type: ignore[arg-type]


@pytest.mark.parametrize("top", [0, -1, VOCAB_SIZE + 1, 1.0, True, None, "3"])
def test_score_refuses_another_top(engine: Engine, top: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"top=.*expected an integer from 1 to {VOCAB_SIZE}"):
        engine.score([1, 2], top=top)
    assert engine.score([1, 2], top=np.int64(3)).ids.shape == (2, 3)  # type: ignore[arg-type]


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": 2.0}, "max_tokens=2.0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is above max_tokens=4"),
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_k": -1}, "top_k=-1"),
    ({"top_p": 1.1}, "top_p=1.1"),
    ({"min_p": -0.1}, "min_p=-0.1"),
    ({"seed": -1}, "seed=-1"),
    ({"seed": 2**64}, "seed="),
    ({"stop": ""}, "stop=''"),
    ({"stop": ["a", 3]}, "stop=3"),
    ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
    ({"logprobs": -1}, "logprobs=-1"),
    ({"ignore_eos": 1}, "ignore_eos=1"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_PARAMS)
def test_parameters_out_of_range_are_refused_when_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{message}.*expected"):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop_token_ids=[VOCAB_SIZE]), f"stop_token_ids contains {VOCAB_SIZE}; expected ids from 0"),
        (SamplingParams(logprobs=VOCAB_SIZE + 1), "logprobs=301 is above the model's vocabulary of 300"),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused(engine: Engine, params: SamplingParams, message: str) -> None:
    running = engine.submit([1], FREE)
    for call in (
        lambda: engine.submit([1], params),
        lambda: engine.generate([[1]], params),
        lambda: engine.fork(running, params),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            call()
    assert len(running.result().token_ids) == 4


def test_a_request_that_can_never_fit_is_refused_and_one_that_just_fits_runs(engine: Engine, path: Path) -> None:
    others = [engine.submit([n], replace(FREE, max_tokens=20)) for n in range(3)]
    engine.step()
    with pytest.raises(CapacityError, match=f"holds {KV_TOKENS}.*shorten the prompt or raise"):
        engine.submit([1] * (KV_TOKENS + 1), FREE)
    with pytest.raises(CapacityError, match=f"needs KV for {KV_TOKENS + 3} tokens|holds {KV_TOKENS}"):
        engine.submit([1] * KV_TOKENS, FREE)
    full = engine.submit([1] * (KV_TOKENS - 4), FREE)
    output = full.result()
    assert len(output.token_ids) == 4
    alone = start(path, kv_tokens=512)
    assert output.token_ids == alone.generate([[1] * (KV_TOKENS - 4)], FREE)[0].token_ids
    for n, handle in enumerate(others):
        assert handle.result().token_ids == alone.generate([[n]], replace(FREE, max_tokens=20))[0].token_ids
    with pytest.raises(CapacityError, match=f"the context holds {CONTEXT}.*shorten the prompt"):
        alone.submit([1] * CONTEXT, FREE)
    assert len(alone.generate([[1] * (CONTEXT - 1)], FREE)[0].token_ids) == 1
    small = start(path, kv_tokens=64, max_model_len=CONTEXT)
    with pytest.raises(CapacityError, match=r"needs KV for 103 tokens.*raise kv_tokens to at least 103"):
        small.submit([1] * 100, FREE)
    with pytest.raises(CapacityError, match=r"whole pool holds 64.*max_tokens to at most 55"):
        small.submit([1] * 10, replace(FREE, max_tokens=100))
    assert not small.step()


def test_too_much_to_score_is_refused(engine: Engine) -> None:
    with pytest.raises(CapacityError, match=f"{KV_TOKENS + 1} tokens to score, but the context holds {KV_TOKENS}"):
        engine.score([1] * (KV_TOKENS + 1))
    assert len(engine.score([1] * KV_TOKENS, top=1).ids) == KV_TOKENS
    running = engine.submit([2] * 40, FREE)
    engine.step()
    with pytest.raises(CapacityError, match=r"free; raise kv_tokens \(now 256\), or wait"):
        engine.score([1] * (KV_TOKENS - 40))
    assert len(engine.score([1] * (KV_TOKENS - 48), top=1).ids) == KV_TOKENS - 48
    assert len(running.result().token_ids) == 4


def test_request_ids(engine: Engine) -> None:
    first = engine.submit([1], FREE, request_id="mine")
    with pytest.raises(InvalidRequestError, match="'mine' is still live; use another id"):
        engine.submit([2], FREE, request_id="mine")
    for wrong in ("", 5, ["x"], b"x"):
        with pytest.raises(InvalidRequestError, match=r"request_id=.*expected a text"):
            engine.submit([2], FREE, request_id=wrong)  # type: ignore[arg-type]
    # Names that the engine was about to give are passed over.
    upcoming = int(engine.submit([1], FREE).request_id.removeprefix("request-")) + 1
    taken = [engine.submit([n], FREE, request_id=f"request-{upcoming + n}") for n in range(5)]
    own = [engine.submit([n], FREE) for n in range(3)]
    assert len({handle.request_id for handle in (*taken, *own, engine.fork(first))}) == 9
    assert len(first.result().token_ids) == 4
    again = engine.submit([1], FREE, request_id="mine")  # free again
    assert again.result().token_ids == first.result().token_ids
    while engine.step():
        pass


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    *(
        ({"kv_tokens": value}, f"kv_tokens={value!r} is not allowed; expected an integer from 16 to".replace("-", "."))
        for value in (0, 15, -16, 2**40, 64.0, "64", None, True)
    ),
    ({"kv_tokens": 2**31 - 16}, r"kv_tokens=2147483632 needs .* GB .* this machine has .* expected at most \d+"),
    ({"max_model_len": CONTEXT + 1}, f"max_model_len={CONTEXT + 1} is above the model's context of {CONTEXT}.*lower"),
    ({"max_model_len": 0}, "max_model_len=0 is not allowed; expected"),
    ({"max_model_len": 1.5}, "max_model_len=1.5 is not allowed; expected"),
    ({"threads": 0}, "threads=0: the number of threads must be 1..256"),
    ({"threads": -1}, "threads=-1"),
    ({"threads": 257}, "threads=257"),
    ({"threads": 1.0}, "threads=1.0"),
    ({"threads": True}, "threads=True"),
    ({"shared_bytes": -1}, "shared_bytes=-1 is not allowed; expected"),
    ({"shared_bytes": 1000}, "shared_bytes must be at least 65536, got 1000"),
    ({"max_rows": 0}, "max_rows=0 is not allowed; expected"),
    ({"max_rows": 5000}, "max_rows=5000"),
    ({"max_rows": 8, "max_step_tokens": 7}, r"max_step_tokens \(7\) must be at least max_rows \(8\).*raise"),
    ({"max_step_tokens": 0}, "max_step_tokens=0 is not allowed; expected"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_bad_settings_are_refused(path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        start(path, **settings)


def test_numpy_integers_are_integers(path: Path) -> None:
    engine = start(path, kv_tokens=np.int64(64), max_model_len=np.int32(32), max_rows=np.int64(2))
    assert (engine.max_model_len, engine.pool.capacity_tokens) == (32, 64)
    assert len(engine.generate([[1]] * 3, FREE)) == 3


def test_a_pool_smaller_than_the_context_bounds_it(path: Path) -> None:
    engine = start(path, kv_tokens=31)
    assert (engine.pool.capacity_tokens, engine.max_model_len) == (16, 16)
    assert len(engine.generate([[1]], SamplingParams(max_tokens=None, ignore_eos=True))[0].token_ids) == 15
    with pytest.raises(CapacityError, match="context holds 16"):
        engine.generate([[1] * 16], FREE)


@pytest.mark.parametrize("value", ["0", "-1", "two", "257", "1.5", " ", "9" * 30])
def test_a_bad_number_of_threads_in_the_environment(path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FORERUN_THREADS", value)
    with pytest.raises(ConfigurationError, match=r"FORERUN_THREADS=.*1\.\.256"):
        start(path, threads=None)
    assert start(path, threads=1).executor.tape.threads == 1  # an argument comes first


def test_threads_from_the_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_THREADS", "2")
    assert start(path, threads=None).executor.tape.threads == 2


def test_an_unknown_instruction_set_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_ISA", "sse9")
    with pytest.raises(
        ConfigurationError,
        match=r"FORERUN_ISA='sse9'.*use one of avx512, .*portable that this CPU supports, or unset it",
    ):
        start(path)
    monkeypatch.setenv("FORERUN_ISA", "portable")
    assert len(start(path).generate([[1]], FREE)) == 1


@pytest.mark.parametrize("model", [None, 5, b"model.gguf", ["a"], True])
def test_a_model_of_another_type_is_refused(model: Any) -> None:
    with pytest.raises(ConfigurationError, match="model must be a catalog name or the path"):
        Engine(model)


@pytest.mark.parametrize("model", ["", "no-such-model", "/no/such/file.gguf", Path("absent")])
def test_an_unknown_model_is_named(model: Any) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model is named|there is no file"):
        Engine(model)


def test_no_file_stays_open_without_its_engine(tmp_path: Path) -> None:
    own = write_tiny_gguf(tmp_path / "own.gguf", TinySpec("llama", layers=1))

    def open_files() -> list[str]:
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return [os.readlink(link) for link in links if os.path.exists(link)]

    for settings in ({"threads": 0}, {"kv_tokens": 2**31 - 16}, {"max_model_len": 10**6}, {"max_step_tokens": 1}):
        with pytest.raises(ForerunError) as kept:
            start(own, **settings)
        assert kept.value
        assert str(own) not in open_files()
    engine = start(own)
    assert len(engine.generate([[1]], FREE)) == 1
    del engine
    gc.collect()
    assert str(own) not in open_files()
