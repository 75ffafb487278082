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
by depth alone, unless asking for everything is all but free. A drafter made of several (`CombinedDrafter`) may answer
with a part that is free or with one that isn't, and which one is only known afterwards, so the scan is made for each,
and each has its own limit. What a dear one is asked for must be covered by the request's account even if all of it
fails, and one that had nothing to say is asked again at growing distances.

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

import itertools
import math
from collections.abc import Mapping, Sequence

from forerun.draft.base import MAX_NODES, DraftTree
from forerun.engine.acceptance import Acceptance, RequestAcceptance, cells_of
from forerun.engine.forced import GRAMMAR
from forerun.engine.goodput import best_alone, best_length, rank
from forerun.engine.pace import Decision
from forerun.engine.steptime import DraftCost, StepTimes

MAX_DRAFT = 16

_FREE = 0.015  # asking for everything is free if it takes this share of the step
_FIRST_ASK = 2  # nodes asked of a drafter whose cost isn't known
_CREDIT = 0.01  # of a plain step, per step, to a request
_ADVANCE = 0.9  # credit of a request in a fresh engine, in plain steps
_FLOOR, _CEILING = -1.0, 4.0  # of a request's account
_LOAN = 0.02  # a step, to a request in debt from what drafts have won for others
_LENT_FLOOR = -0.3  # while drafts have won time for the engine as a whole
_ENGINE_CEILING = 16.0  # of the account of all requests together, in which new ones' credit is found
_ENGINE_CREDIT = 0.004
_FIRST_GAP, _MAX_GAP = 1.5, 64.0  # steps between probes
_ANY = ""  # stands for drafters that have no tree to their name yet


class _Request:
    __slots__ = (
        "account", "cells", "cut", "dear", "drafter", "end", "first_size", "gap", "idle", "limits", "position", "price",
        "probe", "reason", "spent", "states", "survival", "tokens", "tree", "vain",
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
        self.limits: dict[str, int] = {}  # by drafter, in this step
        self.dear = False  # whether one that isn't free is asked in this step
        self.vain = False  # whether the last one of those had nothing to say
        self.probe: str | None = None  # who is being probed
        self.price = 0.0  # of a single node, in plain steps
        self.survival: Sequence[float] = ()
        self.first_size = 0  # query tokens of the step if this request's draft is left out; 0: no choice was made
        self.spent = 0.0  # on drafting, in units of the level
        self.reason = ""


class AutoPace:
    """Chooses draft lengths by expected tokens per second (see the module). A `Pace`.

    Args:
        times: T(n) of this engine's model; kept fresh by `step`.
        max_draft: the most nodes of a request in a step, 1 to `MAX_NODES`.

    What it learns of drafters stays for the engine's life; what it learns of a request ends with `free`.
    """

    def __init__(self, times: StepTimes, *, max_draft: int = MAX_DRAFT) -> None:
        if not 1 <= max_draft <= MAX_NODES:
            raise ValueError(f"max_draft={max_draft} is not allowed; expected 1 to {MAX_NODES}")
        self.times = times
        self.max_draft = max_draft
        self._requests: dict[int, _Request] = {}
        self._records: dict[str, Acceptance] = {}
        self._costs: dict[str, DraftCost] = {}
        self._account = _ADVANCE
        self._gap = _FIRST_GAP
        self._others = 0.0  # the account of whatever doesn't draft
        self._members: list[_Request] = []  # whom this step's budget was about
        self._time = 1.0  # of a plain step for them, in units of the level
        self._asked = 0  # of them, those that the drafter is asked for
        self._deciding = 1  # query tokens of this step that choose a token
        self._free: set[str] = set()  # drafters that cost next to nothing to ask
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

    def budget(self, keys: Sequence[int], granted: Sequence[int], n_tokens: int, n_deciding: int) -> list[int]:
        """All that was granted where asking is all but free, else what is worth its time; 0 doesn't ask."""
        members = self._members = [self._requests[key] for key in keys]
        self._deciding = n_deciding
        self._names.clear()
        for request in members:
            request.account = min(request.account + _CREDIT, _CEILING)
            if request.account <= 0 and self._account > _ADVANCE:
                request.account += _LOAN
                self._account -= _LOAN / len(members)
            request.idle += 1
            request.probe = None
            request.dear = False
            learnt = request.tree is not None and self._settle(request)
            if request.idle > 1 and not learnt and request.drafter:
                record, state = self._state(request, request.drafter)
                record.forget(state)
        self._account = min(self._account + _ENGINE_CREDIT, _ENGINE_CEILING)
        self._others = min(self._others + _CREDIT, _CEILING)
        self._time = self._plain(n_tokens, 0)[0]
        asked = self._asks(members, granted, n_tokens)
        self._asked = sum(n > 0 for n in asked)
        return asked

    def limits(self, key: int) -> Mapping[str, int] | None:
        """What each drafter known so far may be asked for; who isn't known yet, for little."""
        request = self._requests.get(key)
        return None if request is None else request.limits

    def _asks(self, requests: Sequence[_Request], granted: Sequence[int], n_tokens: int) -> list[int]:
        first = [min(n, _FIRST_ASK) for n in granted]
        asks: dict[str, list[int]] = {}
        self._free.clear()
        for name, cost in self._costs.items():
            seconds = cost.per_row * len(requests) + cost.per_node * sum(granted)
            if seconds <= _FREE * self.times.seconds(n_tokens):
                self._free.add(name)
                asks[name] = list(granted)
            else:
                asks[name] = self._worth(name, cost, requests, granted, n_tokens) if cost.known else first
        names = [name for name in asks if name != _ANY] or list(asks)
        counts = [max(asked) for asked in zip(*(asks[name] for name in names), strict=True)] if names else first
        unknown = asks.get(_ANY, first)
        for i, request in enumerate(requests):
            request.limits = {name: asks[name][i] for name in names}
            request.limits[_ANY] = min(unknown[i], first[i]) if names != [_ANY] else counts[i]
        return counts

    def _worth(
        self, name: str, cost: DraftCost, requests: Sequence[_Request], granted: Sequence[int], n_tokens: int
    ) -> list[int]:
        """The nodes that are worth a drafter's time."""
        level = self.times.level
        per_row, per_node = cost.per_row / level, cost.per_node / level
        survivals: list[Sequence[float]] = []
        for request, n in zip(requests, granted, strict=True):
            record, state = self._state(request, name)
            resting = request.account <= 0 or (request.vain and request.idle < request.gap)
            survivals.append(() if resting else record.survival_by_depth(state, n))
        counts = self._scan(requests, survivals, n_tokens, 0.0, (per_row, per_node))
        now = self.times.shape(n_tokens, 1)
        plain = self._time
        poorest = min(request.account for request in requests)
        for i, request in enumerate(requests):
            if counts[i]:
                request.dear = True
                if per_node > 0:
                    counts[i] = min(counts[i], max(1, int((request.account * plain - per_row) / per_node)))
                continue
            request.reason = "the drafter's time isn't worth it" if request.account > 0 else "resting after losses"
            request.cut = 0
            request.position = len(request.tokens) if request.tokens is not None else -1
            request.survival = ()
            request.first_size, request.spent = n_tokens, 0.0
            request.price = (now[1] - now[0] + per_row + per_node) / plain
            if granted[i] and request.idle >= request.gap and poorest >= request.price:
                poorest -= request.price
                request.probe = name
                request.dear = True
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
            self._propose(request, tree)
            drafts = request.account > 0 or tree.settled > 0
            survivals.append(request.survival if drafts and request.probe is None else ())
            cost = self._costs.get(request.drafter)
            if cost is not None:
                seconds += cost.per_row + cost.per_node * len(tree)
        spent = seconds / self.times.level
        counts = self._scan(requests, survivals, n_tokens, spent)
        total = sum(counts)
        times = self.times.shape(n_tokens, total + len(requests))
        plain = self._time
        poorest = min(request.account for request in self._members)
        for i, request in enumerate(requests):
            if counts[i] or request.tree is None:
                continue
            request.price = (times[total + 1] - times[total]) / plain
            blind = request.tokens is None or request.tree.q is not None
            if request.probe is None and blind and request.idle >= request.gap and poorest >= request.price:
                poorest -= request.price
                request.probe = request.tree.drafter
            if request.probe is not None:
                counts[i] = 1
                total += 1
        added = times[total] - times[0]
        if added > 0:
            self._charge(added / plain)
            if n_tokens > len(self._members):
                self._others = max(self._others - added / times[0], _FLOOR)
        for request, n in zip(requests, counts, strict=True):
            request.cut = n
            request.first_size, request.spent = n_tokens + total - n, spent
            if request.tree is None:
                request.reason = "nothing proposed"
            elif request.probe is not None:
                request.reason = "a probe"
            elif n:
                request.reason = "most tokens per second"
            elif request.account <= 0:
                request.reason = "resting after losses"
            else:
                request.reason = "no draft is worth its time"
        return counts

    def _propose(self, request: _Request, tree: DraftTree) -> None:
        """Takes in what a request's drafter has to say."""
        request.survival = ()
        request.tree = None
        name = tree.drafter
        if not len(tree):
            if request.dear:
                request.vain = True
                request.idle = 0
                request.gap = min(request.gap * 2, _MAX_GAP)
            return
        request.tree = tree
        request.drafter = name
        if name != GRAMMAR:
            self._names.add(name)
        if name not in self._free:
            request.vain = False
        if request.probe is not None and request.probe != name and name in self._costs:
            request.probe = None  # another one had something to say
        record, state = self._state(request, name)
        cells = request.cells = cells_of(tree)
        request.survival = record.survival(state, tree, cells)

    def _charge(self, loss: float) -> None:
        """Everyone in the step lost as many plain steps of time."""
        self._account = max(self._account - loss, -_CEILING)
        floor = _LENT_FLOOR if self._account > _ADVANCE else _FLOOR
        for request in self._members:
            account = request.account - loss
            request.account = account if account > floor else floor

    def _plain(self, n_tokens: int, count: int) -> list[float]:
        """T from the query tokens on that emit something in a step without drafts: those of no prompt."""
        return self.times.shape(min(n_tokens, self._deciding), count)

    def _scan(
        self,
        requests: Sequence[_Request],
        survivals: Sequence[Sequence[float]],
        n_tokens: int,
        spent: float,
        price: tuple[float, float] | None = None,
    ) -> list[int]:
        """How many nodes of each row to take.

        `spent` was spent on drafting already, in units of the level; a `price`, if given, is still to be paid for a
        row's first node and for each node.
        """
        if len(self._members) <= 1 and len(survivals) == 1 and n_tokens == 1:
            return [best_alone(survivals[0], self.times.shape(1, len(survivals[0])), spent, price)]
        counts = [0] * len(survivals)
        if not self._affordable(requests, survivals, n_tokens):
            return counts
        ranked = rank(survivals)
        if not ranked:
            return counts
        times = self.times.shape(n_tokens, len(ranked))
        guests = n_tokens > len(self._members)  # whoever doesn't draft, and prompts
        length = best_length(
            ranked,
            times,
            self._plain(n_tokens, len(ranked)),
            min(n_tokens, self._deciding),
            accounts=[request.account for request in requests] if guests or len(self._members) > 1 else None,
            least=self._rest(requests),
            longest=self._others * times[0] if guests else math.inf,
            spent=spent,
            price=price,
        )
        for _, row, _ in ranked[:length]:
            counts[row] += 1
        return counts

    def _affordable(self, requests: Sequence[_Request], survivals: Sequence[Sequence[float]], n_tokens: int) -> bool:
        """Whether all in the step can pay for a single node, if all goes well."""
        guests = n_tokens > len(self._members)
        if not guests and len(self._members) == 1:
            return True
        one = self.times.shape(n_tokens, 1)
        first = one[1] - one[0]
        most = min(r.account + sum(s) for r, s in zip(requests, survivals, strict=True))
        return first <= min(self._rest(requests), most) * self._time and not (guests and first > self._others * one[0])

    def _rest(self, requests: Sequence[_Request]) -> float:
        """The least account of requests that can't win anything because they are none of these."""
        if len(self._members) <= len(requests):
            return _CEILING
        return min(r.account for r in self._members if r not in requests)

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
        elif request.probe is not None:
            request.gap = min(request.gap * 2, max(request.price / _CREDIT, 2 * _FIRST_GAP), _MAX_GAP)

    def step(self, n_tokens: int, drafted: int, draft_seconds: float, forward_seconds: float) -> None:
        """Corrects the step times and the drafter's cost."""
        if self._asked:
            self._charge(draft_seconds / (self.times.level * self._time))
            name = self._payer()
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
        times = self.times
        expected = itertools.accumulate(request.survival, initial=1.0)
        options = [
            (n, tokens, times.seconds(request.first_size + n) + request.spent * times.level)
            for n, tokens in enumerate(expected)
        ]
        return Decision(key, request.position, request.cut, tuple(options), request.reason)

    def _payer(self) -> str:
        """Whom this step's drafting is charged to: the dearest of those with a tree, or that may have had none."""
        names = self._names
        if not names and any(request.dear for request in self._members):
            names = self._costs.keys() - self._free
        return max(names, key=self._per_node, default=_ANY)

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
        if tree.is_chain:
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
