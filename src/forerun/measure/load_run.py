"""Sending a load: in an open loop at times that were drawn before, or in a closed one, so many requests at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from forerun.measure.load import Exchange
from forerun.measure.load_client import Clock, Order
from forerun.measure.tasks import Task

Ask = Callable[[Order, float | None], Coroutine[Any, Any, Exchange]]
Sleep = Callable[[float], Awaitable[None]]
OnEnd = Callable[[Exchange], None]

T = TypeVar("T")


def chosen_tasks(tasks: Sequence[Task], requests: int, warmup: int, seed: int) -> tuple[list[Task], list[Task]]:
    """Tasks of the warm-up and of the measured requests.

    The measured ones go through the tasks in an order drawn with `seed`, again and again; the warm-up begins at the
    other end of it, so that few of its prompts are met again.
    """
    order = list(tasks)
    random.Random(seed).shuffle(order)
    return _around(order[::-1], warmup), _around(order, requests)


def _around(items: Sequence[T], n: int) -> list[T]:
    return [items[i % len(items)] for i in range(n)]


def poisson_times(n: int, rate: float, seed: int) -> list[float]:
    """Seconds at which n requests are due, the first at 0: the time to the next is exponential with mean 1 / rate."""
    draws = random.Random(f"times {seed}")
    at, times = 0.0, []
    for _ in range(n):
        times.append(at)
        at += draws.expovariate(rate)
    return times


async def run_closed(orders: Sequence[Order], concurrency: int, ask: Ask, on_end: OnEnd) -> None:
    """Sends the orders in their order, `concurrency` at a time; each answer makes room for the next."""
    left = iter(orders)

    async def client() -> None:
        for order in left:
            on_end(await ask(order, None))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(orders))):
            group.create_task(client())


async def run_open(
    orders: Sequence[Order],
    times: Sequence[float],
    ask: Ask,
    on_end: OnEnd,
    *,
    clock: Clock,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Sends each order at its time, in seconds after the first, whatever became of the ones before."""
    start = clock()

    async def one(order: Order, due: float) -> None:
        on_end(await ask(order, due))

    async with asyncio.TaskGroup() as group:
        for order, time in zip(orders, times, strict=True):
            wait = start + time - clock()
            if wait > 0:
                await sleep(wait)
            group.create_task(one(order, start + time))
