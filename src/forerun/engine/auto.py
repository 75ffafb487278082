"""The draft length that is worth its time, for each request and step.

The rule. A step over n query tokens takes T(n) seconds; a draft node is one more query token, and it adds its survival
(the probability that it and all of its path are accepted) to the tokens that the step is expected to emit. So all nodes
of all rows are ranked by survival, taken in that order, and of all prefixes of the ranking (the empty one included)
the one with the most expected tokens per second is kept. T has steps, so the scan goes to the end and doesn't stop
at the first fall. This is goodput as the objective (arXiv 2406.14066), chosen over the rows of a batch together
because they share the step. Lengths are never compared by their acceptance rate, which falls with length by arithmetic
alone.

Where a prompt is computed in the same step, its tokens emit nothing but must not hide what a draft costs: what a second
is worth is taken from the step without them, and each draft token pays its own part of T.

Asking costs, too. `budget` makes the same scan before drafting, with the drafter's measured seconds added and survival
by depth alone, unless asking for everything is all but free.

Nobody pays for it. Each request has an account in plain steps: a small credit to begin with, a little more every step,
plus the draft tokens that it won, less the time by which drafts (its own and its neighbours') made the step longer. A
choice must leave no request in the step with less than nothing, by expectation, and a request with an empty account
doesn't draft. So whatever drafts do, a request loses one percent of its time, the initial credit and one draft that
failed, at most; once an engine has seen drafts fail, new requests start without that credit, and while drafts have won
time for the engine, a request in debt is lent some of it. What else is in the step (requests that don't draft, a
prompt) has such an account together. The price is throughput: in a batch, a draft that would be best for the sum is
left out if a neighbour paid for it.

How it learns when it doesn't draft. Where drafting is cheap, a proposal is there at every step, and the committed
tokens tell whether its next node would have been right: evidence without a cost. Where that is missing, one node is
probed now and then, at distances that double while probes fail.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.draft.base import DraftTree
from forerun.engine.acceptance import Acceptance, RequestAcceptance, cells_of, is_chain
from forerun.engine.pace import Decision
from forerun.engine.steptime import DraftCost, StepTimes

MAX_DRAFT = 16

_MARGIN = 0.015  # a draft must promise this much more than none
_FREE = 0.015  # asking for everything is free if it takes this share of the step
_FIRST_ASK = 2  # nodes asked of a drafter whose cost isn't known
_HOPELESS = 0.02  # nodes of less survival are not ranked
_CREDIT = 0.01  # of a plain step, per step, to a request
_ADVANCE = 0.9  # credit of a request in a fresh engine, in plain steps
_FLOOR, _CEILING = -1.0, 4.0  # of a request's account
_LOAN = 0.02  # a step, to a request in debt from what drafts have won for others
_LENT_FLOOR = -0.3  # while drafts have won time for the engine as a whole
_ENGINE_CEILING = 16.0  # of the account of all requests together, in which new ones' credit is found
_ENGINE_CREDIT = 0.004
_FIRST_GAP, _MAX_GAP = 1.5, 64.0  # steps between probes
_FEW_OTHERS = 32  # more query tokens than this that belong to no drafting row are a prompt's


class _Request:
    __slots__ = (
        "account", "cells", "cut", "drafter", "end", "gap", "idle", "options", "position", "price", "probing", "reason",
        "states", "survival", "tokens", "tree",
    )  # fmt: skip

    def __init__(self, tokens: Sequence[int] | None, account: float, gap: float) -> None:
        self.tokens = tokens
        self.account = account
        self.gap = gap  # steps from a failed probe to the next
        self.idle = 0  # steps since a draft was verified
        self.states: dict[str, RequestAcceptance] = {}
        self.drafter = ""  # whose tree was the last
        self.tree: DraftTree | None = None  # the last proposal, before the cut, until its outcome is known
        self.cells: Sequence[int] = ()  # of its nodes
        self.cut = 0  # its nodes that were verified
        self.position = -1  # committed tokens when it was made
        self.end = -1  # its last accepted node
        self.probing = False
        self.price = 0.0  # of a single node, in plain steps
        self.survival: Sequence[float] = ()
        self.options: tuple[Sequence[float], float, int] = ((), 0.0, 0)
        self.reason = ""


class AutoPace:
    """Chooses draft lengths by expected tokens per second (see the module). A `Pace`.

    Args:
        times: T(n) of this engine's model; kept fresh by `step`.
        max_draft: the most nodes of a request in a step, 1 to 63.

    What it learns of drafters stays for the engine's life; what it learns of a request ends with `free`.
    """

    def __init__(self, times: StepTimes, *, max_draft: int = MAX_DRAFT) -> None:
        if not 1 <= max_draft <= 63:
            raise ValueError(f"max_draft={max_draft} is not allowed; expected 1 to 63")
        self.times = times
        self.max_draft = max_draft
        self._requests: dict[int, _Request] = {}
        self._records: dict[str, Acceptance] = {}
        self._costs: dict[str, DraftCost] = {}
        self._drafter = ""  # whose tree was the last of all
        self._account = _ADVANCE
        self._gap = _FIRST_GAP
        self._others = 0.0  # the account of whatever doesn't draft
        self._members: list[_Request] = []  # whom this step's budget was about
        self._time = 1.0  # of a plain step for them, in units of the level
        self._asked = 0  # of them, those that the drafter is asked for
        self._names: set[str] = set()  # of this step's trees

    def begin(self, key: int, tokens: Sequence[int] | None = None) -> None:
        """A request starts. Without `tokens`, only verified drafts teach anything."""
        self._requests[key] = _Request(tokens, min(max(self._account, 0.0), _ADVANCE), self._gap)

    def fork(self, key: int, child: int, tokens: Sequence[int] | None = None) -> None:
        """The child starts with all that is known of the request."""
        parent = self._requests[key]
        request = self._requests[child] = _Request(tokens, parent.account, parent.gap)
        request.drafter = parent.drafter
        request.states = {name: state.copy() for name, state in parent.states.items()}

    def free(self, key: int) -> None:
        """The request has ended; the drafters' records keep what it showed."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        self._settle(request)
        for name, state in request.states.items():
            self._records[name].end(state)
        self._gap = max(_FIRST_GAP, (self._gap * request.gap) ** 0.5)

    def wish(self, key: int) -> int:
        """The largest length; `budget` and `cut` decide."""
        return self.max_draft if key in self._requests else 0

    def budget(self, keys: Sequence[int], granted: Sequence[int], n_tokens: int) -> list[int]:
        """All that was granted where asking is all but free, else what is worth its time; 0 doesn't ask."""
        members = self._members = [self._requests[key] for key in keys]
        self._names.clear()
        for request in members:
            request.account = min(request.account + _CREDIT, _CEILING)
            if request.account <= 0 and self._account > _ADVANCE:
                request.account += _LOAN
                self._account -= _LOAN / len(members)
            request.idle += 1
            request.probing = False
            learnt = request.tree is not None and self._settle(request)
            if request.idle > 1 and not learnt and request.drafter:
                record, state = self._state(request, request.drafter)
                record.forget(state)
        self._account = min(self._account + _ENGINE_CREDIT, _ENGINE_CEILING)
        self._others = min(self._others + _CREDIT, _CEILING)
        self._time = self._plain(n_tokens, 0)[0]
        asked = self._asks(members, list(granted), n_tokens)
        self._asked = sum(n > 0 for n in asked)
        return asked

    def _asks(self, requests: Sequence[_Request], granted: list[int], n_tokens: int) -> list[int]:
        level = self.times.level
        per_row: list[float] = []
        per_node: list[float] = []
        total = 0.0
        known = True
        for request, n in zip(requests, granted, strict=True):
            cost = self._costs.get(request.drafter or self._drafter)
            if cost is None:
                return [min(n, _FIRST_ASK) for n in granted]
            known = known and cost.known
            per_row.append(cost.per_row / level)
            per_node.append(cost.per_node / level)
            total += cost.per_row + cost.per_node * n
        now = self.times.shape(n_tokens, 1)
        if total <= _FREE * now[0] * level:
            return granted
        if not known:
            return [min(n, _FIRST_ASK) for n in granted]
        survivals: list[Sequence[float]] = []
        for request, n in zip(requests, granted, strict=True):
            record, state = self._state(request, request.drafter or self._drafter)
            request.survival = record.survival_by_depth(state, n)
            survivals.append(request.survival if request.account > 0 else ())
        counts = self._scan(requests, survivals, n_tokens, 0.0, per_row, per_node)
        plain = self._time
        poorest = min(request.account for request in requests)
        for i, request in enumerate(requests):
            if counts[i]:
                continue
            request.reason = "the drafter's time isn't worth it" if request.account > 0 else "resting after losses"
            request.cut = 0
            request.position = len(request.tokens) if request.tokens is not None else -1
            request.options = (now[:1], 0.0, 0)
            request.price = (now[1] - now[0] + per_row[i] + per_node[i]) / plain
            if granted[i] and request.idle >= request.gap and poorest >= request.price:
                poorest -= request.price
                request.probing = True
                counts[i] = 1
        return counts

    def cut(
        self, keys: Sequence[int], positions: Sequence[int], trees: Sequence[DraftTree], n_tokens: int
    ) -> list[int]:
        """The beginnings of the trees that promise the most tokens per second together."""
        if not keys:
            return []
        requests = [self._requests[key] for key in keys]
        survivals: list[Sequence[float]] = []
        seconds = 0.0
        for request, position, tree in zip(requests, positions, trees, strict=True):
            request.position = position
            request.end = -1
            request.survival = ()
            request.tree = None
            if len(tree):
                request.tree = tree
                request.drafter = self._drafter = tree.drafter
                self._names.add(tree.drafter)
                record, state = self._state(request, tree.drafter)
                cells = request.cells = cells_of(tree)
                request.survival = record.survival(state, tree, cells)
            survivals.append(request.survival if request.account > 0 and not request.probing else ())
            cost = self._costs.get(request.drafter)
            if cost is not None:
                seconds += cost.per_row + cost.per_node * len(tree)
        spent = seconds / self.times.level
        counts = self._scan(requests, survivals, n_tokens, spent, (), ())
        total = sum(counts)
        times = self.times.shape(n_tokens, total + len(requests) + self.max_draft)
        plain = self._time
        poorest = min(request.account for request in self._members)
        for i, request in enumerate(requests):
            if counts[i] or request.tree is None:
                continue
            request.price = (times[total + 1] - times[total]) / plain
            blind = request.tokens is None or request.tree.q is not None
            if not request.probing and blind and request.idle >= request.gap and poorest >= request.price:
                poorest -= request.price
                request.probing = True
            if request.probing:
                counts[i] = 1
                total += 1
        added = times[total] - times[0]
        if added > 0:
            self._charge(added / plain)
            if n_tokens > len(self._members):
                self._others = max(self._others - added / times[0], _FLOOR)
        for request, n in zip(requests, counts, strict=True):
            request.cut = n
            request.options = (times, spent, total - n)
            if request.probing:
                request.reason = "a probe"
            elif request.tree is None:
                request.reason = "nothing proposed"
            elif n:
                request.reason = "most tokens per second"
            elif request.account <= 0:
                request.reason = "resting after losses"
            else:
                request.reason = "no draft is worth its time"
        return counts

    def _charge(self, loss: float) -> None:
        """Everyone in the step lost as many plain steps of time."""
        self._account = max(self._account - loss, -_CEILING)
        floor = _LENT_FLOOR if self._account > _ADVANCE else _FLOOR
        for request in self._members:
            account = request.account - loss
            request.account = account if account > floor else floor

    def _plain(self, n_tokens: int, count: int) -> list[float]:
        """T from the query tokens on that emit something in a step without drafts: those of no prompt."""
        rows = len(self._members)
        others = n_tokens - rows
        return self.times.shape(n_tokens if others <= _FEW_OTHERS else rows, count)

    def _scan(
        self,
        requests: Sequence[_Request],
        survivals: Sequence[Sequence[float]],
        n_tokens: int,
        spent: float,
        per_row: Sequence[float],
        per_node: Sequence[float],
    ) -> list[int]:
        """How many nodes of each row to take.

        `spent` was spent on drafting already, in units of the level; `per_row` and `per_node`, if given, are still to
        be spent for a row's first node and for each node.
        """
        if len(self._members) <= 1 and len(survivals) == 1 and n_tokens == 1:
            return [self._scan_alone(survivals[0], spent, per_row, per_node)]
        counts = [0] * len(survivals)
        others = n_tokens - len(self._members)
        guarded = others > 0 or len(self._members) > 1
        rest = _CEILING  # the least account of requests that can't win anything here
        if guarded:
            if len(self._members) > len(requests):
                rest = min(r.account for r in self._members if r not in requests)
            one = self.times.shape(n_tokens, 1)
            first = one[1] - one[0]
            most = min(rest, min(r.account + sum(s) for r, s in zip(requests, survivals, strict=True)))
            if first > most * self._time or (others > 0 and first > self._others * one[0]):
                return counts
        ranked: list[tuple[float, int, float]] = []  # what ranks it, row, survival
        for row, survival in enumerate(survivals):
            worst = 1.0
            for s in survival:
                if s < worst:
                    worst = s
                    if worst < _HOPELESS:
                        break
                ranked.append((worst, row, s))
        count = len(ranked)
        if not count:
            return counts
        times = self.times.shape(n_tokens, count)
        if len(survivals) > 1:
            if per_node:
                slope = (times[-1] - times[0]) / count + 1e-9
                ranked.sort(key=lambda node: node[0] / (slope + per_node[node[1]]), reverse=True)
            else:
                ranked.sort(key=_rank, reverse=True)
        plain = self._plain(n_tokens, count)
        base = float(n_tokens if others <= _FEW_OTHERS else len(self._members))
        slack = [request.account for request in requests]
        poorest = min(rest, *slack)
        expected = base
        best = base / (plain[0] + spent)
        worth = best  # tokens that a unit of time is worth without drafts
        allowed: list[tuple[int, float, float]] = []  # length, tokens won, time added
        chosen: tuple[int, float, float] | None = None
        extra = 0.0
        for k, (_, row, s) in enumerate(ranked, 1):
            expected += s
            if per_node:
                if not counts[row]:
                    extra += per_row[row]
                    counts[row] = 1
                extra += per_node[row]
            if guarded:
                before = slack[row]
                slack[row] = before + s
                if before <= poorest:
                    poorest = min(rest, *slack)
                added = times[k] - times[0]
                if added + extra > poorest * plain[0] or (others > 0 and added > self._others * times[0]):
                    continue
                allowed.append((k, expected - base, added + extra))
            rate = expected / (plain[k] + spent + extra)
            if rate > best:
                best = rate
                chosen = (k, expected - base, times[k] - times[0] + extra)
        if chosen is not None and plain is not times and others > _FEW_OTHERS:
            # A prompt's tokens are in the step: a node pays its own part of the step's time, at the rate without them.
            chosen = max(allowed, key=lambda option: option[1] - best * option[2])
        counts = [0] * len(survivals)
        if chosen is not None and chosen[1] >= worth * chosen[2] + _MARGIN * (base + worth * chosen[2]):
            for _, row, _ in ranked[: chosen[0]]:
                counts[row] += 1
        return counts

    def _scan_alone(
        self, survival: Sequence[float], spent: float, per_row: Sequence[float], per_node: Sequence[float]
    ) -> int:
        """The same for one request with a step of its own."""
        times = self.times.shape(1, len(survival))
        price = per_node[0] if per_node else 0.0
        if per_row:
            spent += per_row[0]
        best = (1.0 + _MARGIN) / (times[0] + (0.0 if per_row else spent))
        chosen = 0
        expected = 1.0
        for k, s in enumerate(survival, 1):
            expected += s
            spent += price
            rate = expected / (times[k] + spent)
            if rate > best:
                best, chosen = rate, k
        return chosen

    def verdict(self, key: int, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Learns from the nodes that were tried."""
        request = self._requests.get(key)
        if request is None:
            return
        record, state = self._state(request, tree.drafter)
        record.learn(state, tree, request.cells[: len(tree)], accepted)
        won = len(accepted)
        request.end = accepted[-1] if won else -1
        request.account = min(request.account + won, _CEILING)
        self._account = min(self._account + won / max(len(self._members), 1), _ENGINE_CEILING)
        request.idle = 0
        if won:
            request.gap = _FIRST_GAP
        elif request.probing:
            request.gap = min(request.gap * 2, max(request.price / _CREDIT, 2 * _FIRST_GAP), _MAX_GAP)

    def step(self, n_tokens: int, drafted: int, draft_seconds: float, forward_seconds: float) -> None:
        """Corrects the step times and the drafter's cost."""
        if self._asked:
            self._charge(draft_seconds / (self.times.level * self._time))
            names = self._names or {self._drafter}
            name = max(names, key=self._per_node)  # a mixed step is charged to the dearest
            cost = self._costs.get(name)
            if cost is None:
                cost = self._costs[name] = DraftCost()
            cost.observe(self._asked, drafted, draft_seconds)
            self._asked = 0
        self._members = []
        self.times.observe(n_tokens, forward_seconds)

    def decision(self, key: int) -> Decision | None:
        """The last choice for a request, with the lengths that were compared (the other rows as they were chosen)."""
        request = self._requests.get(key)
        if request is None or not request.reason:
            return None
        times, spent, others = request.options
        level = self.times.level
        options: list[tuple[int, float, float]] = []
        expected = 1.0
        for n in range(len(request.survival) + 1):
            if n + others >= len(times):
                break
            if n:
                expected += request.survival[n - 1]
            options.append((n, expected, (times[n + others] + spent) * level))
        return Decision(key, request.position, request.cut, tuple(options), request.reason)

    def _per_node(self, name: str) -> float:
        cost = self._costs.get(name)
        return cost.per_node if cost is not None else 0.0

    def _state(self, request: _Request, name: str) -> tuple[Acceptance, RequestAcceptance]:
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = Acceptance()
        state = request.states.get(name)
        if state is None:
            state = request.states[name] = record.begin()
        return record, state

    def _settle(self, request: _Request) -> bool:
        """Learns from the first node that wasn't verified, if the token in its place is known; whether it could."""
        tree, tokens = request.tree, request.tokens
        if tree is None:
            return False
        request.tree = None
        cut = request.cut
        if tokens is None or tree.q is not None or cut >= len(tree):
            return False
        parents, end = tree.parents, request.end
        if is_chain(tree):
            if end + 1 < cut:
                return False  # rejected within what was verified
            depth, children = end + 1, [end + 1]
        else:
            depth, node = 0, end
            while node >= 0:
                depth, node = depth + 1, parents[node]
            children = [i for i in range(cut, len(parents)) if parents[i] == end]
        place = request.position + depth
        if not children or children[0] >= len(parents) or place >= len(tokens):
            return False
        hit = next((i for i in children if tree.tokens[i] == tokens[place]), None)
        record, state = self._state(request, tree.drafter)
        record.learn_next(state, request.cells, depth, children, hit)
        if hit is not None and cut == 0 and len(self._members) == 1:
            # It would have been won: an empty account doesn't outlive a drafter that has become good. Not among
            # neighbours, who would take it for slack.
            request.account = max(request.account, _CREDIT)
        return True


def _rank(node: tuple[float, int, float]) -> float:
    return node[0]
