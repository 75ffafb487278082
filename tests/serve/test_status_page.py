"""The status page: what it may load, what it is fed, and what it does in a browser."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from forerun import Engine, SamplingParams
from forerun.draft.base import MAX_NODES
from forerun.serve.app import Settings
from forerun.serve.run import ServeOptions
from forerun.serve.status import PAGE_FILES, SECONDS, History, moment_of, page
from reference.browser import CHROMIUM, DRIVER, MISSING, Browser
from reference.live_server import LiveServer

REPEATED = "abcabcabcabcabcabcabc"
NOTHING = "\N{EN DASH}"
"""What a tile shows without data."""


def complete(server: LiveServer, **fields: object) -> httpx.Response:
    body = {"prompt": REPEATED, "max_tokens": 30, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("path", PAGE_FILES)
def test_the_page_needs_nothing_else(server: LiveServer, path: str) -> None:
    answer = httpx.get(server.url + path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(PAGE_FILES[path][1])
    # The only address is the name of SVG's elements, which nobody loads.
    assert set(re.findall(r"\w+://[^\s\"')]*", answer.text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", answer.text)
    for linked in re.findall(r'(?:href|src)="([^"]*)"', answer.text):
        assert linked == "data:," or httpx.get(f"{server.url}/{linked}").status_code == 200, linked
    assert len(answer.content) < 32_000


def test_the_policy_allows_the_server_alone(server: LiveServer) -> None:
    policy = httpx.get(server.url + "/").headers["content-security-policy"]
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed.pop("default-src") == "'none'"
    assert allowed.pop("img-src") == "data:"
    assert set(allowed.values()) == {"'self'", "'none'"}
    assert {name for name, value in allowed.items() if value == "'self'"} == {"script-src", "style-src", "connect-src"}
    html = page("/")[0]
    assert not re.search(r"<style|\sstyle=|\son\w+=", html)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", html))


def test_the_page_is_packaged() -> None:
    """Beside the module, where the wheel takes everything from."""
    folder = Path(__file__).parents[2] / "src" / "forerun" / "serve"
    for name, _ in PAGE_FILES.values():
        assert (folder / name).is_file()
    assert 'wheel.packages = ["src/forerun"]' in (folder.parents[2] / "pyproject.toml").read_text()


def test_status_is_what_the_engine_did(served: Path) -> None:
    engine = Engine(served, kv_tokens=2048, threads=1, cache_weights=False, draft_len=4, max_rows=8)
    with LiveServer(engine) as server:
        for _ in range(2):
            assert complete(server).status_code == 200
        server.check_idle()
        status = httpx.get(server.url + "/status.json").json()
        stats = engine.stats()
        assert {key: status[key] for key in ("model", "running", "waiting", "kv_used", "accepting")} == {
            "model": "tiny", "running": 0, "waiting": 0, "kv_used": 0, "accepting": True,
        }  # fmt: skip
        assert status["kv_blocks"] * status["block_tokens"] == 2048
        assert status["max_rows"] == 8
        seconds = status["seconds"]
        counts = stats.speculation
        for name in ("decisions", "drafted", "proposed", "accepted", "emitted", "computed"):
            assert sum(second[name] for second in seconds) == getattr(counts, name), name
        assert counts.accepted > 0
        assert sum(second["steps"] for second in seconds) == stats.steps
        for name in ("accepted_by_position", "drafted_by_length"):
            assert all(len(second[name]) <= MAX_NODES for second in seconds)
            lists = [second[name] for second in seconds]
            total = [sum(one[i] for one in lists if i < len(one)) for i in range(max(map(len, lists)))]
            assert tuple(total) == getattr(counts, name)
        for phase in ("draft", "forward", "verify", "schedule"):
            spent = sum(second["phase_seconds"][phase] for second in seconds)
            assert spent == pytest.approx(getattr(counts, f"{phase}_seconds"), abs=1e-4)
        assert max(second["running"] for second in seconds) == 1
        assert max(second["kv_used"] for second in seconds) > 0
        assert httpx.get(server.url + f"/status.json?since={seconds[-1]['t']}").json()["seconds"] == []
        assert httpx.get(server.url + "/status.json?since=x").status_code == 400


def test_the_history_is_bounded(served: Path) -> None:
    engine = Engine(served, kv_tokens=1024, threads=1, cache_weights=False, draft="none")
    history = History(moment_of(engine))
    one = 2  # steps of a request with two tokens
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for step in range(1, 5 * SECONDS):
        engine.generate([[1, 2, 3]], params)
        history.add(moment_of(engine)._replace(running=step % 3), now=1000 + step / 2)
    now = 1000 + (5 * SECONDS - 1) / 2
    seconds = history.seconds(0, now=now)
    assert len(seconds) <= SECONDS
    assert [second["t"] for second in seconds] == list(range(int(now) - SECONDS + 1, int(now) + 1))
    assert len(history._closed) <= SECONDS + 1
    assert {second["steps"] for second in seconds} == {2 * one}
    assert {second["running"] for second in seconds} == {1, 2}  # the most of each
    assert [second["t"] for second in history.seconds(int(now) - 2, now=now)] == [int(now) - 1, int(now)]
    assert history.seconds(0, now=now + 10 * SECONDS) == []
    # A clock that is set back neither loses nor repeats a step.
    engine.generate([[1, 2, 3]], params)
    history.add(moment_of(engine), now=now - 50)
    after = history.seconds(0, now=now)
    assert [second["t"] for second in after] == [second["t"] for second in seconds]
    assert sum(s["steps"] for s in after) == sum(s["steps"] for s in seconds) + one


def chunks(answer: httpx.Response) -> list[dict[str, object]]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_tell_where_tokens_came_from_when_asked(server: LiveServer, path: str) -> None:
    chat = {"messages": [{"role": "user", "content": REPEATED}]}
    body = {
        **(chat if "chat" in path else {"prompt": REPEATED}), "max_tokens": 60, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    for _ in range(2):  # the second time the drafter knows the text
        answer = httpx.post(server.url + path, json={**body, "show_drafts": True}, timeout=60)
    spans = []
    text = ""
    for chunk in chunks(answer):
        for choice in chunk["choices"]:
            added = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            text += added
            if "drafts" in choice:
                assert "".join(span["text"] for span in choice["drafts"]) == added
                spans += choice["drafts"]
            else:
                assert not added
    assert "".join(span["text"] for span in spans) == text
    assert {span["origin"] for span in spans} <= {"target", "accepted", "correction", "bonus"}
    accepted = chunks(answer)[-1]["usage"]["speculation"]["accepted"]
    assert accepted > 0
    assert any(span["origin"] == "accepted" for span in spans)
    plain = httpx.post(server.url + path, json=body, timeout=60)
    assert "drafts" not in plain.text
    whole = httpx.post(server.url + path, json={**body, "stream": None, "stream_options": None, "show_drafts": True})
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, "show_drafts")


def test_of_tool_calls_they_tell_the_text_itself(server: LiveServer) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    body = {
        "messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required", "max_tokens": 100,
        "stream": True, "show_drafts": True, "temperature": 0, "parallel_tool_calls": False,
    }  # fmt: skip
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    choices = [choice for chunk in chunks(answer) for choice in chunk["choices"]]
    text = "".join(span["text"] for choice in choices for span in choice.get("drafts", []))
    assert text.strip().startswith("<tool_call>")
    assert text.strip().endswith("</tool_call>")
    assert not any(choice["delta"].get("content") for choice in choices)
    # The grammar forces nearly all of it: forced text is a draft.
    assert any(span["origin"] == "accepted" for choice in choices for span in choice.get("drafts", []))


needs_browser = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


def quiet(browser: Browser) -> None:
    """No script failed and nothing was refused; a server that is away or says no is in the console, too."""
    wrong = [line for line in browser.log() if "ERR_CONNECTION" not in line and "401" not in line and "400" not in line]
    assert wrong == []


@needs_browser
def test_charts_follow_the_traffic(server: LiveServer, browser: Browser) -> None:
    stop = threading.Event()

    def traffic() -> None:
        while not stop.wait(0.05):
            complete(server)

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        browser.open(server.url + "/")
        browser.wait(lambda: browser.text("#state") == "live", "live")
        browser.wait(lambda: float(browser.text("#tile-rate").replace(NOTHING, "0").replace(",", "")) > 0, "a rate")
        browser.wait(lambda: browser.text("#tile-acceptance") != NOTHING, "an acceptance")
    finally:
        stop.set()
        thread.join()
    assert browser.text("#model") == "tiny"
    for chart in ("rate", "acceptance", "length", "step", "queue", "kv"):
        role, name = browser.role(f"#chart-{chart}")
        assert role in ("img", "image")
        assert len(name) > 5
        shapes = browser.run(f"return document.querySelectorAll('#chart-{chart} :is(rect, polyline, polygon)').length")
        assert shapes > 0, chart
    assert browser.text("#tile-gain") != NOTHING
    assert browser.text("#tile-step").endswith(" ms")
    quiet(browser)


@needs_browser
def test_the_box_colours_tokens_and_escapes_text(server: LiveServer, browser: Browser) -> None:
    browser.open(server.url + "/")
    assert browser.role("#prompt") == ("textbox", "Prompt Ctrl+Enter sends")
    for field in ("#kind", "#max-tokens", "#temperature", "#speculate", "#send", "#stop"):
        assert browser.role(field)[1], field
    browser.run("document.getElementById('kind').value = 'text'")
    browser.fill("#max-tokens", "40")
    for _ in range(2):
        browser.fill("#prompt", REPEATED)
        browser.run("document.getElementById('summary').textContent = ''")
        browser.type("#prompt", "\ue009\ue007")  # Ctrl+Enter
        browser.wait(lambda: browser.run("return running === null"), "an answer")
    assert " tokens in " in browser.text("#summary")
    expected = complete(server, max_tokens=40, ignore_eos=False).json()
    assert browser.text("#answer") == expected["choices"][0]["text"]
    origins = browser.run("return [...document.querySelectorAll('#answer span')].map((span) => span.className)")
    assert "accepted" in origins
    assert set(origins) <= {"target", "accepted", "correction", "bonus"}
    shown = browser.run("return getComputedStyle(document.querySelector('#answer .accepted')).borderBottomStyle")
    assert shown == "solid"
    # Whatever a model writes stays text.
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    browser.run("show([{ text: arguments[0], origin: 'target' }]); flush()", text)
    assert browser.text("#answer").endswith(text)
    assert browser.run("return document.querySelectorAll('#answer :not(span)').length") == 0
    quiet(browser)


@needs_browser
def test_stop_ends_the_request(server: LiveServer, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.run("document.getElementById('kind').value = 'text'")
    browser.fill("#max-tokens", "1900")
    browser.run("const asked = body; body = () => { const [p, b] = asked(); return [p, { ...b, ignore_eos: true }]; }")
    browser.click("#send")
    browser.wait(lambda: browser.text("#summary") == "answering", "a beginning")
    assert browser.run("return document.getElementById('send').disabled")
    browser.click("#stop")
    browser.wait(lambda: browser.text("#summary") == "stopped", "an end")
    server.check_idle()
    browser.fill("#max-tokens", "99999")
    browser.run("document.getElementById('prompt').value = 'x'.repeat(3000)")
    browser.click("#send")
    browser.wait(lambda: browser.run("return document.getElementById('summary').className") == "error", "an error")
    assert "tokens" in browser.text("#summary")
    quiet(browser)


@needs_browser
def test_nothing_else_may_be_loaded(server: LiveServer, browser: Browser) -> None:
    """The policy, as the browser sees it: a script of the page's own kind is refused, and so are other hosts."""
    browser.open(server.url + "/")
    browser.log()
    browser.run("const s = document.createElement('script'); s.textContent = 'window.bad = 1'; document.body.append(s)")
    browser.run("fetch('http://127.0.0.1:1/').catch(() => {})")
    assert browser.run("return window.bad === undefined")
    refused = browser.wait(lambda: [line for line in browser.log() if "Content Security Policy" in line], "a refusal")
    assert refused


@needs_browser
def test_a_key_is_asked_for_and_a_server_may_go_and_come_back(served: Path, browser: Browser) -> None:
    def engine() -> Engine:
        return Engine(served, kv_tokens=2048, threads=1, cache_weights=False, draft_len=4)

    options = ServeOptions(names=("tiny",), settings=Settings(api_keys=("secret",)))
    with LiveServer(engine(), options) as server:
        port = server.port
        browser.open(server.url + "/")
        browser.wait(lambda: browser.text("#state") == "live", "charts without a key")
        assert browser.run("return document.getElementById('key-row').hidden")
        browser.click("#send")
        browser.wait(lambda: not browser.run("return document.getElementById('key-row').hidden"), "the question")
        assert "API key" in browser.text("#summary")
        assert browser.run("return document.activeElement.id") == "key"
        browser.type("#key", "secret")
        browser.click("#send")
        browser.wait(lambda: " tokens in " in browser.text("#summary"), "an answer")
        kept = "return [document.cookie, localStorage.length, sessionStorage.length, location.href]"
        assert browser.run(kept) == ["", 0, 0, server.url + "/"]
    browser.wait(lambda: browser.run("return document.getElementById('state').dataset.state") == "gone", "it is gone")
    assert browser.run("return document.body.className") == "gone"
    with LiveServer(engine(), options, port=port):
        browser.wait(lambda: browser.text("#state") == "live", "it is back")
        assert browser.run("return document.body.className") == ""
    quiet(browser)


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, True)])
def test_it_fits_and_can_be_read(server: LiveServer, browser: Browser, width: int, dark: bool) -> None:
    """No sideways scrolling, and contrasts of at least 4.5 (WCAG AA) in both schemes."""
    browser.emulate(width, dark=dark)
    browser.open(server.url + "/")
    browser.wait(lambda: browser.text("#state") == "live", "live")
    origins = ["target", "accepted", "correction", "bonus"]
    browser.run("show(arguments[0].map((origin) => ({ text: origin, origin }))); flush()", origins)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    low = browser.run(CONTRASTS)
    assert low == []
    scheme = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", scheme))) < 300) == dark
    browser.emulate(1280, dark=False)


CONTRASTS = """
const luminance = (rgb) => rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const colour = parts(getComputedStyle(node).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour.slice(0, 3);
  }
  return [255, 255, 255];
};
const found = [];
for (const node of document.querySelectorAll("body *")) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (!own || !node.getClientRects().length || node.disabled) continue;
  if (node.classList.contains("inside")) continue;  // on a bar
  const style = getComputedStyle(node);
  const ink = node.namespaceURI.includes("svg") ? style.fill : style.color;
  const [a, b] = [luminance(parts(ink)), luminance(ground(node))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5) found.push(`${node.tagName} ${node.textContent.slice(0, 20)}: ${contrast.toFixed(2)}`);
}
return found;
"""
