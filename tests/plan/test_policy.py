"""Policies of draft length: the simulation against closed forms, integrals and a plain one, and the stated gains."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.errors import PlanError
from forerun.plan import drafters
from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.policy import Comparison, alone, class_lengths, compare, expected_throughput
from forerun.plan.policy_cost import modelled_cost, roofline_cost
from forerun.plan.policy_explain import explain_gain, explain_length, explain_times
from forerun.plan.policy_sim import fixed_steps
from forerun.plan.steptime import Load, forward_time
from forerun.plan.workload import CODE_AND_CHAT, LONGEST, Workload, WorkloadClass, draw

CHEAP, MIDDLE, DEAR = 0.007, 0.05, 0.2
"""The command's default costs of a draft token in plain steps."""

PAGE = (Path(__file__).parents[2] / "docs" / "plan-policy.md").read_text(encoding="utf-8")


def steady(a: float, tokens: int = 256, name: str = "steady") -> WorkloadClass:
    """The same acceptance everywhere."""
    return WorkloadClass(name=name, acceptance=a, spread=math.inf, swing=0, tokens=tokens)


def expected(a: float, length: int) -> float:
    """Tokens of a step, arXiv 2211.17192, equation 1."""
    return (1 - a ** (length + 1)) / (1 - a)


# What is stated: lengths for code and chat, gains by cost and batch.


def test_code_drafts_eight_and_chat_two() -> None:
    """By the formula: acceptance .8 and .35 everywhere, c = .05, a verification as fast as a plain step."""
    for a, best, gain in ((0.8, 8, 3.092), (0.35, 2, 1.339)):
        speedups = [expected(a, k) / (1 + k * MIDDLE) for k in range(17)]
        assert speedups.index(max(speedups)) == best
        assert max(speedups) == pytest.approx(gain, rel=1e-3)
    workload = Workload((steady(0.8, name="code"), steady(0.35, name="chat")))
    assert [each.length for each in alone(workload, roofline_cost(MIDDLE, 1))] == [8, 2]


def test_code_and_chat_that_vary_draft_eight_and_two_as_well() -> None:
    """The default mix, whose requests and moments differ, by integration."""
    found = alone(CODE_AND_CHAT, roofline_cost(MIDDLE, 1))
    assert [(each.name, each.length) for each in found] == [("code", 8), ("chat", 2)]
    assert [each.speedup for each in found] == pytest.approx([2.689, 1.245], rel=0.01)
    assert class_lengths(CODE_AND_CHAT, roofline_cost(MIDDLE, 1)) == (8, 2)


@pytest.fixture(scope="module")
def compared() -> dict[tuple[float, int], Comparison]:
    """The default mix at the default costs, by cost and batch."""
    found = {}
    for batch in (1, 8, 32, 64):
        costs = [roofline_cost(c, batch) for c in (CHEAP, MIDDLE, DEAR)]
        for c, each in zip((CHEAP, MIDDLE, DEAR), compare(CODE_AND_CHAT, costs, requests=2048), strict=True):
            found[c, batch] = each
    return found


def test_the_adaptive_policy_gains_5_percent_where_drafts_are_cheap_and_19_where_they_are_dear(
    compared: dict[tuple[float, int], Comparison],
) -> None:
    assert compared[CHEAP, 1].gain("adaptive") == pytest.approx(0.05, abs=0.01)
    assert compared[DEAR, 1].gain("adaptive") == pytest.approx(0.19, abs=0.02)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_gains_are_not_those_of_one_seed(seed: int) -> None:
    cheap, dear = compare(CODE_AND_CHAT, [roofline_cost(c, 1) for c in (CHEAP, DEAR)], requests=2048, seed=seed)
    assert cheap.gain("adaptive") == pytest.approx(0.05, abs=0.01)
    assert dear.gain("adaptive") == pytest.approx(0.19, abs=0.02)


def moment_oracle_steps(each: WorkloadClass, mean: float, c: float) -> float:
    """Plain steps for each token of a request whose moment is known, by its own chain: in each moment the length with
    the most expected tokens per time; the time of a step over its tokens where the chain is stationary."""
    a, change = each.moments(mean), each.change
    survival = each.survival(mean)
    lengths = [int(np.argmax(survival[s].cumsum() / (1 + c * np.arange(LONGEST + 1)))) for s in (0, 1)]
    move = np.array([[1 - change, change], [change, 1 - change]])
    onward, tokens = np.zeros((2, 2)), np.zeros(2)
    for s in (0, 1):
        alive = np.eye(2)[s]
        for _ in range(lengths[s]):
            tokens[s] += alive.sum()
            onward[s] += alive * (1 - a) @ move
            alive = alive * a @ move
        tokens[s] += alive.sum()
        onward[s] += alive @ move
    easy = onward[1, 0] / (onward[0, 1] + onward[1, 0])
    at = np.array([easy, 1 - easy])
    return float(at @ (1 + c * np.array(lengths)) / (at @ tokens))


def test_without_noise_the_oracles_are_what_the_simulation_says(compared: dict[tuple[float, int], Comparison]) -> None:
    """Best fixed length, best by class, best by request and best by moment, by integration over the acceptances."""
    for c in (CHEAP, MIDDLE, DEAR):
        found, cost = compared[c, 1], roofline_cost(c, 1)
        seconds = cost.alike()
        fixed = by_class = by_request = by_moment = 0.0
        for each in CODE_AND_CHAT.classes:
            means, weights = each.means()
            of_length = seconds / each.tokens_per_step(means)
            fixed = fixed + weights @ of_length / 2
            by_class += (weights @ of_length).min() / 2
            by_request += weights @ of_length.min(1) / 2
            by_moment += weights @ [moment_oracle_steps(each, float(mean), c) for mean in means] / 2
        best = np.min(fixed)
        assert found.best_fixed.lengths == (int(np.argmin(fixed)),)
        assert found.best_fixed.throughput == pytest.approx(1 / best, rel=0.03)
        # Gains have less noise than throughputs: all policies ran on the same texts.
        assert found.gain("per class") == pytest.approx(best / by_class - 1, abs=0.01)
        assert found.gain("oracle per request") == pytest.approx(best / by_request - 1, abs=0.012)
        assert found.gain("oracle per moment") == pytest.approx(best / by_moment - 1, abs=0.015)
        assert found.gain("per class") < found.gain("adaptive") < found.gain("oracle per moment")


def test_batching_shrinks_the_gain(compared: dict[tuple[float, int], Comparison]) -> None:
    """Everyone waits for the longest draft. At 64 cheap drafts run into the ridge, and sharing out rows pays again."""
    for c in (CHEAP, MIDDLE, DEAR):
        gains = [compared[c, batch].gain("adaptive") for batch in (1, 8, 32)]
        assert gains[0] > 2 * gains[1] > 2 * gains[2] > -0.01
    assert compared[DEAR, 64].gain("adaptive") == pytest.approx(compared[DEAR, 32].gain("adaptive"), abs=0.01)
    assert compared[CHEAP, 64].gain("adaptive") > 2 * compared[CHEAP, 32].gain("adaptive")


def test_alone_nobody_pays_for_others_and_in_a_batch_the_hard_ones_do(
    compared: dict[tuple[float, int], Comparison],
) -> None:
    one, eight = compared[DEAR, 1], compared[DEAR, 8]
    assert one.of("adaptive").p99 < 1.02
    assert eight.of("adaptive").p99 > 1.25
    assert eight.of("adaptive").slower > one.of("adaptive").slower
    assert one.steadiest(0.95).policy == "adaptive"
    assert eight.steadiest(0.95).lengths == (1,)


def percents(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(-?[\d.]+)%", text)]


def row_of_page(first: str) -> list[float]:
    """Percentages of the page's table row that begins so."""
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {first} |")]
    return percents(line)


def test_the_table_of_the_page_is_what_comes_out(compared: dict[tuple[float, int], Comparison]) -> None:
    """Nearly: a random generator's distributions may change with its version."""
    for c in (CHEAP, MIDDLE, DEAR):
        cells = []
        for batch in (1, 8, 32, 64):
            found = compared[c, batch]
            cells += [found.gain("adaptive"), found.best_fixed.slower, found.of("adaptive").slower]
        assert row_of_page(f"{c:g}") == pytest.approx([100 * cell for cell in cells], abs=1.5)
    assert [compared[c, 8].steadiest(0.95).lengths for c in (CHEAP, MIDDLE, DEAR)] == [(6,), (3,), (1,)]
    assert [compared[c, 8].best_fixed.lengths for c in (CHEAP, MIDDLE, DEAR)] == [(11,), (4,), (2,)]
    text = " ".join(PAGE.split())
    assert "6, 3 and 1 instead of 11, 4 and 2" in text
    p99 = [float(p) for p in re.findall(r"p99 is ([\d.]+) with the fixed length and ([\d.]+) with", text)[0]]
    assert p99 == pytest.approx([compared[DEAR, 8].best_fixed.p99, compared[DEAR, 8].of("adaptive").p99], abs=0.03)
    shares = [compared[c, 1].gain("adaptive") / compared[c, 1].gain("oracle per moment") for c in (CHEAP, MIDDLE, DEAR)]
    low, high = re.findall(r"gets (\d+) to (\d+)% of what", text)[0]
    assert [float(low), float(high)] == pytest.approx([100 * min(shares), 100 * max(shares)], abs=3)
    by_class = expected_throughput(CODE_AND_CHAT, roofline_cost(MIDDLE, 8), [[8, 2], [4, 4]])
    assert f"make a batch of 8 {1 - by_class[0] / by_class[1]:.0%} slower than 4 for all" in text


@pytest.mark.parametrize(("swing", "spread"), [(0.95, 4), (0.5, 4), (0, 4), (0, math.inf)])
def test_gains_of_other_mixes_are_those_of_the_page(swing: float, spread: float) -> None:
    workload = Workload(tuple(replace(each, swing=swing, spread=spread) for each in CODE_AND_CHAT.classes))
    found = compare(workload, [roofline_cost(c, 1) for c in (CHEAP, MIDDLE, DEAR)], requests=2048)
    gains = [each.gain(policy) for policy in ("adaptive", "oracle per request", "oracle per moment") for each in found]
    assert row_of_page(f"{swing:g}, {spread:g}") == pytest.approx([100 * gain for gain in gains], abs=1)


# What is reported.


def test_outcomes_are_those_of_the_runs() -> None:
    texts = draw(CODE_AND_CHAT, 128, 5)
    cost = roofline_cost(DEAR, 1)
    [found] = compare(CODE_AND_CHAT, [cost], requests=121 + 7, seed=5)
    each = fixed_steps(texts)[3] * 1.6 / 256
    outcome = found.fixed[3]
    assert (outcome.policy, outcome.lengths, found.fixed[0].policy) == ("fixed", (3,), "none")
    assert outcome.mean == pytest.approx(each.mean())
    assert outcome.p50 == pytest.approx(np.quantile(each, 0.5))
    assert outcome.p99 == pytest.approx(np.quantile(each, 0.99))
    assert outcome.slower == pytest.approx(sum(value > 1 for value in each) / 128)
    assert outcome.throughput == pytest.approx(1 / each.mean())
    assert outcome.drafted == pytest.approx(3 * fixed_steps(texts)[3].sum() / texts.tokens.sum())
    assert found.fixed[0][2:7] == pytest.approx((1, 1, 1, 0, 1))
    assert found.of("none").drafted == 0
    with pytest.raises(KeyError):
        found.of("luck")


def test_longer_replies_weigh_more_in_throughput_and_not_in_the_mean() -> None:
    workload = Workload((steady(0.9, 300, "long"), steady(0.1, 100, "short")))
    cost = roofline_cost(DEAR, 1)
    assert expected_throughput(workload, cost, [4, 4]) == pytest.approx(
        1 / (1.8 * (0.75 / expected(0.9, 4) + 0.25 / expected(0.1, 4)))
    )
    [found] = compare(workload, [cost], requests=1024)
    assert found.fixed[4].throughput == pytest.approx(float(expected_throughput(workload, cost, [4, 4])), rel=0.01)
    assert found.fixed[4].mean == pytest.approx(0.9 / expected(0.9, 4) + 0.9 / expected(0.1, 4), rel=0.01)


@pytest.mark.parametrize("floor", [0, 0.5, 0.9, 0.95, 1])
def test_the_steadiest_policy_is_the_best_of_those_above_the_floor(
    compared: dict[tuple[float, int], Comparison], floor: float
) -> None:
    for found in compared.values():
        had = [*found.fixed, found.of("per class"), found.of("adaptive")]
        largest = max(outcome.throughput for outcome in had)
        allowed = [outcome for outcome in had if outcome.throughput >= floor * largest]
        assert found.steadiest(floor).p99 == pytest.approx(min(outcome.p99 for outcome in allowed))
        assert found.steadiest(floor) in allowed
    if floor == 0:
        assert compared[DEAR, 8].steadiest(floor).policy == "none"


def test_the_same_seed_gives_the_same_numbers() -> None:
    cost = roofline_cost(MIDDLE, 8)
    first, again, other = (compare(CODE_AND_CHAT, [cost], requests=32, seed=seed)[0] for seed in (1, 1, 2))
    assert first[1:3] == again[1:3]
    assert first[1:3] != other[1:3]


def test_costs_side_by_side_do_not_touch_each_other() -> None:
    """Also where one drafter can't draft as far as the other."""
    long, short = roofline_cost(MIDDLE, 4), roofline_cost(CHEAP, 4)
    short = short._replace(draft=short.draft[:4], verify=short.verify[:17])
    both = compare(CODE_AND_CHAT, [long, short], requests=64)
    for together, cost in zip(both, (long, short), strict=True):
        [single] = compare(CODE_AND_CHAT, [cost], requests=64)
        assert together[1:3] == single[1:3]
    assert len(both[1].fixed) == 4
    assert all(outcome.drafted <= 3 * outcome.throughput + 3 for outcome in both[1].others)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"requests": 0}, "requests"),
        ({"requests": 1 << 21}, "requests"),
        ({"requests": 1 << 20}, "requests"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_sizes_are_named(arguments: dict[str, int], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        compare(CODE_AND_CHAT, [roofline_cost(MIDDLE, 1)], **arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("floor", [-0.1, 1.1, math.nan])
def test_bad_floors_are_named(compared: dict[tuple[float, int], Comparison], floor: float) -> None:
    with pytest.raises(PlanError, match="floor"):
        compared[DEAR, 1].steadiest(floor)


# Costs.


def test_the_roofline_without_a_model() -> None:
    cost = roofline_cost(0.1, 64, ridge_rows=100)
    assert cost.verify[64] == 1
    assert cost.verify[100] == 1
    assert cost.verify[128] == pytest.approx(1.28)
    assert cost.alike()[3] == pytest.approx(2.56 + 0.3)
    beyond = roofline_cost(0.1, 200, ridge_rows=100)
    assert beyond.verify[400] == pytest.approx(2)


@pytest.mark.parametrize(
    ("c", "batch", "ridge", "field"),
    [
        (-0.1, 1, 295, "cost"), (math.nan, 1, 295, "cost"), (math.inf, 1, 295, "cost"), (0.1, 0, 295, "batch"),
        (0.1, 4096, 295, "batch"), (0.1, 1, 0, "ridge-rows"), (0.1, 1, math.nan, "ridge-rows"),
    ],
)  # fmt: skip
def test_bad_costs_are_named(c: float, batch: int, ridge: float, field: str) -> None:
    with pytest.raises(PlanError) as caught:
        roofline_cost(c, batch, ridge_rows=ridge)
    assert caught.value.field == field


def test_costs_of_a_model_are_those_of_its_steps() -> None:
    catalog = PlanCatalog.load()
    shape, where = catalog.model("llama-3.1-8b"), Deployment(hardware=catalog.gpu("h100"))

    def step(queries: int) -> float:
        return forward_time(shape.network, where, Load(16, queries, 2000)).seconds + where.eff.step_us * 1e-6

    head = drafters.eagle3(shape)
    cost = modelled_cost(shape.network, where, 16, 2000, drafter=head)
    assert cost.plain_seconds == pytest.approx(step(1))
    assert cost.longest == LONGEST
    for length in (0, 1, 7, 16):
        assert cost.verify[16 * (1 + length)] == pytest.approx(step(1 + length) / step(1))
        assert cost.draft[length] == pytest.approx(head.seconds(where, 16, 2000, length) / step(1))
    between = (cost.verify[32] + cost.verify[48]) / 2
    assert cost.verify[40] == pytest.approx(between)
    heads = modelled_cost(shape.network, where, 16, 2000, drafter=drafters.medusa(shape, heads=3))
    assert heads.longest == 3
    assert len(heads.verify) == 16 * 4 + 1
    given = modelled_cost(shape.network, where, 16, 2000, draft_cost=0.3)
    assert given.draft[4] == pytest.approx(1.2)
    assert (given.verify == cost.verify).all()


# Derivations.


@pytest.mark.parametrize("batch", [1, 64, 512])
@pytest.mark.parametrize("c", [CHEAP, DEAR, 3.0])
def test_a_derivation_ends_with_the_speedup_and_beats_its_neighbours(batch: int, c: float) -> None:
    for workload in (CODE_AND_CHAT, Workload((steady(0.8), replace(steady(1.0), name="sure")))):
        cost = roofline_cost(c, batch)
        for index, found in enumerate(alone(workload, cost)):
            d = explain_length(workload, cost, index, draft_cost=c, ridge_rows=295)
            assert d.value == pytest.approx(found.speedup, rel=1e-12)
            speedups = [line.value for line in d.lines if line.symbol.startswith("speedup_")]
            assert d.value == max(speedups)
            assert len(speedups) == 2 + (0 < found.length < LONGEST)


def test_a_steady_class_is_derived_from_the_formula() -> None:
    d = explain_length(Workload((steady(0.8),)), roofline_cost(MIDDLE, 1), 0, draft_cost=MIDDLE, ridge_rows=295)
    formulas = {line.symbol: line.formula for line in d.lines}
    assert formulas["tokens_8"] == "(1 - a**9) / (1 - a)"
    assert d.value == pytest.approx(sum(0.8**i for i in range(9)) / 1.4, rel=1e-12)
    assert d.lines[-1].symbol == "speedup_8"


def test_the_parts_of_the_integral_are_those_of_drawn_requests() -> None:
    """Shares and tokens a step by range of acceptance, against requests drawn one by one."""
    code = CODE_AND_CHAT.classes[0]
    values = {
        line.symbol: line.value
        for line in explain_length(CODE_AND_CHAT, roofline_cost(MIDDLE, 1), 0, draft_cost=MIDDLE, ridge_rows=295).lines
    }
    means = np.random.default_rng(3).beta(3.2, 0.8, 20000)
    tokens = code.tokens_per_step(means)[:, 8]
    for part in range(1, 6):
        inside = (means >= (part - 1) / 5) & (means < part / 5)
        assert values[f"share_{part}"] == pytest.approx(inside.mean(), abs=0.015)
        assert values[f"part_{part}"] == pytest.approx(1 / (1 / tokens[inside]).mean(), rel=0.02)


@pytest.mark.parametrize(("batch", "requests"), [(1, 96), (8, 256)])
def test_the_standard_error_is_that_of_many_seeds(batch: int, requests: int) -> None:
    cost = roofline_cost(DEAR, batch)
    found = [compare(CODE_AND_CHAT, [cost], requests=requests, seed=seed)[0] for seed in range(24)]
    spread = np.std([each.gain("adaptive") for each in found], ddof=1)
    stated = np.mean([each.gain_error("adaptive") for each in found])
    assert 0.6 < stated / spread < 1.6


def test_one_batch_has_no_standard_error() -> None:
    [found] = compare(CODE_AND_CHAT, [roofline_cost(DEAR, 8)], requests=8)
    assert math.isnan(found.gain_error("adaptive"))
    d = explain_gain(found, "adaptive", 0, draft_cost=DEAR, ridge_rows=295)
    assert d.value == pytest.approx(found.gain("adaptive"))


@pytest.mark.parametrize(("batch", "requests"), [(1, 1), (1, 2), (4, 37), (64, 64)])
@pytest.mark.parametrize("policy", ["per class", "adaptive", "oracle per moment"])
def test_a_policys_numbers_are_derived_from_its_requests(batch: int, requests: int, policy: str) -> None:
    [found] = compare(CODE_AND_CHAT, [roofline_cost(CHEAP, batch)], requests=requests, seed=2)
    values = {line.symbol: line.value for line in explain_times(found, policy, 2).lines}
    chosen = found.of(policy)
    assert (values["mean"], values["p99"]) == pytest.approx((chosen.mean, chosen.p99), rel=1e-12)
    gain = explain_gain(found, policy, 2, draft_cost=CHEAP, ridge_rows=295)
    assert gain.value == pytest.approx(found.gain(policy), abs=1e-12)
    assert found.seconds(found.best_fixed).sum() == pytest.approx(
        found.requests.tokens.sum() / found.best_fixed.throughput
    )
