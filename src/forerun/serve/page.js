"use strict";

// Charts of /status.json, and a box that asks the server and shows where each token came from.

const WINDOW = 60; // seconds that tiles and bars look back
const PHASES = ["draft", "forward", "verify", "schedule"];
const LENGTHS = [[0, 0], [1, 1], [2, 2], [3, 3], [4, 4], [5, 8], [9, 16], [17, 63]];
const SVG = "http://www.w3.org/2000/svg";

const $ = (id) => document.getElementById(id);
const seconds = new Map(); // by time: what was done in that second
let server = null; // the last answer
let shown = 180;

function number(value, digits = 3) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function percent(value) {
  return value === null ? "–" : `${Math.round(100 * value)}%`;
}

function sum(rows, pick) {
  return rows.reduce((total, row) => total + pick(row), 0);
}

function ratio(over, under) {
  return under ? over / under : null;
}

// --- charts

function make(parent, tag, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

function ceiling(value, whole) {
  if (whole && value <= 2) return 2; // half of it is marked, too
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 10].find((step) => step * unit >= value) * unit;
}

function frame(svg, top, format) {
  const width = svg.clientWidth || 320;
  const height = svg.clientHeight || 160;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const box = { left: 40, right: width - 6, top: 8, bottom: height - 20 };
  for (const share of [0, 0.5, 1]) {
    const y = box.bottom - share * (box.bottom - box.top);
    make(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y });
    make(svg, "text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, format(share * top));
  }
  return box;
}

function stretches(values) {
  const found = [];
  let open = null;
  values.forEach((value, i) => {
    if (value === null) {
      open = null;
    } else {
      if (open === null) found.push((open = []));
      open.push(i);
    }
  });
  return found;
}

// Each series is a list of one value a second, null where there is none; stacked ones lie on each other.
function timeChart(svg, series, { stacked = false, whole = false, top = null, format = number, label }) {
  const n = series[0].length;
  let low = new Array(n).fill(0);
  const layers = series.map((values) => {
    const high = values.map((value, i) => (value === null ? null : value + (stacked ? low[i] : 0)));
    const layer = { low, high };
    if (stacked) low = high.map((value) => value ?? 0);
    return layer;
  });
  const most = Math.max(0, ...layers.flatMap((layer) => layer.high.map((value) => value ?? 0)));
  const limit = top ?? ceiling(most, whole);
  const box = frame(svg, limit, format);
  const x = (i) => box.left + ((box.right - box.left) * (i + 0.5)) / n;
  const y = (value) => box.bottom - ((box.bottom - box.top) * Math.min(value, limit)) / limit;
  const half = (box.right - box.left) / n / 2;
  layers.forEach(({ low: floor, high }, which) => {
    const group = make(svg, "g", { class: `s${which}` });
    for (const run of stretches(high)) {
      const edge = (values) => run.map((i) => [x(i), y(values[i])]);
      const over = [[x(run[0]) - half, y(high[run[0]])], ...edge(high), [x(run.at(-1)) + half, y(high[run.at(-1)])]];
      const under = [[x(run[0]) - half, y(floor[run[0]])], ...edge(floor), [x(run.at(-1)) + half, y(floor[run.at(-1)])]];
      const path = (points) => points.map((point) => point.map((v) => v.toFixed(1)).join(",")).join(" ");
      if (stacked || which === 0) {
        make(group, "polygon", { class: stacked ? "area" : "under", points: path([...over, ...under.reverse()]) });
      }
      if (!stacked) make(group, "polyline", { class: "line", points: path(over) });
    }
  });
  make(svg, "text", { x: box.left, y: box.bottom + 16 }, `${Math.round(n / 60)} min ago`);
  make(svg, "text", { x: box.right, y: box.bottom + 16, "text-anchor": "end" }, "now");
  svg.setAttribute("aria-label", `${label}, most ${format(most)}`);
}

function barChart(svg, bars, { label, empty }) {
  const box = frame(svg, 1, percent);
  if (!bars.length) {
    const middle = { x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2 - 8, "text-anchor": "middle" };
    make(svg, "text", { class: "empty", ...middle }, empty);
    svg.setAttribute("aria-label", `${label}: ${empty}`);
    return;
  }
  const group = make(svg, "g", { class: "s0" });
  const pitch = (box.right - box.left) / Math.max(bars.length, 4);
  bars.forEach(({ name, value }, i) => {
    const height = (box.bottom - box.top) * value;
    const x = box.left + i * pitch;
    make(group, "rect", { class: "bar", x: x + pitch * 0.12, y: box.bottom - height, width: pitch * 0.76, height });
    make(svg, "text", { x: x + pitch / 2, y: box.bottom + 16, "text-anchor": "middle" }, name);
    if (pitch < 26) return;
    const inside = height > box.bottom - box.top - 14;
    const y = inside ? box.bottom - height + 13 : box.bottom - height - 3;
    const text = make(svg, "text", { x: x + pitch / 2, y, "text-anchor": "middle" }, percent(value));
    if (inside) text.setAttribute("class", "inside");
  });
  svg.setAttribute("aria-label", `${label}: ${bars.map((bar) => `${bar.name}: ${percent(bar.value)}`).join(", ")}`);
}

function added(rows, name) {
  const total = [];
  for (const row of rows) row[name].forEach((count, i) => (total[i] = (total[i] ?? 0) + count));
  return total;
}

function lengthBars(rows) {
  const decisions = sum(rows, (row) => row.decisions);
  if (!decisions) return [];
  const counts = [decisions - sum(rows, (row) => row.drafted), ...added(rows, "drafted_by_length")];
  return LENGTHS.map(([from, to]) => ({
    name: from === to ? String(from) : to === 63 ? `${from}+` : `${from}–${to}`,
    value: counts.slice(from, to + 1).reduce((total, count) => total + count, 0) / decisions,
  }));
}

function draw() {
  if (server === null) return;
  const end = Math.floor(server.now); // the second that runs isn't shown: it isn't over
  const times = Array.from({ length: shown }, (_, i) => end - shown + i);
  const series = (pick, idle = 0) => times.map((t) => (seconds.has(t) ? pick(seconds.get(t)) : idle));
  const recent = [...seconds.values()].filter((row) => row.t >= end - WINDOW && row.t < end);
  const drafted = sum(recent, (row) => row.drafted);
  const lastSteps = sum(recent, (row) => row.steps);
  const busy = recent.length;
  const stepSeconds = (row) => PHASES.reduce((total, phase) => total + row.phase_seconds[phase], 0);

  $("tile-rate").textContent = number(ratio(sum(recent, (row) => row.emitted), busy));
  $("tile-acceptance").textContent = percent(ratio(sum(recent, (r) => r.accepted), sum(recent, (r) => r.proposed)));
  $("tile-gain").textContent = number(ratio(sum(recent, (row) => row.emitted), sum(recent, (row) => row.decisions)));
  const mean = ratio(sum(recent, stepSeconds), lastSteps);
  $("tile-step").textContent = mean === null ? "–" : `${number(1000 * mean)} ms`;
  $("tile-queue").textContent = `${server.running} / ${server.waiting}`;
  $("tile-kv").textContent = percent(server.kv_used / server.kv_blocks);

  timeChart($("chart-rate"), [series((row) => row.emitted)], { label: "Tokens per second" });
  const positions = added(recent, "accepted_by_position").slice(0, 16);
  barChart($("chart-acceptance"), positions.map((count, i) => ({ name: String(i + 1), value: count / drafted })), {
    label: "Acceptance by position", empty: `no drafts in the last ${WINDOW} s`,
  });
  barChart($("chart-length"), lengthBars(recent), { label: "Draft length", empty: `no steps in the last ${WINDOW} s` });
  const phases = PHASES.map((phase) => series((row) => (1000 * row.phase_seconds[phase]) / (row.steps || 1), null));
  PHASES.forEach((phase, i) => {
    const spent = ratio(sum(recent, (row) => row.phase_seconds[phase]), lastSteps);
    $("legend-step").children[i].textContent = spent === null ? phase : `${phase} ${number(1000 * spent, 2)}`;
  });
  timeChart($("chart-step"), phases, { stacked: true, label: "Milliseconds of a step by phase" });
  timeChart($("chart-queue"), [series((row) => row.running), series((row) => row.waiting)], {
    whole: true, label: "Running and waiting requests",
  });
  timeChart($("chart-kv"), [series((row) => row.kv_used / server.kv_blocks)], {
    top: 1, format: percent, label: "KV used",
  });
}

function legend(id, names) {
  names.forEach((name, i) => {
    const key = document.createElement("span");
    key.className = `key s${i}`;
    key.textContent = name;
    $(id).append(key);
  });
}

// --- the server's state, once a second

function tell(state, text) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").dataset.state = state;
  document.body.classList.toggle("gone", state === "gone");
}

async function ask() {
  const newest = Math.max(0, ...seconds.keys());
  // The newest second may not have been over: it is asked for again.
  const answer = await fetch(`status.json?since=${Math.max(0, newest - 1)}`, { signal: AbortSignal.timeout(5000) });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  server = await answer.json();
  shown = server.history_seconds;
  for (const row of server.seconds) seconds.set(row.t, row);
  for (const t of seconds.keys()) if (t < server.now - shown - 1) seconds.delete(t);
  $("model").textContent = server.model;
  $("version").textContent = `Forerun ${server.version}`;
  $("kv-tokens").textContent = (server.kv_blocks * server.block_tokens).toLocaleString("en");
  document.title = `${server.model} – Forerun`;
  if (server.accepting) tell("live", "live");
  else tell("gone", "shutting down");
}

async function poll() {
  let pause = 1000;
  try {
    if (!document.hidden) {
      await ask();
      draw();
    }
  } catch {
    tell("gone", "no answer from the server; trying again");
    pause = 2000;
  }
  setTimeout(poll, pause);
}

// --- the box

let running = null; // the AbortController of the request that runs

function say(text, error = false) {
  if ($("summary").textContent !== text) $("summary").textContent = text;
  $("summary").classList.toggle("error", error);
}

function body() {
  const chat = $("kind").value === "chat";
  const prompt = $("prompt").value;
  return [chat ? "v1/chat/completions" : "v1/completions", {
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    speculate: $("speculate").checked,
    show_drafts: true,
    stream: true,
    stream_options: { include_usage: true },
  }];
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the stream ended early");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

let unseen = []; // stretches of the answer that aren't in the page yet
let due = 0;

function show(drafts) {
  unseen.push(...drafts);
  due ||= requestAnimationFrame(flush); // not for each event: a quick model has hundreds a second
}

function flush() {
  cancelAnimationFrame(due);
  due = 0;
  const box = $("answer");
  const follow = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
  const added = document.createDocumentFragment();
  for (const { text, origin } of unseen) {
    const span = document.createElement("span");
    span.className = origin;
    span.title = origin === "accepted" ? "accepted draft" : origin;
    span.textContent = text;
    added.append(span);
  }
  unseen = [];
  box.append(added);
  if (follow) box.scrollTop = box.scrollHeight;
}

function told(usage, reason, began) {
  const { emitted, decisions, accepted, proposed } = usage.speculation;
  const time = (performance.now() - began) / 1000;
  const drafts = proposed ? `${accepted} of ${proposed} draft tokens accepted` : "no drafts";
  return `${emitted} tokens in ${decisions} steps, ${drafts}; ${number(emitted / time)} tokens/s (${reason})`;
}

async function send() {
  const [path, request] = body();
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  $("answer").replaceChildren();
  say("waiting for the first token");
  const began = performance.now();
  const answer = await fetch(path, {
    method: "POST", headers, body: JSON.stringify(request), signal: running.signal, cache: "no-store",
  });
  if (!answer.ok) {
    const { error } = await answer.json();
    if (answer.status === 401) {
      $("key-row").hidden = false;
      $("key").focus();
    }
    throw new Error(error.message);
  }
  let reason = "";
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) {
      if (choice.drafts) show(choice.drafts);
      reason = choice.finish_reason ?? reason;
    }
    if (event.usage) say(told(event.usage, reason, began));
    else say("answering");
  }
}

async function submit(event) {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  try {
    await send();
  } catch (error) {
    if (error.name === "AbortError") say("stopped");
    else say(error.message === "Failed to fetch" ? "no answer from the server" : error.message, true);
  } finally {
    flush();
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}

legend("legend-step", PHASES);
legend("legend-queue", ["running", "waiting"]);
for (const node of document.querySelectorAll(".window")) node.textContent = WINDOW;
$("form").addEventListener("submit", submit);
$("stop").addEventListener("click", () => running?.abort());
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
addEventListener("resize", draw);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) draw();
});
poll();
