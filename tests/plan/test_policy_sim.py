"""The simulation of policies against closed forms, integrals and a plain one; choices against brute force; learning."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from forerun.plan.policy import class_lengths, expected_throughput
from forerun.plan.policy_choice import JointChoice
from forerun.plan.policy_control import Adaptive, ByClass, Controller, Oracle
from forerun.plan.policy_cost import StepCost, roofline_cost, stacked
from forerun.plan.policy_sim import Run, fixed_steps, simulate, simulate_all
from forerun.plan.workload import CODE_AND_CHAT, LONGEST, Texts, Workload, WorkloadClass, draw
from reference.lockstep import serve

CHEAP, MIDDLE, DEAR = 0.007, 0.05, 0.2


def steady(a: float, tokens: int = 256) -> WorkloadClass:
    """The same acceptance everywhere."""
    return WorkloadClass(name="steady", acceptance=a, spread=math.inf, swing=0, tokens=tokens)


def expected(a: float, length: int) -> float:
    """Tokens of a step, arXiv 2211.17192, equation 1."""
    return (1 - a ** (length + 1)) / (1 - a)


def throughput(texts: Texts, run: Run) -> float:
    return float(texts.tokens.sum() / run.time.sum())


# The simulation.


@pytest.mark.parametrize("length", [0, 1, 5, 16])
def test_constant_acceptance_gives_the_closed_form(length: int) -> None:
    a, cost = 0.7, roofline_cost(DEAR, 1)
    texts = draw(Workload((steady(a, tokens=2000),)), 100, 0)
    run = simulate(texts, [cost], ByClass(texts, [[length]]))
    per_step = (run.accepted + run.steps) / run.steps
    error = per_step.std() / math.sqrt(per_step.size)
    assert abs(per_step.mean() - expected(a, length)) <= 4 * error + 1e-9
    gain = throughput(texts, run)
    assert gain == pytest.approx(expected(a, length) / (1 + DEAR * length), rel=0.01)
    if length:
        # Without the draft's cost the same steps would be this much too fast.
        forgotten = simulate(texts, [cost._replace(draft=0 * cost.draft)], ByClass(texts, [[length]]))
        assert throughput(texts, forgotten) > gain * 1.15


def controllers(texts: Texts, costs: Sequence[StepCost]) -> list[Controller]:
    return [
        ByClass(texts, [[5, 2]] * len(costs)),
        Adaptive(texts, costs, 0.6),
        Oracle(CODE_AND_CHAT, texts, costs, by_moment=False),
        Oracle(CODE_AND_CHAT, texts, costs, by_moment=True),
    ]


@pytest.mark.parametrize("batch", [1, 8])
def test_every_token_is_emitted_once(batch: int) -> None:
    texts = draw(CODE_AND_CHAT, 64, 1)
    costs = [roofline_cost(c, batch) for c in (CHEAP, DEAR)]
    for controller in controllers(texts, costs):
        run = simulate(texts, costs, controller)
        past_the_end = run.steps + run.accepted - texts.tokens
        assert (past_the_end >= 0).all()
        assert (past_the_end <= LONGEST).all()
        assert (run.accepted <= run.drafted).all()
        assert (run.time >= run.steps * (1 - 1e-12)).all()


def test_controllers_side_by_side_do_not_touch_each_other() -> None:
    texts = draw(CODE_AND_CHAT, 32, 4)
    costs = [roofline_cost(c, 4) for c in (CHEAP, DEAR)]
    together = simulate_all(texts, costs, controllers(texts, costs))
    for run, controller in zip(together, controllers(texts, costs), strict=True):
        single = simulate(texts, costs, controller)
        assert all((a == b).all() for a, b in zip(run, single, strict=True))


def test_one_length_for_all_is_the_same_in_every_batch() -> None:
    texts = draw(CODE_AND_CHAT, 64, 2)
    steps = fixed_steps(texts)
    for batch, length in itertools.product((1, 8), (0, 3, 16)):
        cost = roofline_cost(MIDDLE, batch)
        run = simulate(texts, [cost], ByClass(texts, [[length, length]]))
        assert (run.steps[0] == steps[length]).all()
        assert run.time[0] == pytest.approx(steps[length] * cost.alike()[length])
    assert (steps[0] == texts.tokens).all()


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_batches_against_a_plain_simulation(batch: int) -> None:
    """The same queues, walked one sequence at a time; costs that grow with every row, for two drafters at once."""
    n, lengths = 32, (6, 1)
    texts = draw(CODE_AND_CHAT, n, 3)
    costs = [roofline_cost(c, batch, ridge_rows=9) for c in (0.03, 0.3)]
    run = simulate(texts, costs, ByClass(texts, [lengths, lengths]), seed=7)
    rng = np.random.default_rng(7)
    before = rng.permutation(n)
    place = texts.tokens[before] - 1
    if batch > 1:
        place = place - (rng.random(n) / 2 * place).astype(int)
    for index, c in enumerate((0.03, 0.3)):

        def seconds(rows: int, longest: int, c: float = c) -> float:
            return max(1, rows / 9) / max(1, batch / 9) + c * longest

        for first in range(0, n, batch):
            queues = []
            for slot in range(first, first + batch):
                later = [((slot + 7919 * (i + 1)) % n, 0) for i in range(8)]
                queues.append([(int(before[slot]), int(place[slot])), (slot, 0), *later])
            account = serve(
                queues, texts.run.tolist(), texts.tokens.tolist(), lambda request: lengths[texts.kind[request]], seconds
            )
            for slot in range(first, first + batch):
                assert (run.time[index, slot], run.steps[index, slot]) == pytest.approx(account[slot])


def test_in_lockstep_everyone_waits_for_the_longest_draft() -> None:
    """Against the integral. If each paid for its own draft only, batches of 8 would be 20% faster than they are."""
    lengths = np.array([8, 2])
    texts = draw(CODE_AND_CHAT, 2048, 0)
    for batch, c in itertools.product((1, 2, 8), (MIDDLE, DEAR)):
        cost = roofline_cost(c, batch)
        found = throughput(texts, simulate(texts, [cost], ByClass(texts, [lengths.tolist()])))
        assert found == pytest.approx(expected_throughput(CODE_AND_CHAT, cost, lengths), rel=0.03)
    ignored = expected_throughput(CODE_AND_CHAT, roofline_cost(DEAR, 1), lengths)
    assert ignored > 1.2 * expected_throughput(CODE_AND_CHAT, roofline_cost(DEAR, 8), lengths)


def test_requests_that_do_not_fill_batches_are_refused() -> None:
    texts = draw(CODE_AND_CHAT, 10, 0)
    cost = roofline_cost(MIDDLE, 4)
    with pytest.raises(ValueError, match="don't fill"):
        simulate(texts, [cost], ByClass(texts, [[1, 1]]))
    with pytest.raises(ValueError, match="different batches"):
        stacked([cost, roofline_cost(MIDDLE, 2)])


# Choices.


def test_the_joint_choice_is_the_best_of_all() -> None:
    """Of all lengths of a batch of three, by brute force: exact where rows are free, nearly so where they cost,
    since sequences alike are treated alike."""
    a = np.array([0.2, 0.5, 0.8, 0.95])
    survival = a[:, None] ** np.arange(LONGEST + 1)
    tokens = survival.cumsum(1)
    for ridge, least in ((1000, 1.0), (12, 0.97), (30, 0.96)):
        for c in (0.0, 0.3):
            cost = roofline_cost(c, 3, ridge_rows=ridge)
            choice = JointChoice(survival, [cost])
            for batch in itertools.combinations_with_replacement(range(4), 3):

                def rate(lengths: Sequence[int], batch: Sequence[int] = batch, cost: StepCost = cost) -> float:
                    won = math.prod(tokens[i, k] for i, k in zip(batch, lengths, strict=True)) ** (1 / 3)
                    return float(won / (cost.verify[3 + sum(lengths)] + cost.draft[max(lengths)]))

                best = max(rate(lengths) for lengths in itertools.product(range(LONGEST + 1), repeat=3))
                assert rate(choice.lengths(np.array([batch]))[0].tolist()) >= best * (least - 1e-6)


def test_alone_the_choice_is_the_formula() -> None:
    a = np.linspace(0.05, 0.95, 19)
    cost = roofline_cost(DEAR, 1)
    [chosen] = JointChoice(a[:, None] ** np.arange(LONGEST + 1), [cost]).lengths(np.arange(19)[None])
    for acceptance, length in zip(a, chosen, strict=True):
        speedups = [expected(acceptance, k) / (1 + DEAR * k) for k in range(LONGEST + 1)]
        assert speedups[length] == pytest.approx(max(speedups))


def test_most_tokens_a_step_is_not_soonest_served() -> None:
    """Drafting for those that are easy to serve fills the batch with those that are hard."""
    texts = draw(CODE_AND_CHAT, 1024, 0)
    cost = roofline_cost(DEAR, 8)
    soonest, goodput = (
        throughput(texts, simulate(texts, [cost], Adaptive(texts, [cost], 0.575, goodput=goodput)))
        for goodput in (False, True)
    )
    assert soonest > goodput * 1.008


def test_class_lengths_are_the_best_of_all_in_the_simulation_too() -> None:
    texts = draw(CODE_AND_CHAT, 2048, 0)
    cost = roofline_cost(MIDDLE, 1)
    best = class_lengths(CODE_AND_CHAT, cost)
    found = throughput(texts, simulate(texts, [cost], ByClass(texts, [best])))
    for change in itertools.product((-2, 0, 2), repeat=2):
        other = [max(k + d, 0) for k, d in zip(best, change, strict=True)]
        assert throughput(texts, simulate(texts, [cost], ByClass(texts, [other]))) < found * 1.003


def test_forgetting_what_drafts_cost_makes_them_too_long() -> None:
    cost = roofline_cost(MIDDLE, 1)
    assert class_lengths(CODE_AND_CHAT, cost._replace(draft=0 * cost.draft)) == (LONGEST, LONGEST)


# Learning.


@pytest.mark.parametrize("c", [MIDDLE, DEAR])
@pytest.mark.parametrize("a", [0.2, 0.5, 0.8])
def test_with_constant_acceptance_learning_comes_to_the_best_fixed_length(a: float, c: float) -> None:
    workload = Workload((steady(a, tokens=2000),))
    texts = draw(workload, 64, 0)
    cost = roofline_cost(c, 1)
    best = max(
        texts.tokens.sum() / (steps * seconds).sum()
        for steps, seconds in zip(fixed_steps(texts), cost.alike(), strict=True)
    )
    patient = throughput(texts, simulate(texts, [cost], Adaptive(texts, [cost], 0.5, memory=1e6)))
    assert patient == pytest.approx(best, rel=0.012)
    # A short memory costs a little where there is nothing to follow.
    hasty = throughput(texts, simulate(texts, [cost], Adaptive(texts, [cost], 0.5)))
    assert 0.94 * best < hasty < 1.01 * best


def learnt(a: float, *, censored: bool) -> float:
    texts = draw(Workload((steady(a, tokens=1000),)), 64, 0)
    cost = roofline_cost(DEAR, 1)
    learner = Adaptive(texts, [cost], 0.5, memory=1e6, censored=censored)
    place = np.zeros((64, 1), np.int64)
    for _ in range(150):
        length = learner.lengths(np.arange(64)[:, None], place)
        accepted = np.minimum(length, texts.run[np.arange(64)[:, None], place])
        learner.observe(length, accepted)
        place += accepted + 1
    return float(learner.estimate.mean())


@pytest.mark.parametrize("a", [0.6, 0.7, 0.8])
def test_what_is_learnt_is_not_bent_by_the_window(a: float) -> None:
    assert learnt(a, censored=True) == pytest.approx(a, abs=0.02)
    # Taking the end of an accepted draft for a failure makes short drafts argue for shorter ones.
    assert learnt(a, censored=False) < a - 0.2


def test_a_request_that_does_not_draft_probes_ever_more_rarely_and_comes_back() -> None:
    texts = draw(CODE_AND_CHAT, 1, 0)
    learner = Adaptive(texts, [roofline_cost(0.6, 1)], 0.05)
    nowhere = np.zeros((1, 1), np.int64)
    drafted = []
    for step in range(200):
        length = learner.lengths(nowhere, nowhere)
        if length.any():
            drafted.append(step)
        learner.observe(length, 0 * length)
    assert drafted == [2, 7, 16, 33, 66, 131, 196]
    for _ in range(150):
        length = learner.lengths(nowhere, nowhere)
        learner.observe(length, length)
    assert learner.lengths(nowhere, nowhere).item() > 2
    learner.joined(np.ones((1, 1), np.bool_))
    assert learner.estimate.item() == pytest.approx(0.05)
