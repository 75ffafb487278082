"""Drafts under a grammar: forced text, what a drafter adds behind it, and what is cut away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import Engine, SamplingParams
from forerun.constrain import Choice, Regex
from forerun.constrain.compiler import GrammarCompiler
from forerun.draft.base import NO_DRAFT, Drafter, DraftRow, DraftTree
from forerun.draft.combined import CombinedDrafter
from forerun.draft.lookup import PromptLookup
from forerun.draft.suffix import SuffixDrafter
from forerun.engine.acceptance import Acceptance, cells_of
from forerun.engine.forced import GRAMMAR, cut_to_grammar, forced_draft, joined
from reference.drafters import Scripted
from reference.pacing import AVX2, auto
from reference.speculation import engine_for

PARAMS = SamplingParams()
tokens_ = st.lists(st.integers(0, 5), max_size=40)


@pytest.fixture(scope="module")
def compiler(tiny: Path) -> GrammarCompiler:
    return GrammarCompiler(Engine(tiny, cache_weights=False, draft="none").tokenizer)


def drafter_of(kind: str) -> Drafter:
    match kind:
        case "lookup":
            return PromptLookup()
        case "suffix":
            return SuffixDrafter()
    return CombinedDrafter(SuffixDrafter(), Scripted(lambda _: [7], name="other"))


def same_tree(one: DraftTree, other: DraftTree) -> None:
    assert list(one.tokens) == list(other.tokens)
    assert list(one.parents) == list(other.parents)
    assert list(one.confidence) == list(other.confidence)


@pytest.mark.parametrize("kind", ["lookup", "suffix"])
@given(history=tokens_, tokens=tokens_, ahead=st.lists(st.integers(0, 5), min_size=1, max_size=6), more=tokens_)
@settings(max_examples=60, deadline=None)
def test_what_is_ahead_counts_as_if_it_were_committed(
    kind: str, history: list[int], tokens: list[int], ahead: list[int], more: list[int]
) -> None:
    """And leaves no trace: what is proposed later is what a drafter proposes that was never told."""
    told, never = drafter_of(kind), drafter_of(kind)
    assert told.reads_ahead
    for drafter in (told, never):
        drafter.begin(0, None)
        drafter.free(0, history)
        drafter.begin(1, None)
    [tree] = told.propose([DraftRow(1, tokens, 12, PARAMS, 0, ahead=ahead)])
    [expected] = never.propose([DraftRow(1, [*tokens, *ahead], 12, PARAMS, 0)])
    same_tree(tree, expected)
    fresh = drafter_of(kind)
    fresh.begin(0, None)
    fresh.free(0, history)
    fresh.begin(1, None)
    [later] = told.propose([DraftRow(1, [*tokens, *more], 12, PARAMS, 0)])
    [expected] = fresh.propose([DraftRow(1, [*tokens, *more], 12, PARAMS, 0)])
    same_tree(later, expected)


def test_a_part_that_cannot_look_ahead_is_not_asked() -> None:
    combined = drafter_of("combined")
    assert combined.reads_ahead
    combined.begin(1, None)
    assert list(combined.propose([DraftRow(1, [1, 2], 4, PARAMS, 0)])[0].tokens) == [7]
    assert combined.propose([DraftRow(1, [1, 2], 4, PARAMS, 0, ahead=[3])]) == [NO_DRAFT]
    assert not CombinedDrafter(Scripted(lambda _: [1]), Scripted(lambda _: [2])).reads_ahead


@pytest.mark.parametrize("reads_ahead", [True, False])
def test_a_drafter_is_told_what_is_forced_if_it_can_look_past_it(tiny: Path, reads_ahead: bool) -> None:
    rows: list[tuple[int, list[int], int]] = []

    def script(row: DraftRow) -> list[int]:
        rows.append((len(row.tokens), list(row.ahead), row.budget))
        return [65, 66]

    drafter = Scripted(script)
    drafter.reads_ahead = reads_ahead
    engine = engine_for(tiny, drafter, 9)
    [output] = engine.generate(
        [(1, 2)], SamplingParams(max_tokens=30, constraint=Regex("abcd(x|y)efgh(x|y)ijkl(x|y)z"))
    )
    told = [row for row in rows if row[1]]
    if not reads_ahead:
        assert not told
        assert set(output.stats.speculation.by_drafter) == {GRAMMAR}
        return
    assert told
    for length, ahead, budget in told:
        assert output.token_ids[length - 2 :][: len(ahead)] == tuple(ahead)
        assert budget + len(ahead) <= 9


@pytest.mark.parametrize("chunk", [6, 64])
@pytest.mark.parametrize("cached", [True, False])
def test_a_forced_beginning_comes_with_the_last_of_the_prompt(tiny: Path, chunk: int, cached: bool) -> None:
    drafter = Scripted(lambda _: [])
    engine = engine_for(tiny, drafter, 6, prefix_cache=cached, max_rows=2, max_step_tokens=chunk)
    prompt = list(range(65, 65 + 20))
    params = SamplingParams(max_tokens=20, constraint=Regex("abc(x|y)z"), temperature=1.0, seed=3)
    for _ in range(2):
        first = next(iter(engine.stream(prompt, params)))
        assert len(first.token_ids) >= 3
        both = SamplingParams(max_tokens=20, constraint=Regex("abc(x|y)z"), temperature=1.0, seed=3, n=2)
        [output], [plain] = engine.generate([prompt], both), engine.generate([prompt], both, speculate=False)
        assert [sample.token_ids for sample in output.samples] == [sample.token_ids for sample in plain.samples]
        assert output.stats.speculation.decisions <= 3 < plain.stats.speculation.decisions


def test_joined_trees_hang_on_the_end_of_the_chain() -> None:
    forced = DraftTree.chain([5, 6], (0.99, 0.99), drafter="grammar")
    tree = DraftTree([7, 8, 9], [-1, -1, 0], (0.5, 0.3, 0.2), drafter="suffix")
    whole = joined(forced, tree)
    assert list(whole.tokens) == [5, 6, 7, 8, 9]
    assert list(whole.parents) == [-1, 0, 1, 1, 2]
    assert list(whole.confidence) == [0.99, 0.99, 0.5, 0.3, 0.2]
    assert whole.drafter == "grammar+suffix"
    assert joined(forced, NO_DRAFT) is forced
    assert joined(NO_DRAFT, tree) is tree
    assert not joined(forced, DraftTree([7], [-1])).confidence


def test_a_draft_is_cut_to_what_the_grammar_reaches(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(Regex("a(b|c)d")).start()
    a, b, c, d = b"abcd"  # in the tiny vocabulary a byte's id is the byte
    chain = DraftTree.chain([a, b, b, d], (0.9, 0.8, 0.7, 0.6), drafter="x")
    assert list(cut_to_grammar(grammar, chain).tokens) == [a, b]
    tree = DraftTree([a, d, b, c, d, d, a], [-1, -1, 0, 0, 1, 3, 5], (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3), drafter="x")
    cut = cut_to_grammar(grammar, tree)
    assert list(cut.tokens) == [a, b, c, d]
    assert list(cut.parents) == [-1, 0, 0, 2]
    assert list(cut.confidence) == [0.9, 0.7, 0.6, 0.4]
    assert not cut_to_grammar(grammar, DraftTree([d], [-1]))
    whole = DraftTree([a, c, d], [-1, 0, 1])
    assert cut_to_grammar(grammar, whole) is whole


def test_a_drawn_tree_stays_whole(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(Choice(["ab", "ac"])).start()
    drawn = DraftTree([0, 1], [-1, 0], (), np.full((2, 300), 1 / 300, dtype=np.float32))
    assert cut_to_grammar(grammar, drawn) is drawn


def test_the_end_of_forced_text_is_guessed_where_it_may_merge(compiler: GrammarCompiler) -> None:
    """ " and" is a token; whether it stays one depends on what follows."""
    grammar = compiler.compile(Regex("x and[a-z]+")).start()
    tokens, settled = grammar.forced_text(9)
    text = b"".join(compiler.tokenizer.token_bytes(token) for token in tokens)
    assert text == b"x and"
    assert grammar.forced(9) == tokens[:settled]
    assert settled < len(tokens)
    draft = forced_draft(grammar, 9)
    assert list(draft.tokens) == tokens
    assert list(draft.confidence) == [0.99] * settled + [0.9] * (len(tokens) - settled)
    assert list(forced_draft(grammar, 1).tokens) == tokens[:1]
    # A lone byte at the end is not worth a guess.
    assert compiler.compile(Regex(r"x\([)a-z]+")).start().forced_text(9).tokens == list(b"x")


@given(first=st.text("and xe()", max_size=6), choices=st.lists(st.text("and xe()", max_size=6), min_size=1, max_size=3))
@settings(max_examples=80, deadline=None)
def test_forced_text_is_the_models_own_and_within_what_is_forced(
    compiler: GrammarCompiler, first: str, choices: list[str]
) -> None:
    texts = sorted({first + choice for choice in choices} - {""})
    if not texts:
        return
    grammar = compiler.compile(Choice(texts)).start()
    tokens, settled = grammar.forced_text(30)
    tokenizer = compiler.tokenizer
    written = b"".join(map(tokenizer.token_bytes, tokens)).decode()
    assert all(text.startswith(written) for text in texts)
    assert tokens[:settled] == grammar.forced(30)
    assert tokens == tokenizer.encode_plain(written)
    assert all(grammar.reachable(tokens, range(-1, len(tokens) - 1)))


def test_forced_text_is_a_chain_of_at_most_the_budget(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(Choice(["abcdefgh"])).start()
    assert len(forced_draft(grammar, 3)) == 3
    whole = forced_draft(grammar, 60)
    assert whole.is_chain
    assert whole.drafter == GRAMMAR
    assert compiler.compile(Choice(["abcdefgh", "x"])).start().forced(9) == []
    assert forced_draft(compiler.compile(Regex("[ab]+")).start(), 9) is NO_DRAFT


def test_a_request_in_debt_still_drafts_what_is_settled_and_nothing_else() -> None:
    """Whatever a drafter calls itself: only the engine says what is settled."""
    kept = {}
    for name, settled in (("other", 0), (GRAMMAR, 0), (GRAMMAR, 5)):
        pace = auto(AVX2)
        pace.begin(0, list(range(10)))
        pace._requests[0].account = -1.0
        assert pace.budget([0], [5], 1, 1)
        tree = DraftTree([1] * 5, range(-1, 4), (0.99,) * 5, drafter=name, settled=settled)
        [kept[name, settled]] = pace.cut([0], [10], [tree], 1)
    assert kept["other", 0] == kept[GRAMMAR, 0] == 0
    assert kept[GRAMMAR, 5] > 0


def test_what_is_settled_survives_and_teaches_nothing() -> None:
    record = Acceptance()
    request = record.begin()
    tree = DraftTree([1, 2, 3, 4], range(-1, 3), (0.99, 0.99, 0.5, 0.5), drafter="x", settled=2)
    cells = cells_of(tree)
    survival = record.survival(request, tree, cells)
    assert survival[1] > 0.999
    assert survival[2] < 0.9
    before = [record.estimate(cell) for cell in range(25)]
    for _ in range(20):
        record.learn(request, tree.first(2), cells[:2], [0, 1])
    assert [record.estimate(cell) for cell in range(25)] == before
    assert record.survival(request, tree, cells)[2] == pytest.approx(survival[2], abs=0.1)
    assert tree.first(1).settled == 1


def test_a_drafter_cannot_call_its_guesses_settled(tiny: Path) -> None:
    """It is always wrong; taken at its word it would be believed for ever."""
    settled = Scripted(lambda _: DraftTree([0, 0, 0], (-1, 0, 1), (0.99,) * 3, settled=3))
    engine = engine_for(tiny, settled, "auto")
    [output] = engine.generate([(1, 2, 3)], SamplingParams(max_tokens=200, ignore_eos=True))
    stats = output.stats.speculation
    assert stats.drafted < stats.decisions / 3
