"""Batches in lockstep, one sequence at a time and in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def serve(
    queues: Sequence[Sequence[tuple[int, int]]],
    runs: Sequence[Sequence[int]],
    tokens: Sequence[int],
    length: Callable[[int], int],
    seconds: Callable[[int, int], float],
) -> dict[int, tuple[float, int]]:
    """Time and steps of the second request of each slot's queue.

    queues: of each slot, (request, place to start at) in order. runs[request][place]: draft tokens that would be
    accepted from there. length: of a request's drafts. seconds: of a step with so many rows and that longest draft.
    """
    waiting = [list(queue) for queue in queues]
    account = {queue[1][0]: (0.0, 0) for queue in queues}
    running = set(account)
    while running:
        drafts = [length(queue[0][0]) for queue in waiting]
        step = seconds(len(drafts) + sum(drafts), max(drafts))
        for slot, queue in enumerate(waiting):
            request, place = queue[0]
            measured = len(queue) == len(queues[slot]) - 1
            if measured:
                time, steps = account[request]
                account[request] = time + step, steps + 1
            place += min(drafts[slot], runs[request][place]) + 1
            queue[0] = request, place
            if place >= tokens[request]:
                queue.pop(0)
                if measured:
                    running.discard(request)
    return account
