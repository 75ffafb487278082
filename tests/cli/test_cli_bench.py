"""`forerun bench` and bench/peers.py: that they time the real thing, and say what they timed."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forerun
from forerun import Engine, SamplingParams, cli, ops
from forerun.cli.bench_probe import ForwardProbe, run_batch, run_decode_steps, run_steps
from forerun.measure import passage, speed
from forerun.measure.speed import DecodeTrial, Setup, StepTime
from reference.model_server import catalog_text
from reference.scripts import loaded
from reference.tiny import TinySpec, write_tiny_gguf

SETUP = Setup("m", "0", "llama", 6_000_000_000, "cpu", 2, 4, "avx2", 2, "0", "forerun bench")
SETUP_KEYS = [
    "model", "sha256", "architecture", "weight_bytes", "cpu", "physical_cores", "logical_cpus",
    "isa", "threads", "forerun", "command",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_tiny_gguf(folder / "tiny.gguf", TinySpec("llama", seed=5))


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(model, kv_tokens=4096, threads=1, cache_weights=False, prefix_cache=False)


@pytest.fixture(autouse=True)
def environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the module's own, one thread, and a short look at the memory bus."""
    monkeypatch.setenv("FORERUN_CACHE", str(folder / "cache"))
    monkeypatch.setenv("FORERUN_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delenv("FORERUN_CATALOG", raising=False)
    monkeypatch.setattr(ops, "read_bandwidth", partial(ops.read_bandwidth, mebibytes=4))


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error output of `forerun bench` in this process."""
    code = cli.dispatch(["bench", *arguments])
    output, errors = capsys.readouterr()
    return code, output, errors


def tokens_of(engine: Engine, count: int) -> list[int]:
    return passage.excerpt(engine.tokenizer.encode(passage.PASSAGE), 0, count)


def test_steps_are_measured_in_rotation_and_reported_as_medians() -> None:
    turns: list[Any] = []
    times = {1: iter([0.5, 0.1, 0.2, 9.0]), 4: iter([0.3, 9.0, 0.6, 0.4])}
    bandwidths = iter([20e9, 90e9, 60e9])
    steps = iter([StepTime(1.0, 0.9), StepTime(2.0, 1.9), StepTime(4.0, 2.0)])

    def forward(m: int) -> float:
        turns.append(m)
        # What warms up is longer than anything else, and must not count.
        return 99.0 if len(turns) % 3 == 1 else next(times[m])

    report = speed.measure_steps(
        SETUP,
        context=7,
        rows=[1, 4],
        repeats=3,
        forward=forward,
        decode_steps=lambda: next(steps),
        n_decode_steps=4,
        read_bandwidth=lambda: next(bandwidths),
    )
    assert turns == [1, 1, 4, 4, 4, 1, 1, 1, 4]
    one, four = report.rows
    # Times of one row: 0.5, 0.1, 0.2; of four: 0.3, 9.0, 0.6.
    assert (one.rows, one.ms, one.ms_best, one.ratio) == (1, 200.0, 100.0, 1.0)
    assert (four.rows, four.ms, four.ms_best) == (4, 600.0, 300.0)
    assert four.ratio == pytest.approx(3.0)
    assert one.weight_gb_per_s == pytest.approx(30.0)
    assert one.bandwidth_share == pytest.approx(0.5)
    assert four.weight_gb_per_s == pytest.approx(10.0)
    assert (report.read_gb_per_s, report.read_gb_per_s_best) == (60.0, 90.0)
    assert report.decode_step_ms == 500.0
    assert report.outside_native_share == pytest.approx(0.1)
    assert (report.context, report.repeats, report.setup) == (7, 3, SETUP)


def test_without_one_row_there_is_no_ratio() -> None:
    report = speed.measure_steps(
        SETUP,
        context=1,
        rows=[2],
        repeats=1,
        forward=float,
        decode_steps=lambda: StepTime(1.0, 1.0),
        n_decode_steps=1,
        read_bandwidth=lambda: 1.0,
    )
    assert report.rows[0].ratio is None


@given(cases=st.integers(1, 9), repeats=st.integers(1, 30))
def test_every_case_has_one_turn_a_round_and_begins_equally_often(cases: int, repeats: int) -> None:
    told: list[tuple[int, int]] = []
    orders = list(speed.rounds(cases, repeats, lambda turn, of: told.append((turn, of))))
    assert all(sorted(order) == list(range(cases)) for order in orders)
    first = [sum(order[0] == case for order in orders) for case in range(cases)]
    assert max(first) - min(first) <= 1
    assert told == [(turn, repeats) for turn in range(1, repeats + 1)]


def test_decode_rates_are_over_the_whole_batch() -> None:
    trials = {
        1: iter([DecodeTrial(1.0, 5.0, 10), DecodeTrial(2.0, 2.0, 10), DecodeTrial(9.0, 3.0, 10)]),
        8: iter([DecodeTrial(4.0, 10.0, 10), DecodeTrial(4.0, 0.0, 0), DecodeTrial(4.0, 30.0, 10)]),
        9: iter([DecodeTrial(1.0, 0.0, 0)] * 3),
    }
    report = speed.measure_decode(
        SETUP,
        batches=[1, 8, 9],
        prompt_tokens=100,
        max_tokens=11,
        repeats=3,
        trial=lambda batch: next(trials[batch]),
    )
    one, eight, never = report.rows
    assert one.prefill_tokens_per_s == pytest.approx(50.0)
    assert one.decode_tokens_per_s == pytest.approx(1 / 0.3)
    assert one.decode_step_ms == pytest.approx(300.0)
    assert eight.prefill_tokens_per_s == pytest.approx(200.0)
    assert eight.decode_step_ms == pytest.approx(2000.0)
    assert eight.decode_tokens_per_s == pytest.approx(4.0)
    assert eight.decode_tokens_per_s_per_request == pytest.approx(0.5)
    assert never.decode_tokens_per_s is never.decode_step_ms is None
    assert never.prefill_tokens_per_s == pytest.approx(900.0)


@given(length=st.integers(2, 400), count=st.integers(1, 40), size=st.integers(1, 500), start=st.integers(0, 9))
def test_prompts_begin_at_different_places(length: int, count: int, size: int, start: int) -> None:
    ids = list(range(length))
    prompts = passage.distinct_prompts(ids, count, size, start)
    assert [len(prompt) for prompt in prompts] == [size] * count
    for prompt in prompts:
        assert all((b - a) % length == 1 for a, b in pairwise(prompt))
    assert len({prompt[0] for prompt in prompts}) == min(count, length)


def test_the_hash_of_a_file_and_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model-2.safetensors").write_bytes(b"two")
    assert speed.model_sha256(tmp_path) == hashlib.sha256(b"two").hexdigest()
    (tmp_path / "model-1.safetensors").write_bytes(b"one")
    (tmp_path / "config.json").write_bytes(b"{}")
    lines = (
        f"{hashlib.sha256(b'one').hexdigest()}  model-1.safetensors\n"
        f"{hashlib.sha256(b'two').hexdigest()}  model-2.safetensors\n"
    )
    assert speed.model_sha256(tmp_path) == hashlib.sha256(lines.encode()).hexdigest()
    with pytest.raises(forerun.ForerunError, match="can't be read"):
        speed.model_sha256(tmp_path / "absent")


def test_a_forward_is_the_models(engine: Engine) -> None:
    """What is timed has the context behind it, each row's own token, and an answer for each."""
    free = engine.pool.n_free
    tokens = tokens_of(engine, 60 + 33)
    best = engine.score(tokens, top=1).ids[:, 0]
    with ForwardProbe(engine, tokens, 60) as probe:
        # Narrow after wide: rows of an earlier forward must not be seen.
        for rows in (33, 1, 5, 1, 33):
            probe.argmax[:] = -7
            assert 0 < probe.forward(rows) < 10
            assert probe.argmax[:rows].tolist() == best[60 : 60 + rows].tolist()
            assert set(probe.argmax[rows:].tolist()) <= {-7}
        assert engine.pool.n_free < free
    assert engine.pool.n_free == free
    engine.check_integrity()


def test_a_batch_decodes_until_its_first_end(engine: Engine) -> None:
    prompts = passage.distinct_prompts(tokens_of(engine, 900), 3, 100)
    before = engine.stats()
    trial = run_batch(engine, prompts, 12)
    after = engine.stats()
    assert trial.decode_steps == 11
    assert 0 < trial.prefill_seconds + trial.decode_seconds <= 10
    assert after.emitted_tokens - before.emitted_tokens == 36
    assert after.computed_tokens - before.computed_tokens == 3 * (100 + 11)
    assert not engine.scheduler.has_work
    engine.check_integrity()


def test_a_request_that_ends_too_early_gives_no_decode_rate(model: Path) -> None:
    engine = Engine(model, kv_tokens=1024, threads=1, cache_weights=False, prefix_cache=False, max_step_tokens=64)
    prompts = passage.distinct_prompts(tokens_of(engine, 900), 4, 64)
    # The first request has its two tokens before the last one has its prompt computed.
    assert run_batch(engine, prompts, 2).decode_steps == 0


def test_decode_steps_are_steps_of_the_engine(engine: Engine) -> None:
    before = engine.stats()
    time = run_decode_steps(engine, tokens_of(engine, 50), 4)
    after = engine.stats()
    assert after.steps - before.steps == 5
    assert after.emitted_tokens - before.emitted_tokens == 5
    assert 0 < time.native_seconds < time.seconds < after.step_seconds - before.step_seconds
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("batch", [1, 3])
def test_generated_tokens_are_the_engines(model: Path, batch: int) -> None:
    engine = Engine(model, kv_tokens=1024, threads=1, cache_weights=False, prefix_cache=False, max_step_tokens=64)
    prompts = passage.distinct_prompts(tokens_of(engine, 900), batch, 100)
    generated = run_steps(engine, prompts, 6)
    assert not engine.scheduler.has_work
    expected = engine.generate([prompts[0]], SamplingParams(max_tokens=7, ignore_eos=True))[0]
    assert generated.tokens == list(expected.token_ids)
    assert generated.seconds > 0
    engine.check_integrity()


def test_a_broken_forward_leaves_no_memory_behind(engine: Engine) -> None:
    free = engine.pool.n_free
    with pytest.raises(ValueError, match="token"):
        ForwardProbe(engine, [1, engine.config.vocab_size, 1], 2)
    assert engine.pool.n_free == free


def test_an_end_token_ends_no_measurement(engine: Engine, folder: Path) -> None:
    prompt = tokens_of(engine, 30)
    end = engine.generate([prompt], SamplingParams(max_tokens=3))[0].token_ids[-1]
    spec = TinySpec("llama", seed=5, metadata={"tokenizer.ggml.eos_token_id": end})
    path = write_tiny_gguf(folder / "ends.gguf", spec)
    ending = Engine(path, kv_tokens=256, threads=1, cache_weights=False)
    assert ending.generate([prompt], SamplingParams(max_tokens=9))[0].finish_reason == "stop"
    assert run_batch(ending, [prompt], 9).decode_steps == 8


def check_setup(found: dict[str, Any], model: Path, command: str) -> None:
    assert list(found) == SETUP_KEYS
    assert found["model"] == str(model)
    assert found["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert found["architecture"] == "llama"
    assert found["weight_bytes"] > 1_000_000
    assert found["cpu"]
    assert found["isa"] == ops.instruction_set()
    assert found["threads"] == 1
    assert found["physical_cores"] == ops.physical_cores()
    assert found["forerun"] == forerun.__version__
    assert found["command"] == f"forerun bench {command} --threads 1"


def test_step_as_json_and_as_text(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    flags = ["step", "-m", str(model), "--rows", "4,1,4", "--context", "40", "--repeats", "2"]
    code, output, errors = call(capsys, *flags, "--json")
    assert (code, errors) == (0, "")
    found = json.loads(output)
    check_setup(found["setup"], model, f"step -m {model} --rows 1,4 --context 40 --repeats 2")
    assert list(found) == [
        "setup", "context", "repeats", "read_gb_per_s", "read_gb_per_s_best", "decode_step_ms",
        "outside_native_share", "rows",
    ]  # fmt: skip
    assert (found["context"], found["repeats"]) == (40, 2)
    assert 0 < found["outside_native_share"] < 1
    assert 0 < found["read_gb_per_s"] <= found["read_gb_per_s_best"]
    one, four = found["rows"]
    assert list(one) == [
        "rows", "ms", "ms_best", "ratio", "weight_gb_per_s", "bandwidth_share",
    ]  # fmt: skip
    assert (one["rows"], one["ratio"], four["rows"]) == (1, 1.0, 4)
    assert four["ratio"] == pytest.approx(four["ms"] / one["ms"])
    rate = found["setup"]["weight_bytes"] / one["ms"] / 1e6
    assert one["weight_gb_per_s"] == pytest.approx(rate)
    assert one["bandwidth_share"] == pytest.approx(rate / found["read_gb_per_s"])

    code, output, errors = call(capsys, *flags)
    lines = output.splitlines()
    assert (code, errors) == (0, "")
    assert lines[0].startswith(f"{model}, llama, ")
    assert found["setup"]["sha256"] in lines[1]
    assert lines[3] == found["setup"]["command"]
    assert lines[5].split() == [
        "ROWS", "MS", "BEST", "MS", "RATIO", "WEIGHTS", "GB/S", "OF", "BANDWIDTH",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[6:8]] == ["1", "4"]
    assert "outside native code" in lines[8]


def test_decode_as_json_and_as_text(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    flags = ["decode", "-m", str(model), "--batch", "3,1", "--prompt-tokens", "20"]
    flags += ["--max-tokens", "6", "--repeats", "2"]
    code, output, errors = call(capsys, *flags, "--json")
    assert (code, errors) == (0, "")
    found = json.loads(output)
    command = f"decode -m {model} --batch 1,3 --prompt-tokens 20 --max-tokens 6 --repeats 2"
    check_setup(found["setup"], model, command)
    assert list(found) == ["setup", "prompt_tokens", "max_tokens", "repeats", "rows"]
    assert (found["prompt_tokens"], found["max_tokens"], found["repeats"]) == (20, 6, 2)
    one, three = found["rows"]
    assert list(one) == [
        "batch", "prefill_tokens_per_s", "decode_tokens_per_s", "decode_tokens_per_s_per_request",
        "decode_step_ms",
    ]  # fmt: skip
    assert (one["batch"], three["batch"]) == (1, 3)
    assert three["decode_tokens_per_s"] == pytest.approx(3 * three["decode_tokens_per_s_per_request"])
    assert three["decode_tokens_per_s"] == pytest.approx(3e3 / three["decode_step_ms"])
    code, output, errors = call(capsys, *flags)
    lines = output.splitlines()
    assert (code, errors) == (0, "")
    assert lines[3] == found["setup"]["command"]
    assert [line.split()[0] for line in lines[5:]] == ["BATCH", "1", "3"]


def test_a_verified_catalog_file_is_not_hashed_again(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalog = tmp_path / "extra.toml"
    catalog.write_text(catalog_text("tiny", model.read_bytes()))
    monkeypatch.setenv("FORERUN_CATALOG", str(catalog))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    placed = tmp_path / "models" / "tiny" / "tiny.gguf"
    placed.parent.mkdir(parents=True)
    placed.write_bytes(model.read_bytes())
    flags = ["decode", "-m", "tiny", "--batch", "1", "--prompt-tokens", "4", "--max-tokens", "2"]
    flags += ["--repeats", "1", "--json"]

    def refuse(path: Path) -> str:
        raise AssertionError(f"{path} was hashed")

    # The pull hashes it, leaves a marker, and that is enough.
    monkeypatch.setattr(speed, "model_sha256", refuse)
    code, output, errors = call(capsys, *flags)
    assert code == 0, errors
    expected = hashlib.sha256(model.read_bytes()).hexdigest()
    assert json.loads(output)["setup"]["sha256"] == expected


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["step", "--rows", "1,x"], 2, "--rows"),
        (["step", "--rows", ""], 2, "--rows"),
        (["step", "--rows", "0,1"], 2, "from 1 to 1024"),
        (["step", "--rows", "2000"], 2, "from 1 to 1024"),
        (["step", "--rows", "-1"], 2, "--rows"),
        (["step", "--context", "0"], 2, "--context"),
        (["step", "--repeats", "0"], 2, "--repeats"),
        (["step", "--threads", "257"], 2, "--threads"),
        (["decode", "--batch", "1,"], 2, "--batch"),
        (["decode", "--batch", "257"], 2, "from 1 to 256"),
        (["decode", "--prompt-tokens", "0"], 2, "--prompt-tokens"),
        (["decode", "--max-tokens", "0"], 2, "--max-tokens"),
        (["decode", "--jsn"], 2, "--jsn"),
        (["steps"], 2, "steps"),
        (["step", "-m", "tini"], 1, "no model is named 'tini'"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, complaint: str
) -> None:
    found, output, errors = call(capsys, *arguments)
    assert (found, output) == (code, "")
    assert errors.startswith("forerun: error: ")
    assert complaint in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("arguments", [["step", "--context", "600"], ["decode", "--prompt-tokens", "600"]])
def test_a_context_that_is_too_short_is_said(
    capsys: pytest.CaptureFixture[str], model: Path, arguments: list[str]
) -> None:
    code, output, errors = call(capsys, *arguments, "-m", str(model))
    assert (code, output) == (1, "")
    assert "the model's context holds 512" in errors
    assert errors.count("\n") == 1


@pytest.fixture(scope="module")
def peers() -> Iterator[ModuleType]:
    yield from loaded(Path(__file__).parents[2] / "bench" / "peers.py")


def test_peers_compares_two_workers(capsys: pytest.CaptureFixture[str], peers: ModuleType, model: Path) -> None:
    """Forerun against itself: the whole comparison but for the other engine."""
    plan = peers.Plan(rounds=2, context=20, rows=(1, 5), repeats=2, prefill=40, batches=(1, 3), decode=5)
    workers = {name: peers.Worker("forerun", sys.executable) for name in peers.ENGINES}
    try:
        asked = {"model": str(model), "threads": 1, "plan": vars(plan)}
        setup, _ = (worker.ask("load", **asked) for worker in workers.values())
        tests, agree = peers.compare(workers, plan, setup)
        with pytest.raises(peers.PeersError, match="forerun: "):
            workers["forerun"].ask("decode", batch=1)
        shown = setup | {"model": "m", "command": "c", "versions": dict.fromkeys(peers.ENGINES, "v")}
        result = peers.report(tests, plan, shown, agree, workers)
    finally:
        for worker in workers.values():
            worker.close()
    assert [worker._process.returncode for worker in workers.values()] == [0, 0]
    assert setup["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert agree == 6
    assert [test.name for test in tests] == [
        "forward of 1 token", "forward of 5 tokens", "prefill of 40", "decode, batch 1",
        "decode, batch 3",
    ]  # fmt: skip
    for test in tests:
        turns = plan.rounds * (plan.repeats if test.do == "forward" else 1)
        assert [len(times) for times in test.seconds.values()] == [turns, turns]
        assert all(0 < value < 10 for times in test.seconds.values() for value in times)
    rows = json.loads(json.dumps(result))["rows"]
    for row in rows:
        better = row["llama_cpp"] / row["forerun"]
        assert row["ratio"] == pytest.approx(better if row["unit"] == "ms" else 1 / better)
    peers.print_table(result)
    output = capsys.readouterr().out
    assert "T(5) / T(1)" in output
    assert "agrees on the first 6 of 6 tokens" in output


def test_peers_says_why_it_cannot_load(peers: ModuleType, folder: Path) -> None:
    worker = peers.Worker("forerun", sys.executable)
    try:
        with pytest.raises(peers.PeersError, match="forerun: ModelNotFoundError: no model is named"):
            worker.ask("load", model="tini", threads=1, plan=vars(peers.QUICK))
        with pytest.raises(peers.PeersError, match=r"forerun: .* is a folder"):
            worker.ask("load", model=str(folder), threads=1, plan=vars(peers.QUICK))
    finally:
        worker.close()


def test_peers_notices_a_worker_that_died(peers: ModuleType) -> None:
    worker = peers.Worker("forerun", sys.executable)
    try:
        worker._process.kill()
        with pytest.raises(peers.PeersError, match="the forerun worker ended with -9"):
            worker.ask("load")
    finally:
        worker.close()
