"""A request as the engine sees it: the scheduler's state plus text, log-probabilities and times."""

from __future__ import annotations

import time

from forerun.constrain.bits import Words, mask_of
from forerun.constrain.compiler import Grammar
from forerun.constrain.state import GrammarState
from forerun.draft.base import MAX_NODES, DraftTree
from forerun.engine.choose import Choice
from forerun.engine.masks import grammar_failed
from forerun.engine.output import Piece, RequestOutput, RequestStats, TokenLogprob, TokenOrigin
from forerun.engine.pace import Decision
from forerun.engine.request import FinishReason, Request
from forerun.engine.tally import Tally
from forerun.engine.text import TextStream
from forerun.errors import ConstraintError, ForerunError, InvalidRequestError
from forerun.models.tokenizer import Tokenizer
from forerun.sample.bad_words import token_sequences
from forerun.sample.edits import LogitEdits
from forerun.sample.noise import nth_seed
from forerun.sample.params import SamplingParams


class LiveRequest:
    """Everything about one request that no step needs as an array.

    Attributes:
        request: what the scheduler owns.
        params: the caller's parameters.
        seed: of the sampling noise.
        edits: history-dependent changes of the logits (penalties, bias, bad words, tokens banned before `min_tokens`),
            or None.
        speculate: whether it may draft.
        max_draft: the most draft tokens that it may have in a step.
        traced: whether choices of draft length are kept.
        draft_key: names the request to drafter and pace; None: it hasn't drafted yet.
        tally: counts of drafting and verification.
        grammar: where the text stands in its grammar; None without a constraint.
        grammar_seconds: what was spent on it since the last step, masks aside.
        opening: what the grammar forces at the beginning, as a draft; None until it is asked for.
        allowed: uint32[ceil(V / 32)], the only tokens that may be chosen, as packed bits; None: all.
        index: which of the texts of its group it is.
        group: the texts that one submission asked for, as far as they have begun.
        n_missing: those that haven't, and will when the prompt is computed.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        seed: int,
        tokenizer: Tokenizer,
        *,
        twin: LiveRequest | None = None,
    ) -> None:
        """`twin`: another text of the same prompt and parameters, whose preparations serve this one, too."""
        self.request = request
        self.params = params
        self.seed = seed
        self._tokenizer = tokenizer
        ends = frozenset() if params.ignore_eos else tokenizer.eos_ids
        self._ends = ends | frozenset(params.stop_token_ids)
        self.edits = self._prepared_edits() if twin is None else twin._edits_at_start()
        self.speculate = False
        self.max_draft = MAX_NODES
        self.traced = False
        self.draft_key: int | None = None
        self.tally = Tally()
        self.grammar: GrammarState | None = None
        self.grammar_seconds = 0.0
        self.opening: DraftTree | None = None
        self.allowed: Words | None = None
        if params.allowed_token_ids is not None:
            self.allowed = mask_of(params.allowed_token_ids, tokenizer.vocab_size) if twin is None else twin.allowed
        self.index = 0
        self.group = [self]
        self.n_missing = params.n - 1
        self._compiled: Grammar | None = None
        self._text = TextStream(
            tokenizer,
            params.stop_strings,
            keep_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            keep_space=params.constraint is not None,
        )
        self._logprobs: list[TokenLogprob] = []
        self._origins: list[TokenOrigin] = []
        self._decisions: list[Decision] = []
        self._taken = 0  # tokens whose piece was taken
        self._submitted = time.perf_counter()
        self._started: float | None = None
        self._first_token: float | None = None
        self._ended: float | None = None
        self._end_taken = False
        self._error: ForerunError | None = None

    def _prepared_edits(self) -> LogitEdits | None:
        params, tokenizer = self.params, self._tokenizer
        banned = sorted(self._ends) if params.min_tokens else []
        if len(banned) >= tokenizer.vocab_size:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens}, but every token of the vocabulary ends the text; give fewer "
                "stop_token_ids"
            )
        bad_words = token_sequences(params.bad_words, tokenizer.encode_plain, adds_space=tokenizer.strip_space)
        return LogitEdits.of(params, self.request.prompt_ids, banned, bad_words)

    def _edits_at_start(self) -> LogitEdits | None:
        """The edits as they were before any output."""
        if self.edits is None:
            return None
        edits = self.edits.fork()
        edits.truncate(0)
        return edits

    @property
    def needs_logits(self) -> bool:
        """Whether the next token can't be chosen by taking the largest score alone."""
        if not self.params.greedy or self.params.logprobs is not None:
            return True
        if self.grammar is not None or self.allowed is not None:
            return True
        return self.edits is not None and self.edits.applies(1)

    @property
    def has_started(self) -> bool:
        """Whether a step has run it."""
        return self._started is not None

    def started(self, now: float) -> None:
        """Notes the first step that ran the request."""
        if self._started is None:
            self._started = now

    def constrain(self, grammar: Grammar) -> None:
        """The text is to follow this grammar, from its beginning."""
        self._compiled = grammar
        self.grammar = grammar.start()

    def accept(self, choice: Choice, tree: DraftTree, now: float) -> tuple[int, FinishReason | None]:
        """Takes in the tokens that a step chose, one by one, up to the one that ends the request.

        Returns how many are kept (the scheduler is to commit these) and why the request ends with them, if it does.
        """
        request, params = self.request, self.params
        if self._first_token is None:
            self._first_token = now
        before = request.n_output
        room = request.limit - len(request.tokens)
        kept = 0
        reason: FinishReason | None = None
        for token in choice.tokens:
            kept += 1
            n = before + kept
            if token in self._ends and n > params.min_tokens:
                # The end token's own text is not part of the answer.
                reason = "stop"
            elif self._text.push(token, may_stop=n >= params.min_tokens) or (
                self._completes(token) and n >= params.min_tokens
            ):
                reason = "stop"
            elif kept >= room:
                reason = "length"
            if reason is not None:
                break
        self._logprobs += choice.logprobs[:kept]
        n_path = len(choice.path)
        own: TokenOrigin = (
            "target" if not tree else "bonus" if n_path and tree.is_leaf(choice.path[-1]) else "correction"
        )
        self._origins += ["accepted"] * min(kept, n_path)
        if kept > n_path:
            self._origins.append(own)
        if self.edits is not None:
            self.edits.append(choice.tokens[:kept])
        return kept, reason

    def _completes(self, token: int) -> bool:
        """Whether nothing but an end may follow this token, which is the next of the text. Then the end is left out."""
        if self.grammar is None:
            return False
        began = time.perf_counter()
        try:
            self.grammar.advance((token,))
            return self.grammar.complete
        except (ConstraintError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the library's panics are no Exceptions
            raise grammar_failed(self.request.request_id, error) from error
        finally:
            self.grammar_seconds += time.perf_counter() - began

    def decided(self, decision: Decision | None) -> None:
        """Notes a choice of draft length, to be taken with the next piece."""
        if decision is not None:
            self._decisions.append(decision)

    def fork(self, request: Request, params: SamplingParams, seed: int) -> LiveRequest:
        """The state of `request`, which the scheduler forked from this one's, with the output so far."""
        twin = LiveRequest(request, params, seed, self._tokenizer)
        if params.logprobs is not None:
            twin._logprobs = self._logprobs.copy()
        twin.speculate, twin.max_draft, twin.traced = self.speculate, self.max_draft, self.traced
        twin.n_missing = 0
        if params.constraint is not None and self.grammar is not None:
            twin._compiled, twin.grammar = self._compiled, self.grammar.fork()
        twin._origins = self._origins.copy()
        if twin.edits is not None:
            twin.edits.append(request.output_ids)
        for token in request.output_ids:
            twin._text.push(token, may_stop=False)
        return twin

    def branch(self, request: Request, index: int) -> LiveRequest:
        """The state of another text of the same prompt, `request` having been branched off from this one's."""
        twin = LiveRequest(request, self.params, nth_seed(self.seed, index), self._tokenizer, twin=self)
        twin.index = index
        twin.speculate, twin.max_draft, twin.traced = self.speculate, self.max_draft, self.traced
        if self._compiled is not None:
            twin.constrain(self._compiled)
        twin.group = self.group
        twin.n_missing = 0
        twin._submitted = self._submitted
        self.n_missing -= 1
        return twin

    def fail(self, error: ForerunError) -> None:
        """Notes the error that ends the request."""
        self._error = error

    def raise_error(self) -> None:
        """Raises what ended the request, if it was an error."""
        if self._error is not None:
            raise self._error

    def ended(self, now: float) -> None:
        """Closes the text."""
        self._ended = now
        self.grammar = self._compiled = None
        self._text.finish()

    def take_piece(self) -> Piece | None:
        """What is new since the last call, or None; the piece with the finish reason comes once, last."""
        finished = self.request.finished
        text = self._text.take()
        if not text and not (finished and not self._end_taken):
            return None
        n = self.request.n_output
        ids = tuple(self.request.tokens[self.request.n_prompt + self._taken :])
        logprobs = tuple(self._logprobs[self._taken :])
        origins = tuple(self._origins[self._taken :])
        decisions = tuple(self._decisions)
        self._decisions.clear()
        self._taken = n
        self._end_taken = finished
        return Piece(text, ids, logprobs, self.request.finish_reason, origins, decisions, self.index)

    def output(self) -> RequestOutput:
        """The finished request. Raises what ended it, if it was an error."""
        self.raise_error()
        request = self.request
        assert self._ended is not None, "the request is still running"
        assert request.finish_reason is not None
        first = self._first_token
        return RequestOutput(
            text=self._text.text,
            token_ids=tuple(request.output_ids),
            finish_reason=request.finish_reason,
            prompt_token_ids=tuple(request.prompt_ids),
            logprobs=tuple(self._logprobs),
            seed=self.seed,
            stats=RequestStats(
                prompt_tokens=request.n_prompt,
                cached_tokens=request.prefix_hit_tokens,
                output_tokens=request.n_output,
                steps=request.steps,
                preemptions=request.preemptions,
                queue_seconds=(self._ended if self._started is None else self._started) - self._submitted,
                first_token_seconds=None if first is None else first - self._submitted,
                total_seconds=self._ended - self._submitted,
                speculation=self.tally.stats(),
            ),
            sample_index=self.index,
        )
