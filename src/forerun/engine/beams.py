"""Beam search on the engine's loop: each beam is a request, and the requests of a search wait for each other.

A step computes a row for each beam. Who has its scores is held (`Scheduler.hold`) until all have; then the candidates
are ranked (forerun.engine.beam_rules), beams without a child give their KV back, the first child of a beam goes on in
its place, and further children fork its block table, so that only blocks that are written to are copied. A beam that
is preempted keeps its candidates, so that beams that don't fit together take turns.

Speculation isn't applied: a step's candidates depend on all beams together, so that a draft would have to guess them
all.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from forerun import _native
from forerun.constrain.bits import unpack
from forerun.engine.beam_output import BeamBlocks, BeamOutput, BeamSequence
from forerun.engine.beam_rules import BeamRules, Candidate, Ending
from forerun.engine.choose import Walk, not_numbers
from forerun.engine.live import LiveRequest
from forerun.engine.request import FinishReason, Request
from forerun.engine.tally import Tally
from forerun.engine.text import TextStream
from forerun.errors import ConstraintError, ForerunError, InvalidRequestError, NumericalError
from forerun.models.tokenizer import Tokenizer
from forerun.sample.params import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.loop import Loop

Floats = npt.NDArray[np.float32]

MAX_CANDIDATES: Final = 1024
"""Continuations of a constrained beam that are looked at: more than without a constraint, because the grammar may end
texts after any token."""

_SUPPORTED: Final = (
    "max_tokens", "constraint", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "bad_words", "allowed_token_ids", "min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens",
)  # fmt: skip


def beam_params(settings: dict[str, Any]) -> SamplingParams:
    """What a beam search takes of the sampling parameters; raises `InvalidRequestError` for the others."""
    for name in settings:
        if name not in _SUPPORTED:
            raise InvalidRequestError(
                f"beam search has no parameter {name!r}; expected beams, length_penalty, early_stopping, n_return, "
                f"scope, or one of {', '.join(_SUPPORTED)}"
            )
    return SamplingParams(**settings)


class LiveBeam(LiveRequest):
    """A beam: a live request whose next token its search chooses.

    Attributes:
        search: what it belongs to.
        candidates: its best continuations, once its scores are known.
        stuck: why its grammar says nothing about them, or None.
        logprobs: of its output tokens.
        total: their sum, in float64.
    """

    def __init__(self, request: Request, params: SamplingParams, tokenizer: Tokenizer, rules: BeamRules) -> None:
        super().__init__(request, params, 0, tokenizer)
        self.candidates: list[tuple[int, float]] = []
        self.stuck: ForerunError | None = None
        self.logprobs: list[float] = []
        self.total = 0.0
        self.search = BeamSearch(rules, self, tokenizer)

    @property
    def needs_logits(self) -> bool:
        """A beam needs more than the largest score."""
        return True

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end the text."""
        return self._ends

    def read(self, walk: Walk, logits: Floats, masks: npt.NDArray[np.uint32]) -> None:
        """Notes the best continuations by the scores of a step, logits float32[N, V]; none where the mask failed."""
        self.candidates = []
        self.stuck = walk.error
        if walk.error is not None:
            return
        row = logits[walk.output]
        n = min(max(2, 1 + len(self.ends)) * self.search.rules.beams, len(row))
        at, zero = np.array([walk.output], dtype=np.int32), np.zeros(1, dtype=np.int32)
        plain = self.edits is None and walk.mask < 0
        ids, logprobs, _ = _native.top_logprobs(logits, at, n if plain else 1, zero)
        if ids[0, 0] < 0:
            position = len(self.request.tokens)
            self.fail(NumericalError(f"request {self.request.request_id!r}: {not_numbers(position)}"))
            return
        if plain:
            self.candidates = list(zip(ids[0].tolist(), logprobs[0].tolist(), strict=True))
        else:
            mask = masks[walk.mask] if walk.mask >= 0 else None
            self.candidates = self._restricted(row, float(logprobs[0, 0]), mask, n)

    def _restricted(
        self, row: Floats, best: float, mask: npt.NDArray[np.uint32] | None, n: int
    ) -> list[tuple[int, float]]:
        """The best continuations under a mask and with the edits, which change log-probabilities as Hugging Face's
        processors do in beam search."""
        # In double precision, this rounds each log-probability once.
        scores = (row.astype(np.float64) - (float(row.max()) - best)).astype(np.float32)
        if self.edits is not None:
            self.edits.apply(scores)
        if mask is not None:
            scores[~unpack(mask, len(row))] = -np.inf
        n = MAX_CANDIDATES if self.grammar is not None else n
        ids = np.flatnonzero(scores > -np.inf)
        if len(ids) > n:
            # Of equal ones at the cut, all stay, so that the smallest ids are among them.
            least = np.partition(scores[ids], len(ids) - n)[len(ids) - n]
            ids = ids[scores[ids] >= least]
        ids = ids[np.argsort(-scores[ids], kind="stable")][:n]
        return list(zip(ids.tolist(), scores[ids].tolist(), strict=True))

    def reason(self, candidate: Candidate) -> FinishReason | None:
        """Why the text would end with this candidate, or None."""
        n = self.request.n_output + 1
        if candidate.token in self.ends and n > self.params.min_tokens:
            return "stop"
        if self.grammar is not None:
            self.grammar.advance((candidate.token,))
            complete = self.grammar.complete and n >= self.params.min_tokens
            self.grammar.rollback(1)
            if complete:
                return "stop"
        return "length" if len(self.request.tokens) + 1 >= self.request.limit else None

    def twin(self) -> LiveBeam:
        """The same state for a request that is to be forked from this one's."""
        twin = copy.copy(self)
        twin.tally = Tally()
        twin.group = [twin]
        twin.logprobs = self.logprobs.copy()
        twin.edits = None if self.edits is None else self.edits.fork()
        twin.grammar = None if self.grammar is None else self.grammar.fork()
        return twin

    def take(self, token: int, logprob: float) -> None:
        """Notes the next token, which `Scheduler.extend` has appended."""
        self.candidates = []
        self.logprobs.append(logprob)
        self.total += logprob
        if self.edits is not None:
            self.edits.append((token,))
        if self.grammar is not None:
            self.grammar.advance((token,))


class BeamSearch:
    """The state of one search.

    Attributes:
        rules: its settings.
        beams: live beams, best first; when it is over, those that lived last.
        over: whether it has ended, for whatever reason.
    """

    def __init__(self, rules: BeamRules, first: LiveBeam, tokenizer: Tokenizer) -> None:
        self.rules = rules
        self.beams: list[LiveBeam] = [first]
        self._tokenizer = tokenizer
        self._params = first.params
        self._prompt = tuple(first.request.tokens)
        self._name = first.request.request_id
        self._finished: list[BeamSequence] = []
        self._steps = self._forks = self._preemptions = 0
        self._forking: str | None = None  # a request that an interruption may leave without its beam
        self._blocks = BeamBlocks(0, 0)
        self._measured = -1.0

    @property
    def over(self) -> bool:
        """Whether no beam is live any more."""
        return all(beam.request.finished for beam in self.beams)

    def run(self, loop: Loop) -> BeamOutput:
        """Steps the engine until the search is over. Whatever interrupts it ends the search and frees its memory."""
        try:
            while not self.over:
                loop.step()
        finally:
            self.cancel(loop)
        with loop.lock:  # another thread may be in the midst of the step that ends it
            return self.output()

    def held(self, loop: Loop, now: float) -> None:
        """A beam has been computed and is held; when all are, they go on."""
        if self.over:
            return
        if self._measured != now:
            # The slots of all rows of a step are taken before its first row is committed.
            self._measured = now
            self._measure()
        try:
            for beam in self.beams:
                beam.raise_error()
            if all(beam.request.held for beam in self.beams):
                self._advance(loop, now)
        except (ConstraintError, NumericalError) as error:
            self.fail(loop, error, now)
        except BaseException as error:
            self.fail(loop, ForerunError(
                f"request {self._name!r}: {type(error).__name__} while its beams went on; submit it again"
            ), now)  # fmt: skip
            raise

    def _measure(self) -> None:
        tables = [beam.request.table for beam in self.beams if beam.request.table is not None]
        shared = len(set().union(*(table.blocks for table in tables)))
        separate = sum(len(table.blocks) for table in tables)
        self._blocks = BeamBlocks(max(self._blocks.most, shared), max(self._blocks.separate, separate))

    def _advance(self, loop: Loop, now: float) -> None:
        rules, beams = self.rules, self.beams
        candidates = [
            Candidate(index, token, logprob, beam.total + logprob)
            for index, beam in enumerate(beams)
            for token, logprob in beam.candidates
        ]
        first = beams[0].request
        length, longest = first.n_output + 1, first.limit - first.n_prompt
        selection = rules.choose(candidates, length, lambda candidate: beams[candidate.beam].reason(candidate))
        self._steps += 1
        for ending in selection.ended:
            self._finished.append(self._sequence(ending))
        # Stable: of equal scores, what was finished first.
        self._finished = sorted(self._finished, key=lambda sequence: -sequence.score)[: rules.beams]
        if not selection.going and not self._finished:
            raise ConstraintError(
                f"request {self._name!r}: no beam can go on after {length - 1} tokens: constraint, allowed_token_ids, "
                "bad_words and min_tokens leave nothing together; loosen one of them"
            ) from beams[0].stuck
        best = selection.going[0].total if selection.going else None
        if rules.over(best, length, longest, [sequence.score for sequence in self._finished]):
            self._end(loop, "stop", now)
        else:
            self._go_on(loop, selection.going, now)

    def _go_on(self, loop: Loop, going: Sequence[Candidate], now: float) -> None:
        """Beams without a child end first, so that forks find their rows free."""
        parents = {candidate.beam for candidate in going}
        for index, beam in enumerate(self.beams):
            if index not in parents:
                self._drop(loop, beam, "stop", now)
        placed: set[int] = set()
        children: list[LiveBeam] = []
        # Until all are forked, nobody is extended; what is live is always found among the beams.
        before, self.beams = self.beams, [beam for i, beam in enumerate(self.beams) if i in parents]
        for candidate in going:
            child = before[candidate.beam]
            if candidate.beam in placed:
                child = self._fork(loop, child)
            placed.add(candidate.beam)
            children.append(child)
        for child, candidate in zip(children, going, strict=True):
            loop.scheduler.extend(child.request, candidate.token)
            child.take(candidate.token, candidate.logprob)
        self.beams = children

    def _fork(self, loop: Loop, parent: LiveBeam) -> LiveBeam:
        self._forks += 1
        name = f"{self._name}/beam-{self._forks}"
        while name in loop.live:
            name += "'"
        child = parent.twin()
        self._forking = name
        child.request = loop.scheduler.fork(parent.request, name)
        self.beams.append(child)
        loop.live[name] = child
        self._forking = None
        return child

    def _drop(self, loop: Loop, beam: LiveBeam, reason: FinishReason, now: float) -> None:
        self._preemptions += beam.request.preemptions
        loop.finish(beam, reason, now)

    def _end(self, loop: Loop, reason: FinishReason, now: float) -> None:
        for beam in self.beams:
            if not beam.request.finished:
                self._drop(loop, beam, reason, now)
        stray = self._forking and loop.scheduler.get(self._forking)
        if stray:
            loop.scheduler.finish(stray, reason)

    def fail(self, loop: Loop, error: ForerunError, now: float) -> None:
        """Ends the search with an error."""
        self.beams[0].fail(error)
        self._end(loop, "error", now)

    def cancel(self, loop: Loop) -> None:
        """Ends the search, if it isn't over."""
        with loop.lock:
            loop.cancel(*self.beams)

    def _sequence(self, ending: Ending) -> BeamSequence:
        candidate = ending.candidate
        beam = self.beams[candidate.beam]
        tokens = (*beam.request.output_ids, candidate.token)
        logprobs = (*beam.logprobs, candidate.logprob)
        return BeamSequence("", tokens, logprobs, candidate.total, ending.score, ending.reason)

    def _text(self, sequence: BeamSequence) -> str:
        stream = TextStream(
            self._tokenizer,
            (),
            keep_stop=False,
            skip_special=self._params.skip_special_tokens,
            keep_space=self._params.constraint is not None,
        )
        tokens = sequence.token_ids
        ended = tokens[-1] in self.beams[0].ends and len(tokens) > self._params.min_tokens
        for token in tokens[:-1] if ended else tokens:
            stream.push(token, may_stop=False)
        stream.finish()
        return stream.text

    def output(self) -> BeamOutput:
        """The result of a search that is over. Raises what ended it, if it was an error."""
        for beam in self.beams:
            beam.raise_error()
        kept = self._finished[: self.rules.n_return]
        return BeamOutput(
            tuple(replace(sequence, text=self._text(sequence)) for sequence in kept),
            self._prompt, self._blocks, self._steps, self._preemptions,
        )  # fmt: skip
