// The two curves. Points are sums over a stretch of time; they are gathered into bins as wide as the picture can show.
/* global uPlot */
import { $, el, fill, percent, whole } from "./dom.js";

const NUM_BINS = 120;
const LEAST_SPAN = 60;
const LEAST_DRAFTED = 8; // tokens in a bin; the share of fewer is noise
const MARKS = {
  promotion: { sign: "▲", text: "promoted", colour: "--accent" },
  rejection: { sign: "×", text: "rejected", colour: "--faint" },
  rollback: { sign: "▼", text: "rolled back", colour: "--caution" },
};
const LINES = ["", "second", "caution"]; // samples of the legend: first route, other routes, what else proposes
const OTHER_NAMES = { suffix: "from earlier text", prediction: "clients’ predictions" };

const colours = new Map();

/** A colour of the style sheet as a canvas takes it. */
function colour(name) {
  if (!colours.has(name)) {
    const probe = el("span", { class: "unseen" });
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}

/** Points of the time shown, summed by bin: [{x, tokens, busy, estimated, plain, curves, alpha}], null where there is a gap. */
function binned(points, from, to) {
  const width = Math.max(1, (to - from) / NUM_BINS);
  const bins = new Map();
  for (const point of points) {
    if (point.end < from) continue;
    const key = Math.floor((point.end - from) / width);
    let bin = bins.get(key);
    if (!bin) {
      bin = { x: from + (key + 0.5) * width, tokens: 0, busy: 0, estimated: 0, plain: 0, curves: {}, alpha: null };
      bins.set(key, bin);
    }
    bin.tokens += point.num_tokens ?? 0;
    bin.busy += point.busy_seconds ?? 0;
    bin.estimated += point.estimated_seconds ?? 0;
    bin.plain += point.estimated_plain_seconds ?? 0;
    bin.alpha = point.alpha ?? bin.alpha;
    for (const [name, counts] of Object.entries(point.curves ?? {})) {
      const sum = (bin.curves[name] ??= [0, 0, 0]);
      counts.forEach((count, index) => (sum[index] += count));
    }
  }
  const sorted = [...bins.entries()].sort(([a], [b]) => a - b).map(([, bin]) => bin);
  const longest = Math.max(8 * width, 30); // traffic comes in bursts; only what is longer than a pause is a gap
  const rows = [];
  for (const bin of sorted) {
    const before = rows.at(-1);
    if (before && bin.x - before.x > longest) rows.push({ x: (before.x + bin.x) / 2, isGap: true, curves: {} });
    rows.push(bin);
  }
  return rows;
}

class Chart {
  constructor(name, { least, most, format }) {
    this.holder = $(`${name}-chart`);
    this.legend = $(`${name}-legend`);
    this.scale = { least, most, format };
    this.marks = [];
    this.series = [];
    this.plot = null;
    this.names = "";
    this.pointed = null; // index of the bin under the pointer
    new ResizeObserver(() => this.plot?.setSize(this.size)).observe(this.holder);
  }

  get size() {
    return { width: this.holder.clientWidth, height: this.holder.clientHeight };
  }

  forget() {
    this.plot?.destroy();
    this.plot = null;
  }

  /** `series`: [{name, sample, stroke, dash, width, values}] over `times`. */
  draw(times, series, range) {
    this.range = range;
    this.series = series;
    const names = series.map((one) => one.name).join("\n");
    if (this.plot && names !== this.names) this.forget();
    this.names = names;
    const data = [times, ...series.map((one) => one.values)];
    if (this.plot) this.plot.setData(data);
    else this.plot = new uPlot(this.options(series), data, this.holder);
    this.showLegend();
  }

  /** Each line with its value under the pointer, or its newest one; then the kinds of marks there are. */
  showLegend() {
    const value = (one) => this.scale.format(one.values[this.pointed] ?? last(one.values));
    const items = this.series.map((one) => [one.name, one.sample, value(one)]);
    const kinds = Object.keys(MARKS).filter((kind) => this.marks.some((mark) => mark.kind === kind));
    fill(this.legend, [items, kinds], () => [
      ...items.map((item) => line(...item)),
      ...kinds.map((kind) =>
        el("li", {}, el("span", { class: `mark ${kind}`, "aria-hidden": "true" }, MARKS[kind].sign), MARKS[kind].text),
      ),
    ]);
  }

  options(series) {
    const axis = { stroke: colour("--muted"), font: "12px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: colour("--line"), width: 1 };
    return {
      ...this.size,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { size: 7 } },
      padding: [14, 8, 0, 0],
      scales: { x: { time: true, range: () => this.range }, y: { range: (_, low, high) => this.yRange(high) } },
      axes: [
        { ...axis, grid: { show: false }, space: 90, values: (_, ticks) => ticks.map(tickLabel(ticks)) },
        { ...axis, grid, size: 46, space: 44, values: (_, ticks) => ticks.map(this.scale.format) },
      ],
      series: [{}, ...series.map(({ stroke, width, dash }) => ({ stroke, width, dash, points: { show: false } }))],
      hooks: {
        draw: [(plot) => this.drawMarks(plot)],
        setCursor: [
          (plot) => {
            this.pointed = plot.cursor.idx;
            this.showLegend();
          },
        ],
      },
    };
  }

  yRange(high) {
    return [0, Math.min(this.scale.most, Math.max(this.scale.least, (high ?? 0) * 1.12))];
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    ctx.save();
    for (const mark of this.marks) {
      if (mark.time < this.range[0] || mark.time > this.range[1]) continue;
      const kind = MARKS[mark.kind];
      const x = Math.round(plot.valToPos(mark.time, "x", true));
      ctx.strokeStyle = ctx.fillStyle = colour(kind.colour);
      ctx.lineWidth = ratio;
      ctx.globalAlpha = mark.kind === "rejection" ? 0.45 : 0.8;
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.textAlign = "center";
      ctx.textBaseline = "bottom";
      ctx.fillText(kind.sign, x, bbox.top - ratio);
    }
    ctx.restore();
  }
}

function tickLabel(ticks) {
  const span = ticks.at(-1) - ticks[0];
  const options =
    span > 172800
      ? { day: "numeric", month: "short" }
      : { hour: "2-digit", minute: "2-digit", hour12: false, ...(span < 240 ? { second: "2-digit" } : {}) };
  return (tick) => new Date(1000 * tick).toLocaleString([], options);
}

export class Charts {
  constructor() {
    this.acceptance = new Chart("acceptance", { least: 0.2, most: 1, format: percent });
    this.speed = new Chart("speed", { least: 10, most: Infinity, format: whole });
    this.seconds = 600;
  }

  /** With other colours from now on. */
  recolour() {
    colours.clear();
    this.acceptance.forget();
    this.speed.forget();
  }

  draw(points, marks, now) {
    if (!points.length) return;
    const first = points[0].start;
    const from = this.seconds ? Math.max(first, now - this.seconds) : first;
    const range = [Math.min(from, now - LEAST_SPAN), now];
    const rows = binned(points, ...range);
    const times = rows.map((bin) => bin.x);
    this.drawAcceptance(rows, times, marks, range);
    this.drawSpeed(rows, times, range);
  }

  drawAcceptance(rows, times, marks, range) {
    const names = new Set(rows.flatMap((bin) => Object.keys(bin.curves)));
    const routes = [...names].filter((name) => !(name in OTHER_NAMES)).sort();
    const others = [...names].filter((name) => name in OTHER_NAMES).sort();
    const series = [...routes, ...others].map((name, index) => ({
      name: label(name),
      sample: LINES[name in OTHER_NAMES ? 2 : Math.min(index, 1)],
      stroke: colour(name in OTHER_NAMES ? "--caution" : index ? "--faint" : "--accent"),
      width: index ? 1.75 : 2.5,
      dash: name in OTHER_NAMES ? [2, 4] : [],
      values: rows.map((bin) => rate(bin.curves[name])),
    }));
    if (rows.some((bin) => bin.alpha != null)) {
      const values = rows.map((bin) => (bin.isGap ? null : bin.alpha ?? undefined));
      series.push({ name: "alpha, all positions", sample: "muted", stroke: colour("--faint"), width: 2, dash: [7, 5], values });
    }
    this.acceptance.marks = marks;
    this.acceptance.draw(times, series, range);
    const shown = marks.filter((mark) => mark.time >= range[0]);
    const counts = Object.keys(MARKS).map((kind) => [kind, shown.filter((mark) => mark.kind === kind).length]);
    const told = counts.filter(([, count]) => count).map(([kind, count]) => `${count} ${MARKS[kind].text}`);
    const curves = series.map((one) => `${one.name} from ${percent(first(one.values))} to ${percent(last(one.values))}`);
    this.acceptance.holder.setAttribute("aria-label", [...curves, ...told].join("; ") || "No drafted tokens yet");
  }

  drawSpeed(rows, times, range) {
    const speeds = rows.map((bin) => (bin.tokens && bin.busy > 0.05 ? bin.tokens / bin.busy : bin.isGap ? null : undefined));
    const plain = rows.map((bin, index) => (speeds[index] && bin.plain ? (speeds[index] * bin.estimated) / bin.plain : speeds[index]));
    const series = [
      { name: "with speculation", sample: "", stroke: colour("--accent"), width: 2.5, values: speeds },
      { name: "without, estimated", sample: "muted", stroke: colour("--faint"), width: 2, dash: [7, 5], values: plain },
    ];
    this.speed.draw(times, series, range);
    const told = series.map((one) => `${one.name}: now ${whole(last(one.values))} tokens a second`);
    this.speed.holder.setAttribute("aria-label", told.join("; "));
  }
}

// `null` is a gap in a line, `undefined` a bin that has nothing to say: the line goes on over it.
const rate = (counts) => (counts?.[1] >= LEAST_DRAFTED ? counts[2] / counts[1] : undefined);
const first = (values) => values.find((value) => value != null);
const last = (values) => values.findLast((value) => value != null);
const label = (name) => OTHER_NAMES[name] ?? (name === "default" ? "draft" : `draft, ${name}`);

function line(name, sample, value) {
  const mark = el("span", { class: `sample ${sample}`, "aria-hidden": "true" });
  return el("li", {}, mark, name, el("span", { class: "value" }, value));
}
