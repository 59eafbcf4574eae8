// The page: listens to dashboard/live and shows what it says.
import { Charts } from "./charts.js";
import { $, bytes, clock, duration, el, figure, fill, percent, row, say, whole } from "./dom.js";
import { Playground } from "./playground.js";
import { Versions } from "./versions.js";

const NUM_EVENTS = 9;
const IDLE_SECONDS = 10;
const THEMES = ["auto", "light", "dark"];
const PHASES = {
  loading: "loading the model",
  ready: "ready",
  draining: "ending",
  failed: "failed to start",
  disconnected: "not connected; trying again",
};

const charts = new Charts();
const playground = new Playground();
const versions = new Versions();
const page = { points: [], marks: [], details: null, now: null };

// --- what the server sends ---------------------------------------------------------------------------------------------

const source = new EventSource("dashboard/live");
const on = (name, take) => source.addEventListener(name, (event) => take(JSON.parse(event.data)));
source.onerror = () => showPhase("disconnected");
on("history", (points) => {
  page.points = points;
  draw();
});
on("details", (details) => {
  page.details = details;
  page.marks = details.marks;
  playground.follow(details);
  versions.follow(details);
  showDetails(details);
});
on("now", (now) => {
  page.now = now;
  if (now.point) page.points.push(now.point);
  showPhase(now.phase);
  if (now.requests) showNow(now);
  draw();
});

function draw() {
  if (document.hidden || !page.now) return;
  const isEmpty = !page.points.some((point) => point.num_tokens);
  $("empty").hidden = !isEmpty || page.now.phase !== "ready";
  $("acceptance-card").hidden = $("curves").hidden = isEmpty;
  if (!isEmpty) charts.draw(page.points, page.marks, page.now.time);
}
document.addEventListener("visibilitychange", draw);

// --- parts of the page -------------------------------------------------------------------------------------------------

function showPhase(phase) {
  $("phase").dataset.phase = phase;
  say("phase-text", PHASES[phase] ?? phase);
}

function showNow({ recent, requests, drafts, draft_version: version, time }) {
  const isIdle = !requests.running && !requests.waiting && (!recent || time - recent.ended_at > IDLE_SECONDS);
  document.body.classList.toggle("idle", isIdle);
  say("acceptance", percent(recent?.acceptance_rate));
  say("length", figure(recent?.mean_acceptance_length));
  say("speed", whole(recent?.tokens_per_second));
  say("speed-note", isIdle && recent ? `idle for ${duration(time - recent.ended_at)}` : "while there is work");
  say("speedup", recent?.estimated_speedup == null ? "–" : `${figure(recent.estimated_speedup)} ×`);
  say("draft", version);
  $("draft").title = version;
  const second = drafts.find((one) => one.is_second && one.route === "default");
  say("draft-note", second ? `compared with ${second.version}` : "");
  showPositions(drafts);
  showRequests(requests);
}

function showPositions(drafts) {
  const rounded = drafts.map((one) => ({ ...one, shares: one.acceptance_by_position.map((share) => Math.round(100 * share)) }));
  const key = rounded.map(({ route, version, k, reason, shares }) => [route, version, k, reason, shares]);
  fill($("positions"), key, () =>
    rounded.length
      ? [...rounded.map(lengthOf), positions(rounded.find((one) => !one.is_second) ?? rounded[0])]
      : [el("p", { class: "muted" }, "No draft is in service: every pass gives one token, or what earlier text suggests.")],
  );
}

function lengthOf(draft) {
  const length = el("strong", {}, `${draft.k} ${draft.k === 1 ? "token" : "tokens"} a round`);
  const route = draft.route === "default" ? "" : `route ${draft.route}: `;
  const second = draft.is_second ? `${draft.version}, to compare with: ` : "";
  return el("p", { class: "reason" }, route + second, length, `: ${draft.reason}.`);
}

function positions(draft) {
  const rows = draft.shares.map((share, index) => {
    const bar = el("span");
    bar.style.inlineSize = `${share}%`;
    return el(
      "tr",
      { class: index < draft.k ? "used" : null },
      el("th", { scope: "row" }, String(index + 1)),
      el("td", {}, el("span", { class: "bar", "aria-hidden": "true" }, bar)),
      el("td", {}, percent(share / 100)),
    );
  });
  const head = el("thead", { class: "unseen" }, el("tr", {}, ...["Position", "Picture", "Accepted"].map((name) => el("th", { scope: "col" }, name))));
  const caption = el("caption", {}, "Accepted, once reached, by drafted position");
  return el("table", { class: "positions" }, caption, head, el("tbody", {}, ...rows));
}

function showRequests(requests) {
  const items = [
    ["Running", `${requests.running} of ${requests.slots}`],
    ["Waiting", whole(requests.waiting)],
    ["Cache in use", percent(requests.kv_cache_usage)],
    ["Finished", whole(requests.finished) + (requests.failed ? `, ${requests.failed} failed` : "")],
  ];
  fill($("requests"), items, () => items.flatMap(([term, value]) => row(term, value)));
  for (const [id, seen] of [["ttft", requests.time_to_first_token], ["itl", requests.inter_token_latency]]) {
    ["p50", "p95", "p99"].forEach((name, index) => say($(id).cells[index + 1], duration(seen?.[name])));
  }
}

function showDetails(details) {
  say("model", details.model);
  say("server", details.server);
  document.title = `${details.model} · livedraft`;
  const url = location.origin;
  say("empty-chat", `livedraft chat --url ${url}`);
  say(
    "empty-curl",
    `curl ${url}/v1/chat/completions -H 'Content-Type: application/json'${details.needs_api_key ? " -H 'Authorization: Bearer KEY'" : ""} ` +
      `-d '{"model": "${details.model}", "messages": [{"role": "user", "content": "Name three rivers."}]}'`,
  );
  showTraining(details.learning, details.keeps_state);
  const events = details.events.slice(-NUM_EVENTS).reverse();
  fill($("events"), events, () => events.map((one) => el("li", {}, el("time", { datetime: new Date(1000 * one.time).toISOString() }, clock(one.time)), one.sentence)));
  say("events-note", events.length ? "" : details.keeps_state ? "Nothing yet." : "Events are kept where there is a state folder; this server has none.");
}

function showTraining(learning, keepsState) {
  const isOn = Boolean(learning.enabled);
  const state = !isOn ? "off" : learning.paused ? "paused" : !learning.trainer_up ? "down" : learning.status ?? "starting";
  say("learning", { "waiting for traces": "waiting" }[state] ?? state);
  $("learning").title = state;
  say("learning-note", isOn ? `${whole(learning.num_trained ?? 0)} requests learnt from` : "nothing is stored");
  const how = keepsState ? "" : " Its state folder is where drafts and traces would be kept.";
  const notes = {
    off: `Learning is off. Start the server without --no-learn, or with --learn on.${how}`,
    paused: "Training is paused; go on with: livedraft learn resume",
    down: "The training process has ended; serving goes on and starts it again.",
  };
  say("training-note", notes[state] ?? "");
  $("training-note").hidden = !notes[state];
  say("empty-note", isOn ? "The draft learns in the pauses between requests; the first better version comes after some tens of them." : notes.off);
  const age = learning.oldest_trace_at == null ? "" : `, oldest ${duration(Date.now() / 1000 - learning.oldest_trace_at)}`;
  const items = !isOn
    ? []
    : [
        ["State", state],
        ["Loss", figure(learning.loss, 3)],
        ["Steps", whole(learning.num_steps)],
        ["Requests until the next candidate", whole(learning.next_candidate_after)],
        ["Alpha of the last 100", figure(learning.alpha_last_100)],
        ["Duty cycle", learning.spare_share == null ? "–" : `${percent(learning.spare_share)} of the idle time`],
        ["Compute, of what serving used", percent(learning.flops_share)],
        ["Traces", `${whole(learning.traces)}, ${bytes(learning.store_bytes)}${age}`],
        ["Dropped traces", whole(learning.traces_dropped)],
        ["Rolled back", whole(learning.num_rolled_back)],
      ];
  fill($("training"), items, () => items.flatMap(([term, value]) => row(term, value)));
}

// --- range and theme ---------------------------------------------------------------------------------------------------

const ranges = [...document.querySelectorAll("[data-range]")];
for (const button of ranges) {
  button.addEventListener("click", () => {
    for (const other of ranges) other.setAttribute("aria-pressed", String(other === button));
    charts.seconds = Number(button.dataset.range);
    draw();
  });
}

const theme = () => document.documentElement.dataset.theme ?? "auto";
function showTheme() {
  say("theme", `Theme: ${theme()}`);
  charts.recolour();
  draw();
}
$("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("livedraft-theme", next);
  } catch {
    // private mode: until the page is closed
  }
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
showTheme();
