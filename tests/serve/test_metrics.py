"""What /metrics says is what the engine's own counts say, after a mix of requests that ends in every way."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forerun import Engine
from forerun.engine.loop import Loop
from forerun.serve.driver import Limits
from forerun.serve.metrics import Distribution, Metrics
from forerun.serve.run import ServeOptions
from reference.live_server import LiveServer

COMPLETIONS = "/v1/completions"
REPEATED = "abcabcabcabcabcabcabc"


class Scrape:
    """The values of one scrape, as Prometheus' own parser reads them."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in self.families.values():
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name") == "tiny"
                key = (sample.name, frozenset(labels.items()))
                assert key not in self._values, key
                self._values[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self._values[name, frozenset(labels.items())]

    def by(self, name: str, label: str) -> dict[str, float]:
        """A counter's values by its label."""
        return {dict(labels)[label]: value for (found, labels), value in self._values.items() if found == name}


def scrape(server: LiveServer) -> Scrape:
    return Scrape(httpx.get(server.url + "/metrics").text)


def ask(server: LiveServer, prompt: object = REPEATED, **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 20, **fields}
    return httpx.post(server.url + COMPLETIONS, json=body, timeout=60)


def leave(server: LiveServer) -> None:
    """A client that goes away once its text has begun."""
    with contextlib.closing(httpx.Client()) as client:
        body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with client.stream("POST", server.url + COMPLETIONS, json=body) as answer:
            next(answer.iter_bytes())
    server.check_idle()


@pytest.fixture(scope="module")
def mixed(served: Path) -> Iterator[LiveServer]:
    """A server with a small pool that has served a mix."""
    engine = Engine(served, kv_tokens=2048, threads=1, cache_weights=False, draft="lookup", draft_len=4, max_rows=4)
    with LiveServer(engine, ServeOptions(names=("tiny",), limits=Limits(max_waiting=8))) as server:
        assert ask(server).json()["choices"][0]["finish_reason"] in ("length", "stop")
        for which in range(4):
            assert ask(server, ignore_eos=True, max_tokens=40 + which, n=2).status_code == 200
        # Prompts that push each other's KV out of the pool, and requests that do not fit side by side.
        for which in range(3):
            assert ask(server, [[which + 5 * i, *(k % 90 for k in range(890))] for i in range(3)], max_tokens=200,
                       ignore_eos=True).status_code == 200  # fmt: skip
        assert ask(server, guided_choice=["yes", "no"]).json()["choices"][0]["text"] in ("yes", "no")
        assert ask(server, guided_choice=["yes", "no"]).status_code == 200
        assert ask(server, guided_regex="(").status_code == 400
        for _ in range(2):
            assert ask(server, max_tokens=1900, ignore_eos=True, timeout=0.001).status_code == 408
        assert ask(server, [1] * 5000).status_code == 400  # refused by the engine
        assert ask(server, temperature=-1).status_code == 400  # refused before
        leave(server)
        server.check_idle()
        yield server


def test_counts_are_the_engines(mixed: LiveServer) -> None:
    found, stats = scrape(mixed), mixed.engine.stats()
    counts = stats.speculation
    expected = {
        "forerun:steps_total": stats.steps,
        "vllm:generation_tokens_total": stats.emitted_tokens,
        "forerun:computed_tokens_total": stats.computed_tokens,
        "vllm:num_preemptions_total": stats.preemptions,
        "forerun:decisions_total": counts.decisions,
        "forerun:cut_tokens_total": counts.cut,
        "vllm:spec_decode_num_drafts_total": counts.drafted,
        "vllm:spec_decode_num_draft_tokens_total": counts.proposed,
        "vllm:spec_decode_num_accepted_tokens_total": counts.accepted,
        "forerun:grammar_mask_seconds_total": counts.mask_seconds,
        "forerun:step_time_seconds_sum": stats.step_seconds,
        "forerun:step_time_seconds_count": stats.steps,
        "forerun:step_rows_count": stats.steps,
        "forerun:step_rows_sum": counts.steps,
        "forerun:draft_length_count": counts.decisions,
        "forerun:draft_length_sum": counts.proposed,
        "forerun:kv_blocks": stats.kv_blocks,
        "forerun:kv_blocks_used": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
    }
    assert {name: found(name) for name in expected} == pytest.approx(expected)
    # The mix was one that can tell them apart.
    assert 0 < counts.accepted < counts.proposed
    assert counts.drafted < counts.decisions < counts.steps
    assert stats.preemptions > 0
    prefix = mixed.engine.prefix_cache.stats
    assert found("vllm:prefix_cache_queries_total") == prefix.lookup_tokens > found("vllm:prefix_cache_hits_total")
    assert found("vllm:prefix_cache_hits_total") == prefix.hit_tokens == stats.prefix_hit_tokens > 0
    assert found("forerun:prefix_cache_evicted_blocks_total") == prefix.evictions > 0
    by_position = found.by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert by_position == {str(i): n for i, n in enumerate(counts.accepted_by_position)}
    proposed = found.by("forerun:spec_decode_num_draft_tokens_per_pos_total", "position")
    assert proposed == {str(i): n for i, n in enumerate(counts.proposed_by_position)}
    for what in ("proposed", "accepted"):
        by_drafter = found.by(f"forerun:draft_tokens_{what}_total", "drafter")
        assert by_drafter == {name: getattr(one, what) for name, one in counts.by_drafter.items()}
    assert "lookup" in counts.by_drafter
    phases = found.by("forerun:step_seconds_total", "phase")
    assert phases == pytest.approx({p: getattr(counts, f"{p}_seconds") for p in phases})
    assert set(phases) == {"draft", "forward", "verify", "schedule"}
    compiler = mixed.engine.compiler.stats()
    assert found("forerun:grammar_compiles_total") == compiler.compiled >= 1
    assert found("forerun:grammar_compile_failures_total") == compiler.failed
    assert found("forerun:grammar_compile_seconds_total") == compiler.compile_seconds > 0
    assert found("forerun:grammar_cache_hits_total") == compiler.hits >= 1
    assert found("forerun:grammar_mask_seconds_total") > 0


def test_identities(mixed: LiveServer) -> None:
    """Those of docs/counting.md, and what the help texts promise."""
    found = scrape(mixed)
    accepted = found("vllm:spec_decode_num_accepted_tokens_total")
    emitted = found("vllm:generation_tokens_total")
    assert emitted == accepted + found("forerun:decisions_total") - found("forerun:cut_tokens_total")
    for what, whole in (("accepted", accepted), ("proposed", found("vllm:spec_decode_num_draft_tokens_total"))):
        assert sum(found.by(f"forerun:draft_tokens_{what}_total", "drafter").values()) == whole
    positions = found.by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert sum(positions.values()) == accepted
    assert list(positions.values()) == sorted(positions.values(), reverse=True)
    assert positions["0"] <= found("vllm:spec_decode_num_drafts_total")
    drafts = found("forerun:draft_length_count") - found("forerun:draft_length_bucket", le="0.0")
    assert drafts == found("vllm:spec_decode_num_drafts_total")
    assert sum(found.by("forerun:step_seconds_total", "phase").values()) <= found("forerun:step_time_seconds_sum")


def test_requests_by_outcome(mixed: LiveServer) -> None:
    found = scrape(mixed)
    outcomes = found.by("forerun:requests_total", "outcome")
    # One client left, two requests ran too long, an expression and a length were refused.
    assert outcomes["stop"] + outcomes["length"] == 1 + 4 + 9 + 2
    assert outcomes["stop"] >= 2
    assert {name: outcomes[name] for name in ("cancelled", "timeout", "rejected", "error")} == {
        "cancelled": 1, "timeout": 2, "rejected": 2, "error": 0,
    }  # fmt: skip
    reasons = found.by("vllm:request_success_total", "finished_reason")
    assert reasons == {
        "stop": outcomes["stop"], "length": outcomes["length"], "abort": outcomes["cancelled"], "error": 0,
    }  # fmt: skip
    assert found("vllm:e2e_request_latency_seconds_count") == sum(outcomes.values()) - outcomes["rejected"]
    finished = outcomes["stop"] + outcomes["length"]
    assert found("vllm:request_prompt_tokens_count") == finished
    assert found("vllm:request_generation_tokens_count") == finished + 4  # four had two texts
    began = found("vllm:time_to_first_token_seconds_count")
    assert finished + 1 <= began <= found("vllm:request_queue_time_seconds_count") <= finished + 3
    assert found("vllm:prompt_tokens_total") >= found("vllm:request_prompt_tokens_sum") > 9 * 890
    assert found("vllm:request_generation_tokens_sum") <= found("vllm:generation_tokens_total")
    # As many gaps as there were steps that added text after the first, at least those of the one long text.
    assert found("vllm:inter_token_latency_seconds_count") > 9 * 200 / 5
    assert found("vllm:request_time_per_output_token_seconds_count") <= finished + 4


def test_the_queue_and_failures_are_counted(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(served, kv_tokens=2048, threads=1, cache_weights=False, draft="none", max_rows=1)
    limits = Limits(max_waiting=2)
    with LiveServer(engine, ServeOptions(names=("tiny",), limits=limits)) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 1900, "ignore_eos": True})
        request = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                connection.sendall(request.encode())
                wait_until(lambda: len(engine.loop.live) > 0)
            wait_until(lambda: len(engine.loop.live) == 3)
            during = scrape(server)
            assert during("vllm:num_requests_running") == 1
            assert during("vllm:num_requests_waiting") == 2
            assert during("forerun:kv_blocks_used") > 0
            assert during("vllm:kv_cache_usage_perc") == pytest.approx(
                during("forerun:kv_blocks_used") / during("forerun:kv_blocks"), rel=0.5
            )
            assert ask(server).status_code == 429
        server.check_idle()
        after = scrape(server)
        # The gauges fall without a step.
        assert after("vllm:num_requests_running") == after("vllm:num_requests_waiting") == 0
        assert after("vllm:kv_cache_usage_perc") == 0
        assert after("forerun:requests_total", outcome="rejected") == 1
        assert after("forerun:requests_total", outcome="cancelled") == 3
        assert after("vllm:request_queue_time_seconds_count") == 1

        def broken(*_: object) -> None:
            raise RuntimeError("a fault")

        with monkeypatch.context() as patch:
            patch.setattr(Loop, "_step", broken)
            assert ask(server).status_code == 500
        assert ask(server).status_code == 200
        assert scrape(server)("forerun:requests_total", outcome="error") == 1


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_text_is_whole(mixed: LiveServer) -> None:
    answer = httpx.get(mixed.url + "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert "_created" not in answer.text
    for family in Scrape(answer.text).families.values():
        assert re.match(r"(vllm|forerun):[a-z0-9_]+$", family.name)
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            counts = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
            assert counts == sorted(counts)
            [count] = [sample.value for sample in family.samples if sample.name.endswith("_count")]
            assert counts[-1] == count


def test_a_distribution() -> None:
    values = Distribution((0, 1, 2.5))
    for value in (0, 0.5, 1, 2.4, 2.5, 99):
        values.add(value)
    values.add(1, times=3)
    assert values.buckets() == [("0.0", 1), ("1.0", 6), ("2.5", 8), ("+Inf", 9)]
    assert values.total == pytest.approx(0.5 + 4 + 2.4 + 2.5 + 99)


def test_planted_faults_show(mixed: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above fail where steps go uncounted."""
    for test in (test_counts_are_the_engines, test_identities):
        test(mixed)
    before = mixed.engine.stats()
    monkeypatch.setattr(Metrics, "stepped", lambda *_: None)
    assert ask(mixed).status_code == 200
    assert mixed.engine.stats().steps > before.steps
    with pytest.raises(AssertionError):
        test_counts_are_the_engines(mixed)


def test_a_scrape_does_not_wait_for_a_step(mixed: LiveServer) -> None:
    """It reads what the last step left, without the engine's lock."""
    with mixed.engine.loop.lock:
        assert httpx.get(mixed.url + "/metrics", timeout=20).status_code == 200
        assert httpx.get(mixed.url + "/status.json", timeout=20).status_code == 200
