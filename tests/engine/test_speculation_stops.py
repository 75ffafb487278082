"""Where an answer ends when the end falls inside a block of accepted drafts, and how such blocks are streamed.

The models follow scripts, so blocks are known: the prompt's step writes one token, then each step writes as many
drafts as are accepted and one token more. Cases named by number are those of the project's list of what broke other
engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import Piece, RequestOutput, SamplingParams
from forerun.draft.base import DraftRow, DraftTree
from reference.bigram import write_bigram_gguf
from reference.drafters import Oracle, RandomTrees, Scripted
from reference.speculation import Ask, Unspeculated, check_identities, engine_for
from reference.tiny import TinySpec, tiny_tokens, write_tiny_gguf

PROMPT = 200
LETTERS = tuple(b"abcdefghijklmnopqrstuvwxyz")
"""A script in which token and character are the same."""
BLOCK = 5
"""Drafts of a step."""
ENDS = range(13)
"""Places of the end: the prompt's token, and all of two blocks."""

Following = Callable[[int], list[int]]


def following(script: Sequence[int]) -> Following:
    """What comes after a token of a script, up to the script's end."""
    script = list(script)
    return lambda token: script[script.index(token) + 1 :] if token in script else []


def chains(after: Following) -> Scripted:
    """Drafts that are always right."""
    return Scripted(lambda row: after(row.tokens[-1])[: row.budget])


def combs(after: Following) -> Scripted:
    """Trees in which a wrong sibling comes before every right token, so that accepted KV has to be moved."""

    def tree(row: DraftRow) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        at = -1
        for token in after(row.tokens[-1])[: row.budget // 2]:
            tokens += [(token + 50) % 256, token]
            parents += [at, at]
            at = len(tokens) - 1
        return DraftTree(tokens, parents)

    return Scripted(tree)


def late_mistakes(after: Following) -> Scripted:
    """Three right tokens, then a wrong one, then right ones."""

    def chain(row: DraftRow) -> list[int]:
        tokens = after(row.tokens[-1])[: row.budget]
        return [*tokens[:3], *(token ^ 1 for token in tokens[3:4]), *tokens[4:]]

    return Scripted(chain)


SHAPES = {"chain": (chains, BLOCK), "comb": (combs, 2 * BLOCK), "late mistake": (late_mistakes, BLOCK)}
"""Makers of drafters, with the draft length."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Scripted models by script and end token."""
    made: dict[tuple[tuple[int, ...], int | None], Path] = {}

    def make(script: Sequence[int], eos: int | None = None) -> Path:
        key = (tuple(script), eos)
        if key not in made:
            metadata = None if eos is None else {"tokenizer.ggml.eos_token_id": eos}
            folder = tmp_path_factory.mktemp("model")
            made[key] = write_bigram_gguf(folder / "b.gguf", [PROMPT, *script], metadata=metadata)
        return made[key]

    return make


def speculated(
    path: Path, script: Sequence[int], shape: str, params: SamplingParams
) -> tuple[RequestOutput, list[Piece]]:
    """The output of a request that drafts in this shape, and the pieces of the same request streamed."""
    make, draft_len = SHAPES[shape]
    engine = engine_for(path, make(following([PROMPT, *script])), draft_len)
    [output] = engine.generate([[PROMPT]], params)
    pieces = list(engine.stream([PROMPT], params))
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    check_identities(output)
    assert "".join(pieces) == output.text
    assert [t for piece in pieces for t in piece.token_ids] == list(output.token_ids)
    assert [entry for piece in pieces for entry in piece.logprobs] == list(output.logprobs)
    assert [origin for piece in pieces for origin in piece.origins].count(
        "accepted"
    ) <= output.stats.speculation.accepted
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [output.finish_reason]
    return output, pieces


def dropped(position: int) -> int:
    """Tokens that a block of chains writes after the one at this place of the output."""
    return 0 if position == 0 else BLOCK - (position - 1) % (BLOCK + 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("position", ENDS)
@pytest.mark.parametrize("kind", ["eos", "stop token", "stop string", "max_tokens"])
def test_every_kind_of_end_at_every_place_of_a_block(
    models: Callable[..., Path], kind: str, position: int, shape: str
) -> None:
    """Cases 1, 3, 4, 5 and 7. The answer is the script up to the end, and what was accepted past it is counted."""
    token = LETTERS[position]
    path = models(LETTERS, token if kind == "eos" else None)
    match kind:
        case "eos":
            params = SamplingParams(max_tokens=20, logprobs=2)
        case "stop token":
            params = SamplingParams(max_tokens=20, logprobs=2, stop_token_ids=[token])
        case "stop string":
            params = SamplingParams(max_tokens=20, logprobs=2, stop=chr(token))
        case _:
            params = SamplingParams(max_tokens=position + 1, logprobs=2)
    output, _ = speculated(path, LETTERS, shape, params)
    assert output.token_ids == LETTERS[: position + 1]
    assert output.finish_reason == ("length" if kind == "max_tokens" else "stop")
    kept = position + 1 if kind == "max_tokens" else position
    assert output.text == bytes(LETTERS[:kept]).decode()
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    stats = output.stats.speculation
    if shape == "chain" or (shape == "comb" and kind != "max_tokens"):
        assert stats.cut == (0 if kind == "max_tokens" else dropped(position))
        assert stats.decisions == 1 + -(-position // (BLOCK + 1))
    assert stats.emitted == position + 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("position", range(1, 12))
def test_stop_strings_that_span_blocks(models: Callable[..., Path], position: int, shape: str) -> None:
    """The string's second character may begin the next block; text, ids and log-probabilities end together."""
    path = models(LETTERS)
    stop = bytes(LETTERS[position : position + 2]).decode()
    for include in (False, True):
        params = SamplingParams(max_tokens=20, stop=[stop, "zz"], logprobs=0, include_stop_str_in_output=include)
        output, _ = speculated(path, LETTERS, shape, params)
        assert output.token_ids == LETTERS[: position + 2]
        assert output.text == bytes(LETTERS[: position + 2 * include]).decode()
        assert (len(output.logprobs), output.finish_reason) == (position + 2, "stop")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("min_tokens", range(14))
def test_min_tokens_inside_a_block(models: Callable[..., Path], min_tokens: int, shape: str) -> None:
    """Case 8: the end token is banned at a draft's own place, not at that of the block's first token.

    The end token follows every letter that precedes it in the script; while it is banned, all other tokens are alike
    and the first one, 0, is taken, which goes back to the script's beginning.
    """
    script = [*LETTERS[:4], 42]
    path = models([*script, 0, LETTERS[0]], 42)
    params = SamplingParams(max_tokens=18, min_tokens=min_tokens, logprobs=1)
    alone = Unspeculated(path)
    output, _ = speculated(path, [*script, 0, *LETTERS[:4], 42], shape, params)
    alone.compare([Ask((PROMPT,), params)], [output])
    # abcd, then the end if it is allowed, else 0 and once more.
    place = next((n for n in (4, 9, 14) if n >= min_tokens), None)
    assert place is not None
    assert output.token_ids == (*((*LETTERS[:4], 0) * 3)[:place], 42)


def test_a_ban_that_ends_inside_a_block(models: Callable[..., Path]) -> None:
    """Drafts that hold the end token are refused where it is banned and accepted where it isn't, in one and the same
    tree."""
    path = models([0, 42], 42)
    for min_tokens in range(1, 8):
        params = SamplingParams(max_tokens=12, min_tokens=min_tokens, logprobs=1)

        def tree(row: DraftRow) -> DraftTree:
            # At every place both: the end token first, and 0, which is what a ban leaves.
            tokens = [42, 0] * (row.budget // 2)
            return DraftTree(tokens, [2 * (i // 2) - 1 for i in range(len(tokens))])

        engine = engine_for(path, Scripted(tree), 12)
        [output] = engine.generate([[0]], params)
        assert output.token_ids == (*(0,) * min_tokens, 42)
        assert output.finish_reason == "stop"
        Unspeculated(path).compare([Ask((0,), params)], [output])


@pytest.mark.parametrize(
    ("script", "budget", "stops", "expected"),
    [
        ([10, 11, 42, 20, 21, 22], 5, [42], ((10, 11, 42), "stop")),
        ([10, 11, 12, 13, 14, 42], 5, [42], ((10, 11, 12, 13, 14), "length")),
        ([42, 5, 43, 7, 44, 6], 6, [42, 43, 44], ((42,), "stop")),
        ([4, 5, 43, 7, 42, 6], 2, [42, 43, 44], ((4, 5), "length")),
        ([4, 5, 43, 7, 42, 6], 9, [42, 43, 44], ((4, 5, 43), "stop")),
        ([10, 11, 12, 13, 14], 1, [], ((10,), "length")),
    ],
)
def test_the_first_end_of_a_block_counts(
    models: Callable[..., Path], script: list[int], budget: int, stops: list[int],
    expected: tuple[tuple[int, ...], str],
) -> None:  # fmt: skip
    """Cases 1, 2 and 4, with the block after one token of the prompt's own step (201) and all of it drafted."""
    path = models([201, *script])
    engine = engine_for(path, chains(following([PROMPT, 201, *script])), 6)
    params = SamplingParams(max_tokens=1 + budget, stop_token_ids=stops, logprobs=0)
    [output] = engine.generate([[PROMPT]], params)
    assert (output.token_ids[1:], output.finish_reason) == expected
    assert output.stats.output_tokens == len(output.token_ids) == len(output.logprobs)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Unspeculated:
    return Unspeculated(tiny)


LONGEST = 12


@given(data=st.data(), seed=st.integers(0, 50), shape=st.sampled_from(["chain", "tree"]), draft_len=st.integers(1, 14))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_stops_of_all_kinds_together(
    tiny: Path, alone: Unspeculated, data: st.DataObject, seed: int, shape: str, draft_len: int
) -> None:
    """Stops taken from the answer itself, alone and combined, in mixes; compared with the unspeculated answers."""
    asks: list[Ask] = []
    for prompt in data.draw(st.lists(st.sampled_from([(1, 2, 3), (250, 7), (99,)]), min_size=1, max_size=4)):
        temperature = data.draw(st.sampled_from([0.0, 0.0, 1.0]))
        free = SamplingParams(max_tokens=LONGEST, ignore_eos=True, temperature=temperature, seed=seed)
        answer = alone.answer(prompt, free)
        text = answer.text or "?"
        start = data.draw(st.integers(0, len(text) - 1))
        max_tokens = data.draw(st.integers(1, LONGEST))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=data.draw(st.integers(0, max_tokens)),
            temperature=temperature,
            seed=seed,
            ignore_eos=data.draw(st.booleans()),
            stop=data.draw(st.sampled_from([(), text[start : start + 1], text[start : start + 3]])),
            stop_token_ids=data.draw(st.lists(st.sampled_from(answer.token_ids), max_size=2)),
            include_stop_str_in_output=data.draw(st.booleans()),
            logprobs=data.draw(st.sampled_from([None, 0, 3])),
        )
        alone.answer(prompt, params)
        asks.append(Ask(prompt, params))
    drafter = Oracle(alone.truth) if shape == "chain" else RandomTrees(alone.truth, seed)
    engine = engine_for(tiny, drafter, draft_len)
    alone.compare(asks, engine.generate([ask.prompt for ask in asks], [ask.params for ask in asks]))
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0


def test_every_accepted_token_is_released_at_once(models: Callable[..., Path]) -> None:
    """One piece a step: the prompt's token, then whole blocks, told apart by where their tokens come from."""
    path = models(LETTERS)
    engine = engine_for(path, chains(following([PROMPT, *LETTERS])))
    pieces = list(engine.stream([PROMPT], SamplingParams(max_tokens=13, logprobs=1)))
    assert [str(piece) for piece in pieces] == ["a", "bcdefg", "hijklm"]
    assert [piece.token_ids for piece in pieces] == [LETTERS[:1], LETTERS[1:7], LETTERS[7:13]]
    block = ("accepted",) * BLOCK + ("bonus",)
    assert [piece.origins for piece in pieces] == [("target",), block, block]
    # Each token of a chunk has its own alternatives (cases 5 and 14).
    for piece in pieces:
        assert [entry.token_id for entry in piece.logprobs] == list(piece.token_ids)
        assert [entry.top[0][0] for entry in piece.logprobs] == list(piece.token_ids)
    wrong = engine_for(path, late_mistakes(following([PROMPT, *LETTERS])))
    pieces = list(wrong.stream([PROMPT], SamplingParams(max_tokens=9)))
    assert [str(piece) for piece in pieces] == ["a", "bcde", "fghi"]
    # The budget leaves the last block three drafts, which are accepted to their end.
    assert [piece.origins[-1] for piece in pieces] == ["target", "correction", "bonus"]


EMOJI = "😀".encode()


@pytest.mark.parametrize("before", range(1, 8))
def test_characters_that_are_split_over_blocks_stay_whole(models: Callable[..., Path], before: int) -> None:
    """Case 41: the four tokens of a character fall into one block or two, wherever it begins."""
    script = [*LETTERS[:before], *EMOJI, *b"xyz"]
    path = models(script)
    engine = engine_for(path, chains(following([PROMPT, *script])), 3)
    params = SamplingParams(max_tokens=len(script))
    pieces = list(engine.stream([PROMPT], params))
    assert "".join(pieces) == bytes(script).decode()
    assert all("\ufffd" not in piece for piece in pieces)
    for cut in range(before + 1, before + 4):
        [output] = engine.generate([[PROMPT]], SamplingParams(max_tokens=cut))
        assert output.text == bytes(LETTERS[:before]).decode() + "\ufffd"
        assert output.token_ids == tuple(script[:cut])


def test_text_that_may_begin_a_stop_string_is_held_back(models: Callable[..., Path]) -> None:
    """The rest of the block is released; what is held back comes when it is clear that it doesn't stop."""
    path = models(LETTERS)
    engine = engine_for(path, chains(following([PROMPT, *LETTERS])))
    pieces = list(engine.stream([PROMPT], SamplingParams(max_tokens=13, stop=["gh!", "zzz"])))
    assert [str(piece) for piece in pieces] == ["a", "bcdef", "ghijklm"]
    # A piece carries all tokens committed so far, also those whose text follows later.
    assert [len(piece.token_ids) for piece in pieces] == [1, 6, 6]


def test_special_tokens_inside_a_block(models: Callable[..., Path]) -> None:
    start = tiny_tokens().index("<|im_start|>")
    script = [97, start, 98, 99, start + 1, 100]
    path = models(script, start + 1)
    for skip, text in ((True, "abc"), (False, "a<|im_start|>bc")):
        output, _ = speculated(path, script, "chain", SamplingParams(max_tokens=9, skip_special_tokens=skip))
        assert (output.text, output.token_ids) == (text, tuple(script[:5]))
        assert output.stats.speculation.cut == 2  # the token after the end, and the bonus


def test_the_context_ends_inside_a_draft(tmp_path: Path) -> None:
    """Case 6: context 40, position 36: of eight drafts only as many are verified as can be used."""
    spec = TinySpec("llama", layers=1, context=40)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", spec)
    alone = Unspeculated(path)
    for max_tokens in (None, 64):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=1)
        for n_prompt in range(30, 40):
            ask = Ask((1,) * n_prompt, params)
            expected = alone.answer(ask.prompt, params)
            assert (len(expected.token_ids), expected.finish_reason) == (40 - n_prompt, "length")
            engine = engine_for(path, Oracle(alone.truth), 8, kv_tokens=64)
            [output] = engine.generate([ask.prompt], params)
            alone.compare([ask], [output])
            assert output.stats.speculation.cut == 0
