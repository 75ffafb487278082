"""Drafts written by a second, smaller model (Leviathan et al. 2023, arXiv:2211.17192)."""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.draft.base import NO_DRAFT, Drafter, DraftRow, DraftTree
from forerun.draft.candidates import Candidates, Place, candidates, draws
from forerun.draft.compat import check_compatible
from forerun.draft.registry import DraftContext
from forerun.draft.sequences import Branch, Sequences, SequenceState
from forerun.errors import ConfigurationError
from forerun.models.checks import check_kv_memory, check_tokenizer, setting
from forerun.models.download import resolve
from forerun.models.executor import Executor
from forerun.models.source import open_model
from forerun.models.tokenizer import Tokenizer
from forerun.ops import BLOCK, StepInput
from forerun.sample.edits import LogitEdits
from forerun.sample.params import SamplingParams

MAX_WIDTH = 16

Floats = npt.NDArray[np.float32]


class _Piece(NamedTuple):
    """Tokens to run through the model after what a branch's slots already hold."""

    branch: Branch
    tokens: Sequence[int]

    @property
    def start(self) -> int:
        return self.branch.table.n_tokens - len(self.tokens)


class ModelDrafter(Drafter):
    """Proposes what a smaller model of the same vocabulary would write.

    All rows of a call are drafted together, one forward of the draft model for each depth. Its keys and values follow
    the target's tokens lazily: at each call the memory of a row is cut to what agrees with its committed tokens, and
    the tokens that it didn't draft (a correction, a bonus token, the last draft after full acceptance, at first the
    whole prompt) are run through the model. A call catches up at most `max_step_tokens` tokens over all rows (at least
    64, and 2 a row); a row that isn't there yet gets an empty tree. Prompts of one scope that begin alike share their
    memory.

    Shape of the drafts, by the request's verification (`forerun.draft.candidates` says how tokens are chosen):

    - greedy and coupled, `width` 1: a chain, which ends before the first token of confidence under `min_confidence`.
    - greedy and coupled, `width` w: at each depth the w likeliest paths go on, each with its w best tokens, and of all
      the tree keeps what is likeliest (beams as in EAGLE-2, Li et al. 2024, arXiv:2406.16858).
    - rejection: w tokens are drawn without replacement at each depth, and the first of them goes on. Such drafts always
      fill their budget and carry no confidence: a length that depends on what was drawn would bias the answer.

    A row is not drafted (empty tree) where the draft model's context ends, where the text has a token that the draft
    model lacks, and while its memory is full of the rows before it; other requests' memory is taken first.

    Args:
        context: of the engine; `argument` is the draft model, a catalog name or a path.
        width: candidates at each depth; 1 drafts chains.
        min_confidence: of a token, in [0, 1]. What is less likely is not worth a row of the target's step.
        kv_tokens: tokens whose keys and values fit in the draft model's memory; None: as many as in the target's, and
            some for the branches.

    Attributes:
        config: the draft model's.
        fed_tokens: tokens run through the draft model so far, caught up and drafted ones.
        sequences: the memory's books.

    Raises `ConfigurationError` for a setting or a draft model whose tokens are not the target's, and what
    `forerun.engine.Engine` raises for a model.
    """

    name = "model"

    def __init__(
        self,
        context: DraftContext,
        *,
        width: int = 1,
        min_confidence: float = 0.05,
        kv_tokens: int | None = None,
    ) -> None:
        self._width = setting("width", width, 1, MAX_WIDTH)
        if not 0 <= min_confidence <= 1:
            raise ConfigurationError(f"min_confidence={min_confidence!r} is not allowed; expected a number from 0 to 1")
        self._min_confidence = float(min_confidence)
        if kv_tokens is None:
            blocks = -(-context.kv_tokens // BLOCK) + 2 * context.max_rows * self._width
        else:
            blocks = setting("kv_tokens", kv_tokens, BLOCK, 2**31 - BLOCK) // BLOCK
        self._max_rows = context.max_rows
        self._max_outputs = context.max_rows * self._width
        self._max_fed = max(context.max_step_tokens, 2 * context.max_rows, self._max_outputs, 64)
        self._max_model_len = context.max_model_len
        self._vocabulary = context.config.vocab_size
        with open_model(resolve(context.argument)) as source:
            self.config = source.config
            tokenizer = source.tokenizer()
            check_tokenizer(tokenizer, self.config)
            self._proposable = check_compatible(context.tokenizer, tokenizer, context.argument)
            check_kv_memory(self.config, blocks, BLOCK)
            self._context = min(self.config.context_length, context.max_model_len)
            self._executor: Executor | None = Executor(
                source,
                kv_blocks=blocks,
                max_positions=self._context,
                max_tokens=self._max_fed,
                max_outputs=self._max_outputs,
                threads=context.threads,
                cache=context.cache,
            )
        self._target_tokenizer = context.tokenizer
        self.sequences = Sequences(blocks, BLOCK, self._executor.kv)
        self._histories: dict[int, _History] = {}
        self._argmax = np.zeros(self._max_outputs, dtype=np.int32)
        self.fed_tokens = 0
        self.setup_seconds = 0.0

    @property
    def native_seconds(self) -> float:
        """Seconds spent in the draft model's forward passes."""
        return self._executor.native_seconds if self._executor else 0.0

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One tree a row; a row's tree doesn't depend on the others, but whether it is caught up may."""
        trees: list[DraftTree] = []
        for first in range(0, len(rows), self._max_rows):
            trees += self._propose(rows[first : first + self._max_rows])
        return trees

    def begin(self, key: int, scope: str | None) -> None:
        """A request starts; nothing is computed before its first draft. Cached prefixes are shared within a scope:
        drafts are a function of the tokens alone, but how soon they come would tell."""
        self.sequences.begin(key, scope)

    def truncate(self, key: int, n_tokens: int) -> None:
        """The request goes back to its first `n_tokens` tokens, and the memory with it."""
        self.sequences.truncate(key, n_tokens)
        history = self._histories.get(key)
        if history is not None:
            history.truncate(n_tokens)

    def fork(self, key: int, child: int) -> None:
        """The child shares the memory of what is committed."""
        self.sequences.fork(key, child)
        history = self._histories.get(key)
        if history is not None:
            self._histories[child] = history.fork()

    def free(self, key: int, tokens: Sequence[int]) -> None:
        """Gives the request's memory back; full blocks are still known to the prefix cache while there is room."""
        self.sequences.free(key, tokens)
        self._histories.pop(key, None)

    def close(self) -> None:
        """Gives everything back, weights included; nothing may be proposed afterwards."""
        self.sequences.close()
        self._histories.clear()
        self._executor = None

    def check_integrity(self) -> None:
        """Verifies the books of the draft model's memory; raises `KVIntegrityError`."""
        self.sequences.check_integrity()

    def _propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        trees = [NO_DRAFT] * len(rows)
        keys = {row.key for row in rows}
        growing, logits = self._catch_up(rows)
        at = [(growth, leaf) for growth in growing for leaf in growth.leaves]
        while at:
            places = [growth.place(i, leaf) for i, (growth, leaf) in enumerate(at)]
            for place, (growth, leaf) in zip(places, at, strict=True):
                growth.edit(logits[place.row], leaf)
            found = candidates(logits[: len(at)], places, self._width, self._vocabulary)
            for (growth, leaf), choice in zip(at, found, strict=True):
                growth.add(leaf, choice)
            at, pieces = [], []
            for growth in growing:
                for leaf in growth.advance():
                    if self.sequences.reserve(leaf.branch.table, 1, keys):
                        growth.leaves.append(leaf)
                        at.append((growth, leaf))
                        pieces.append(_Piece(leaf.branch, (leaf.token,)))
            if pieces:
                logits = self._forward(pieces, range(len(pieces)))
                for _, leaf in at:
                    leaf.branch.tail.append(leaf.token)
        for growth in growing:
            trees[growth.index] = growth.tree(self.name)
        return trees

    def _catch_up(self, rows: Sequence[DraftRow]) -> tuple[list[_Growth], Floats]:
        """Runs what is missing of each row; returns those that are caught up, in the order of the logits returned."""
        waiting: list[tuple[int, int, SequenceState]] = []
        for index, row in enumerate(rows):
            if 0 < len(row.tokens) <= self._context and len(row.tokens) < self._max_model_len:
                state = self.sequences.open(row.key, row.tokens)
                waiting.append((len(row.tokens) - state.agreed, index, state))
            else:
                self.sequences.truncate(row.key, 0)
        # Short gaps first: a long prompt doesn't keep the others waiting.
        waiting.sort(key=lambda entry: entry[:2])
        left = self._max_fed
        kept: set[int] = set()
        pieces: list[_Piece] = []
        fed: list[tuple[SequenceState, DraftRow]] = []
        outputs: list[int] = []
        growing: list[_Growth] = []
        for _, index, state in waiting:
            row = rows[index]
            if not state.branches:  # evicted for a row before it
                state = self.sequences.open(row.key, row.tokens)
            missing = len(row.tokens) - state.agreed
            tokens = list(row.tokens[state.agreed : state.agreed + min(missing, left)])
            if not tokens or max(tokens) >= self.config.vocab_size:
                continue
            kept.add(row.key)
            branch = state.branches[0]
            if not (
                self.sequences.can_hold(state, len(row.tokens), kept)
                and self.sequences.reserve(branch.table, len(tokens), kept)
            ):
                continue
            left -= len(tokens)
            pieces.append(_Piece(branch, tokens))
            fed.append((state, row))
            if len(tokens) == missing:
                outputs.append(len(pieces) - 1)
                growing.append(self._growth(index, row, state))
        if not pieces:
            return [], np.empty((0, self.config.vocab_size), dtype=np.float32)
        began = time.perf_counter()
        logits = self._forward(pieces, outputs)
        n_tokens = sum(len(piece.tokens) for piece in pieces)
        # A correction or bonus token and a last draft are part of every draft's cost; more is a prompt's.
        beyond = max(0, n_tokens - 2 * len(pieces))
        self.setup_seconds += (time.perf_counter() - began) * beyond / n_tokens
        for state, row in fed:
            self.sequences.committed(state, row.tokens)
        return growing, logits

    def _growth(self, index: int, row: DraftRow, state: SequenceState) -> _Growth:
        n = len(row.tokens)
        # A node is scored by running its parent, which needs a position; and it must fit into the target's context.
        depth = min(row.budget, self._context - n + 1, self._max_model_len - n)
        history = self._histories.get(row.key)
        if history is None:
            history = self._histories[row.key] = _History.of(row, self._target_tokenizer, self.config.vocab_size)
        history.append(row.tokens)
        return _Growth(index, row, state, depth, self._width, self._min_confidence, history.edits)

    def _forward(self, pieces: Sequence[_Piece], outputs: Sequence[int]) -> Floats:
        """Logits float32[len(outputs), V] after the last tokens of the pieces `outputs`, valid until the next call.
        Ids that may not be proposed are -inf."""
        assert self._executor is not None, "nothing is proposed after close()"
        n_rows = len(pieces)
        starts = np.zeros(n_rows + 1, dtype=np.int32)
        np.cumsum([len(piece.tokens) for piece in pieces], out=starts[1:])
        blocks = [piece.branch.block_ids() for piece in pieces]
        tables = np.zeros((n_rows, max(len(ids) for ids in blocks)), dtype=np.int32)
        for line, ids in zip(tables, blocks, strict=True):
            line[: len(ids)] = ids
        n_tokens = int(starts[-1])
        step = StepInput(
            tokens=np.fromiter((t for piece in pieces for t in piece.tokens), dtype=np.int32, count=n_tokens),
            positions=np.concatenate(
                [np.arange(piece.start, piece.start + len(piece.tokens), dtype=np.int32) for piece in pieces]
            ),
            row_start=starts,
            cached=np.array([piece.start for piece in pieces], dtype=np.int32),
            is_tree=np.zeros(n_rows, dtype=np.uint8),
            ancestors=np.zeros(n_tokens, dtype=np.uint64),
            tables=tables,
            table_row=np.arange(n_rows, dtype=np.int32),
            output=starts[1:][list(outputs)] - np.int32(1),
        )
        logits = self._executor.forward(step, len(outputs), self._argmax[: len(outputs)])
        logits[:, self._proposable :] = -np.inf
        self.fed_tokens += n_tokens
        return logits


class _History:
    """A request's changes to its logits, along its committed output.

    Where the output began is not told; it is taken to begin with the last token of the first draft's root. Drafts may
    be a little worse for it, never wrong.
    """

    def __init__(self, n_prompt: int, edits: LogitEdits | None) -> None:
        self._n_prompt = n_prompt
        self.edits = edits

    @classmethod
    def of(cls, row: DraftRow, tokenizer: Tokenizer, vocabulary: int) -> _History:
        n_prompt = len(row.tokens) - 1
        params = row.params
        if any(token >= vocabulary for token, _ in params.biases):
            known = {token: bias for token, bias in params.biases if token < vocabulary}
            params = dataclasses.replace(params, logit_bias=known)
        edits = LogitEdits.of(params, row.tokens[:n_prompt], _end_tokens(params, tokenizer, vocabulary))
        return cls(n_prompt, edits)

    def append(self, tokens: Sequence[int]) -> None:
        """The committed tokens are now these."""
        if self.edits is not None:
            self.edits.append(tokens[self._n_prompt + self.edits.n_output :])

    def truncate(self, n_tokens: int) -> None:
        """Forgets all output after the first `n_tokens` tokens."""
        if self.edits is not None:
            self.edits.truncate(min(self.edits.n_output, max(0, n_tokens - self._n_prompt)))

    def fork(self) -> _History:
        """An independent copy."""
        return _History(self._n_prompt, None if self.edits is None else self.edits.fork())


def _end_tokens(params: SamplingParams, tokenizer: Tokenizer, vocabulary: int) -> list[int]:
    """What may not be chosen before `min_tokens`, as far as the draft model has it."""
    if not params.min_tokens:
        return []
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else tokenizer.eos_ids)
    return [token for token in ends if token < vocabulary]


class _Node(NamedTuple):
    token: int
    parent: int
    confidence: float
    worth: float
    """Product of the confidences from the root."""
    q: Floats | None


class _Leaf:
    """A node that is run through the model, to find its children; -1 is the root.

    path: drafted tokens from the root's child to the node.
    """

    __slots__ = ("branch", "node", "path")

    def __init__(self, node: int, branch: Branch, path: list[int]) -> None:
        self.node = node
        self.branch = branch
        self.path = path

    @property
    def token(self) -> int:
        return self.path[-1]


class _Growth:
    """A row's tree while it grows: candidates are added to leaves, then the next leaves are chosen."""

    def __init__(
        self,
        index: int,
        row: DraftRow,
        state: SequenceState,
        depth: int,
        width: int,
        min_confidence: float,
        edits: LogitEdits | None,
    ) -> None:
        self.index = index
        self.leaves = [_Leaf(-1, state.branches[0], [])]
        self._row = row
        self._state = state
        self._levels_left = depth
        self._width = width
        self._min_confidence = min_confidence
        self._edits = edits
        self._drawn = draws(row.params)
        self._nodes: list[_Node] = []
        self._level = 0  # first node of the newest level
        self._parents: dict[int, _Leaf] = {}

    def place(self, row: int, leaf: _Leaf) -> Place:
        """Where the leaf's children are wanted, its logits being in `row`."""
        return Place(row, len(self._row.tokens) + len(leaf.path), self._row.params, self._row.seed)

    def edit(self, logits: Floats, leaf: _Leaf) -> None:
        """Applies the request's penalties and bias to the leaf's logits float32[V]."""
        if self._edits is not None:
            self._edits.apply(logits, leaf.path)

    def add(self, leaf: _Leaf, found: Candidates) -> None:
        """Notes a leaf's children."""
        worth = 1.0 if leaf.node < 0 else self._nodes[leaf.node].worth
        if self._drawn:
            self._nodes += [_Node(token, leaf.node, 1.0, 1.0, found.q) for token in found.tokens]
        else:
            self._nodes += [
                _Node(token, leaf.node, confidence, worth * confidence, None)
                for token, confidence in zip(found.tokens, found.confidence, strict=True)
                if confidence >= self._min_confidence
            ]
        self._parents[leaf.node] = leaf

    def advance(self) -> list[_Leaf]:
        """The nodes to run next, each with a branch that has no slot for it yet; none when the tree is finished."""
        new = range(self._level, len(self._nodes))
        self._level = len(self._nodes)
        self._levels_left -= 1
        self.leaves = []
        chosen: list[int] = []
        if self._levels_left > 0 and new:
            if self._drawn:
                chosen = [new[0]] if len(self._nodes) < self._row.budget else []
            else:
                chosen = heapq.nsmallest(self._width, new, key=lambda node: (-self._nodes[node].worth, node))
                # What can't be among the best any more isn't run; no child is worth more than its parent.
                bar = self._bar()
                chosen = [node for node in chosen if self._nodes[node].worth > bar]
        leaves: list[_Leaf] = []
        given: set[int] = set()
        for node in chosen:
            parent = self._nodes[node].parent
            leaf = self._parents[parent]
            branch = leaf.branch
            if parent in given:
                branch = branch.fork()
                self._state.branches.append(branch)
            given.add(parent)
            leaves.append(_Leaf(node, branch, [*leaf.path, self._nodes[node].token]))
        self._parents.clear()
        return leaves

    def _bar(self) -> float:
        """Worth of the last node that the tree keeps, if it is full; else below all."""
        budget = self._row.budget
        if len(self._nodes) < budget:
            return -1.0
        return heapq.nlargest(budget, (node.worth for node in self._nodes))[-1]

    def tree(self, drafter: str) -> DraftTree:
        """The tree, cut to the budget, best nodes first."""
        nodes = self._nodes
        if not nodes:
            return NO_DRAFT
        order = list(range(len(nodes)))
        if not self._drawn:
            order.sort(key=lambda node: -nodes[node].worth)
        order = order[: self._row.budget]
        place = {node: i for i, node in enumerate(order)}
        place[-1] = -1
        return DraftTree(
            tokens=[nodes[node].token for node in order],
            parents=[place[nodes[node].parent] for node in order],
            confidence=[] if self._drawn else [nodes[node].confidence for node in order],
            q=np.stack([q for node in order if (q := nodes[node].q) is not None]) if self._drawn else None,
            drafter=drafter,
        )
