"""Prompt lookup and suffix proposals by reading whole texts: slow and obvious, without an index.

The rules are those of forerun.draft.lookup and forerun.draft.suffix, which say where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_MATCH = 32
FOLLOWED = 24
NEGLIGIBLE = 0.02


def match_length(text: Sequence[int], end: int, context: Sequence[int]) -> int:
    """Tokens, at most 32, that agree when `text` is read backwards from `end` and `context` from its last token."""
    most = min(MAX_MATCH, end + 1, len(context))
    m = 0
    while m < most and text[end - m] == context[-1 - m]:
        m += 1
    return m


def look_up(tokens: Sequence[int], min_match: int, max_match: int, most: int) -> tuple[list[int], int]:
    """The chain that prompt lookup proposes, and how many tokens agree before it; ([], 0) if nothing occurred."""
    for length in range(max_match, min_match - 1, -1):
        if length > len(tokens):
            continue
        for end in range(len(tokens) - 2, length - 2, -1):
            if list(tokens[end - length + 1 : end + 1]) == list(tokens[len(tokens) - length :]):
                text = list(tokens)
                for i in range(most):
                    text.append(text[end + 1 + i])
                return text[len(tokens) :], match_length(tokens, end, tokens)
    return [], 0


@dataclass(frozen=True)
class Rule:
    """As the native SuffixRule, with the context lengths."""

    lengths: Sequence[int]
    escape: Sequence[float]
    shared_weight: float
    min_survival: float
    max_depth: int = 63
    own_limit: int = 64
    shared_limit: int = 32


@dataclass(frozen=True)
class Occurrence:
    """The context was seen in texts[text], 0 the own one, up to `end`."""

    text: int
    end: int
    match: int
    rank: int


@dataclass(frozen=True)
class Candidate:
    """A node that may come next."""

    survival: float
    rank: int
    parent: int
    token: int
    confidence: float
    path: tuple[int, ...]
    occurrences: tuple[Occurrence, ...]


Tree = tuple[list[int], list[int], list[float]]


def occurrences(texts: Sequence[Sequence[int]], rule: Rule, escape: Sequence[float]) -> list[Occurrence]:
    """Where the context of texts[0] was seen before, longest contexts first, then own text, then latest."""
    own = texts[0]
    found: list[Occurrence] = []
    looks = [4 * rule.own_limit, 4 * rule.shared_limit]
    room = [rule.own_limit, rule.shared_limit]
    left = 1.0
    for level in range(len(rule.lengths) - 1, -1, -1):
        if left <= NEGLIGIBLE:
            break
        low = rule.lengths[level]
        high = rule.lengths[level + 1] if level + 1 < len(rule.lengths) else MAX_MATCH + 1
        weight = 0.0
        for text in [0, *range(len(texts) - 1, 0, -1)]:
            kind = int(text > 0)
            for end in range(len(texts[text]) - (2 if text == 0 else 1), -1, -1):
                m = match_length(texts[text], end, own)
                if m < low or room[kind] == 0 or looks[kind] == 0:
                    continue
                looks[kind] -= 1
                if m >= high or end + 1 == len(texts[text]):
                    continue
                room[kind] -= 1
                weight += rule.shared_weight if kind else 1.0
                found.append(Occurrence(text, end, m, len(found)))
        if weight:
            left *= escape[level] / (weight + escape[level])
    return found


def children(
    texts: Sequence[Sequence[int]], rule: Rule, escape: Sequence[float], node: int, above: Candidate
) -> list[Candidate]:
    """The nodes that may follow `above`, number `node` of the tree."""
    path = above.path
    following: dict[int, list[Occurrence]] = {}
    for seen in above.occurrences:
        text = [*texts[0], *path] if seen.text == 0 else texts[seen.text]
        at = seen.end + 1 + len(path)
        if at < len(text):
            following.setdefault(text[at], []).append(seen)

    def class_of(seen: Occurrence) -> int:
        return max(c for c, length in enumerate(rule.lengths) if length <= seen.match + len(path))

    def weight(seen: Occurrence) -> float:
        return rule.shared_weight if seen.text else 1.0

    probability = dict.fromkeys(following, 0.0)
    left = 1.0
    for c in range(len(rule.lengths) - 1, -1, -1):
        if not any(class_of(seen) == c for group in following.values() for seen in group):
            continue
        counts = {
            token: sum(weight(seen) for seen in group if class_of(seen) >= c) for token, group in following.items()
        }
        total = sum(counts.values())
        e = escape[c] * sum(count > 0 for count in counts.values())
        for token, count in counts.items():
            probability[token] += left * (count / (total + e))
        left *= e / (total + e)
    return [
        Candidate(
            above.survival * probability[token],
            min(seen.rank for seen in group),
            node,
            token,
            probability[token],
            (*path, token),
            tuple(sorted(group, key=lambda seen: seen.rank)[:FOLLOWED]),
        )
        for token, group in following.items()
    ]


def propose(
    own: Sequence[int], documents: Sequence[Sequence[int]], budget: int, rule: Rule, doubt: float = 1.0
) -> Tree:
    """(tokens, parents, confidence) of a suffix proposal; `documents` in the order in which they were stored."""
    if not own:
        return [], [], []
    texts = [own, *documents]
    escape = [e * doubt for e in rule.escape]
    root = Candidate(1.0, 0, -1, -1, 1.0, (), tuple(occurrences(texts, rule, escape)))
    waiting = children(texts, rule, escape, -1, root)
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    while len(tokens) < budget:
        waiting = [c for c in waiting if c.survival >= rule.min_survival and len(c.path) <= rule.max_depth]
        if not waiting:
            break
        best = min(waiting, key=lambda c: (-c.survival, c.rank))
        waiting.remove(best)
        tokens.append(best.token)
        parents.append(best.parent)
        confidence.append(best.confidence)
        waiting += children(texts, rule, escape, len(tokens) - 1, best)
    return tokens, parents, confidence
