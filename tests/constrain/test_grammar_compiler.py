"""Compiling off the loop: once per content, within time and memory, nobody held up, no thread left."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

import pytest
from llguidance import LLMatcher

from forerun.constrain.compiler import LARGE, MAX_STUCK, Grammar, GrammarCompiler, estimated_bytes
from forerun.errors import ConfigurationError, InvalidConstraintError
from reference.grammars import Written, mask_of, rich_tokenizer

TOKENIZER = rich_tokenizer()


@dataclass(frozen=True, eq=False)
class Slow(Written):
    """A grammar that is written when the test says so."""

    go: threading.Event = field(default_factory=threading.Event)
    began: list[float] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)

    def grammar(self) -> str:
        self.began.append(time.monotonic())
        self.priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if sys.platform == "linux":
            assert os.sched_getscheduler(0) == os.SCHED_IDLE
        assert self.go.wait(30)
        return self.text


def text(letters: str) -> str:
    return f'start: "{letters}"\n'


@pytest.fixture
def make() -> Iterator[Callable[..., GrammarCompiler]]:
    made: list[GrammarCompiler] = []

    def new(**settings: Any) -> GrammarCompiler:
        made.append(GrammarCompiler(TOKENIZER, **settings))
        return made[-1]

    yield new
    for compiler in made:
        compiler.close()
    assert idle()


def begun(slow: Slow) -> bool:
    """Whether its compile began, or does soon."""
    for _ in range(500):
        if slow.began:
            return True
        time.sleep(0.01)
    return False


def idle() -> bool:
    """Whether no thread of a compiler is left, or none is soon."""
    for _ in range(500):
        if not any(thread.name.startswith("forerun-") for thread in threading.enumerate()):
            return True
        time.sleep(0.01)
    return False


def test_same_content_is_compiled_once(make: Callable[..., GrammarCompiler]) -> None:
    """By whoever and however often it is submitted: while it is compiled, and after."""
    compiler = make()
    slow = Slow(text("ab"))
    futures = [compiler.submit(slow)]
    threads = [
        threading.Thread(target=lambda: futures.append(compiler.submit(Slow(text("ab"), slow.go)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slow.go.set()
    grammars = {id(future.result(30)) for future in futures}
    assert len(grammars) == 1
    assert id(compiler.compile(Slow(text("ab")))) in grammars
    stats = compiler.stats()
    assert (stats.compiled, stats.joined, stats.hits, stats.cached, stats.pending) == (1, 8, 1, 1, 0)
    assert compiler.compile(Written(text("abc"))) is not futures[0].result()


def test_a_compile_runs_at_the_lowest_priority_and_no_thread_stays(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    slow = Slow(text("ab"))
    future = compiler.submit(slow)
    assert not idle_now()
    slow.go.set()
    assert future.result(30).compile_seconds > 0
    assert idle()
    if sys.platform == "linux":
        assert slow.priorities == [19]
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19


def idle_now() -> bool:
    return not any(thread.name.startswith("forerun-") for thread in threading.enumerate())


def test_what_takes_too_long_is_refused_and_holds_nobody_up(make: Callable[..., GrammarCompiler]) -> None:
    """The next compile runs beside it, the late one isn't begun again, and what it yields in the end is kept."""
    compiler = make(timeout_seconds=0.3)
    compiler.compile(Written(text("warm")))
    slow = Slow(text("ab"))
    late, next_one = compiler.submit(slow), compiler.submit(Written(text("c")))
    with pytest.raises(InvalidConstraintError, match=r"took more than 0.3 s to compile: make it smaller"):
        late.result(30)
    assert next_one.result(30).start().forced(9) == TOKENIZER.encode_plain("c")
    with pytest.raises(InvalidConstraintError, match="took more than"):
        compiler.compile(Slow(text("ab"), slow.go, slow.began))
    assert len(slow.began) == 1
    assert compiler.stats().failed == 1
    slow.go.set()
    assert idle()
    assert compiler.compile(Slow(text("ab"), slow.go, slow.began)).start().forced(9) == TOKENIZER.encode_plain("ab")
    assert len(slow.began) == 1
    assert compiler.stats().pending == 0


def test_stuck_compiles_are_few(make: Callable[..., GrammarCompiler]) -> None:
    """While MAX_STUCK go on past their time, others are refused at once; afterwards all is well again."""
    compiler = make(timeout_seconds=0.05)
    go = threading.Event()
    for n in range(MAX_STUCK):
        with pytest.raises(InvalidConstraintError, match="took more than"):
            compiler.compile(Slow(text("a" * (n + 1)), go))
    with pytest.raises(InvalidConstraintError, match=f"{MAX_STUCK} constraints are still being compiled"):
        compiler.compile(Written(text("b")))
    go.set()
    assert idle()
    assert compiler.compile(Written(text("b"))).start().forced(9) == TOKENIZER.encode_plain("b")


def test_cancelling_concerns_nobody_else(make: Callable[..., GrammarCompiler]) -> None:
    """What nobody waits for doesn't begin; who gave up one that runs doesn't get it, and others do."""
    compiler = make()
    first, unwanted, shared = Slow(text("a")), Slow(text("b")), Slow(text("c"))
    running = compiler.submit(first)
    assert begun(first)
    dropped = compiler.submit(unwanted)
    mine, theirs = compiler.submit(shared), compiler.submit(shared)
    assert dropped.cancel()
    assert mine.cancel()
    assert running.cancel()
    for slow in (first, unwanted, shared):
        slow.go.set()
    assert isinstance(theirs.result(30), Grammar)
    assert idle()
    assert unwanted.began == []
    assert len(first.began) == len(shared.began) == 1
    for future in (dropped, mine, running):
        with pytest.raises(CancelledError):
            future.result(1)
    assert compiler.compile(unwanted) is compiler.compile(unwanted)


def test_the_least_recently_used_go_first(make: Callable[..., GrammarCompiler]) -> None:
    """Within the cap, by estimated bytes; what is larger than the cap is compiled each time."""
    texts = [Written(text(letter)) for letter in "abcd"]
    each = estimated_bytes(texts[0].text)
    compiler = make(memory_bytes=3 * each)
    first = [compiler.compile(constraint) for constraint in texts[:3]]
    assert compiler.compile(texts[0]) is first[0]
    compiler.compile(texts[3])
    stats = compiler.stats()
    assert (stats.cached, stats.cached_bytes, stats.evicted) == (3, 3 * each, 1)
    assert compiler.compile(texts[0]) is first[0]
    assert compiler.compile(texts[2]) is first[2]
    assert compiler.compile(texts[1]) is not first[1]
    none = make(memory_bytes=0)
    assert none.compile(texts[0]) is not none.compile(texts[0])
    assert none.stats().cached == 0


@pytest.mark.parametrize(
    ("grammar", "match"),
    [
        ("start: undefined\n", "undefined"),
        ("start: /a(/\n", "can't be compiled"),
        (LLMatcher.grammar_from_json_schema({"enum": []}), "can't be compiled"),
        ("start: X\nX: /a/ & /b/\n", "can't be compiled|no way on after 0 tokens"),
    ],
)
def test_what_can_not_be_compiled_says_why_and_is_remembered(
    make: Callable[..., GrammarCompiler], grammar: str, match: str
) -> None:
    compiler = make()
    errors = []
    for _ in range(2):
        with pytest.raises(InvalidConstraintError, match=match) as caught:
            compiler.compile(Written(grammar))
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    assert errors[0] is not errors[1]
    assert (compiler.stats().failed, compiler.stats().hits, compiler.stats().cached) == (1, 1, 0)


def test_a_refusal_holds_nothing_of_whom_it_was_told(make: Callable[..., GrammarCompiler]) -> None:
    """It is kept for the next one who asks; a traceback in it would keep the frames of all who were told."""
    compiler = make()
    told = []

    class Held:
        pass

    def ask() -> None:
        held = Held()
        told.append(weakref.ref(held))
        with pytest.raises(InvalidConstraintError):
            compiler.compile(Written("start: missing\n"))

    for _ in range(3):
        ask()
    assert compiler.stats().hits == 2
    deadline = time.monotonic() + 10
    while any(held() for held in told) and time.monotonic() < deadline:
        time.sleep(0.01)  # the compiling thread ends
        gc.collect()
    assert [held() for held in told] == [None] * 3


def test_a_check_that_fails_is_raised_by_submit(make: Callable[..., GrammarCompiler]) -> None:
    class Checked(Written):
        def check(self) -> None:
            raise InvalidConstraintError("no", keyword="not", path="#/not")

    with pytest.raises(InvalidConstraintError) as caught:
        make().submit(Checked(text("a")))
    assert (caught.value.keyword, caught.value.path) == ("not", "#/not")


def test_an_error_of_the_constraint_itself_reaches_who_waits(make: Callable[..., GrammarCompiler]) -> None:
    """A bug isn't taken for a bad constraint, isn't remembered, and ends no thread."""

    class Broken(Written):
        def grammar(self) -> str:
            raise ZeroDivisionError("a bug")

    compiler = make()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="a bug"):
            compiler.compile(Broken(text("a")))
    assert compiler.stats().failed == 2
    assert compiler.compile(Written(text("a")))


def test_closing_cancels_what_waits(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    slow = Slow(text("a"))
    running, waiting = compiler.submit(slow), compiler.submit(Written(text("b")))
    assert begun(slow)
    threading.Timer(0.05, slow.go.set).start()
    compiler.close()
    compiler.close()
    assert waiting.cancelled()
    assert isinstance(running.result(30), Grammar)
    assert compiler.stats().cached == 0
    with pytest.raises(InvalidConstraintError, match="was closed"):
        compiler.submit(Written(text("b")))
    assert idle()


def test_a_compiler_that_is_forgotten_leaves_nothing(make: Callable[..., GrammarCompiler]) -> None:
    del make
    compiler = GrammarCompiler(TOKENIZER)
    slow = Slow(text("a"))
    running, waiting = compiler.submit(slow), compiler.submit(Written(text("b")))
    assert begun(slow)
    threading.Timer(0.05, slow.go.set).start()
    del compiler
    gc.collect()
    assert isinstance(running.result(30), Grammar)
    assert waiting.cancelled()
    assert idle()


def test_a_grammar_outlives_its_compiler(make: Callable[..., GrammarCompiler]) -> None:
    grammar = make().compile(Written(text("ab")))
    gc.collect()
    assert mask_of(grammar.start()) == set(TOKENIZER.encode_plain("ab")[:1])


def test_preparing_builds_what_grammars_share(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    assert compiler.prepare().result(30) is None
    grammars = [compiler.compile(Written(text(letter))) for letter in "ab"]
    assert grammars[0].vocabulary is grammars[1].vocabulary


def test_a_megabyte_of_enum_values_compiles_while_others_wait_little(make: Callable[..., GrammarCompiler]) -> None:
    """5,000 values of 200 characters; each of some is possible, and forced once it is the only one left."""
    rng = random.Random(1)
    values = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz     ", k=200)) for _ in range(5000)]
    compiler = make()
    grammar = compiler.compile(Written(LLMatcher.grammar_from_json_schema({"enum": values})))
    for value in rng.sample(values, 3):
        state = grammar.start()
        ids = TOKENIZER.encode_plain(json.dumps(value))
        state.advance(ids[:20])
        assert state.forced(4) == ids[20:24]
        state.advance(ids[20:])
        assert state.complete
    assert 10 << 20 < grammar.n_bytes < 80 << 20


def test_what_is_too_large_is_refused(make: Callable[..., GrammarCompiler]) -> None:
    """1,500 optional properties are more ways to go on than a step may look at; 400 aren't."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {f"property {n}": {"type": "integer"} for n in range(1500)},
    }
    compiler = make(timeout_seconds=60)
    with pytest.raises(InvalidConstraintError, match=r"costs more than the limits allow.*items; max is 2000"):
        compiler.compile(Written(compact(schema)))
    schema["properties"] = {f"property {n}": {"type": "integer"} for n in range(400)}
    state = compiler.compile(Written(compact(schema))).start()
    state.advance(TOKENIZER.encode_plain('{"property 17":1,"property 399":2'))
    assert mask_of(state)


def compact(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


@pytest.mark.parametrize("settings", [{"memory_bytes": -1}, {"timeout_seconds": 0}, {"timeout_seconds": float("nan")}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        GrammarCompiler(TOKENIZER, **settings)


def test_no_thread_keeps_the_interpreter_alive() -> None:
    """Whatever it is doing when the program ends."""
    program = """
import sys, threading
sys.path[:0] = {path!r}
from forerun.constrain.compiler import GrammarCompiler
from reference.grammars import Written, rich_tokenizer
class Endless(Written):
    def grammar(self):
        began.set()
        threading.Event().wait()
began = threading.Event()
compiler = GrammarCompiler(rich_tokenizer())
compiler.submit(Endless('start: "a"'))
began.wait()
print("done")
"""
    start = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", program.format(path=sys.path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
    assert time.monotonic() - start < 60


def test_a_future_waits_for_its_own_grammar_only(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    slow = Slow(text("a"))
    future: Future[Grammar] = compiler.submit(slow)
    with pytest.raises(FutureTimeoutError):
        future.result(0.05)
    slow.go.set()
    assert future.result(30)


@dataclass(frozen=True, eq=False)
class Checked(Written):
    """Counts its checks, and by which threads; wrong if it says so."""

    checked: list[str] = field(default_factory=list)

    def check(self) -> None:
        self.checked.append(threading.current_thread().name)
        if "wrong" in self.text:
            raise InvalidConstraintError("no", keyword="not", path="#/not")


def test_a_large_constraint_is_checked_in_the_background(make: Callable[..., GrammarCompiler]) -> None:
    """What is wrong with it arrives through the future, and is remembered."""
    compiler = make()
    large = Checked(text("a") + "// wrong\n" + "//\n" * LARGE)
    for _ in range(2):
        future = compiler.submit(large)
        error = future.exception(30)
        assert isinstance(error, InvalidConstraintError)
        assert (error.keyword, error.path) == ("not", "#/not")
    assert large.checked == ["forerun-grammar"]
    right = Checked(text("a") + "//\n" * LARGE)
    assert compiler.compile(right)
    assert right.checked == ["forerun-grammar"]


def test_what_is_in_the_cache_is_not_checked_again(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    constraint = Checked(text("a"))
    assert compiler.compile(constraint) is compiler.compile(constraint)
    assert constraint.checked == [threading.current_thread().name]
    none = make(memory_bytes=0)
    none.compile(constraint)
    none.compile(constraint)
    assert len(constraint.checked) == 3


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="the system has no clocks of threads")
def test_a_compile_that_only_waits_is_given_more_time(make: Callable[..., GrammarCompiler]) -> None:
    """Its time is the processor's; by the clock it may take six times as long."""

    class Sleeps(Written):
        def grammar(self) -> str:
            time.sleep(0.9)
            return self.text

    compiler = make(timeout_seconds=0.4)
    assert compiler.compile(Sleeps(text("a"))).compile_seconds > 0.8


def test_a_panic_reaches_who_waits(make: Callable[..., GrammarCompiler]) -> None:
    """Native code reports one by what isn't an Exception."""

    class PanicError(BaseException):
        pass

    class Panics(Written):
        def grammar(self) -> str:
            raise PanicError("assertion failed")

    compiler = make()
    interval = sys.getswitchinterval()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="compiling the constraint failed: PanicError: assertion failed"):
            compiler.submit(Panics(text("a"))).result(30)
    assert compiler.stats().pending == 0
    assert idle()
    assert sys.getswitchinterval() == interval
