"use strict";
// Draws the charts of PageData (page.py) with uPlot. A live page fetches newer data once a second.
const AXES = { step: "optimizer step", tokens: "trained tokens", time: "minutes since the start" };
const COLOURS = 7;
const PERIOD_MS = 1000;
const state = { axis: "step", smooth: 0.6, log: new Set() };
const drawn = new Map(); // by section and title: {host, plot, section, chart, zoomed}
const byId = (id) => document.getElementById(id);
let data = JSON.parse(byId("data").textContent);

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Linear interpolation of a clock's line; both ends are extended flat.
function at(line, x) {
  let low = 0, high = line.x.length - 1;
  if (high < 0) return x;
  if (x <= line.x[0]) return line.y[0];
  if (x >= line.x[high]) return line.y[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (line.x[middle] <= x) low = middle; else high = middle;
  }
  const part = (x - line.x[low]) / (line.x[high] - line.x[low]);
  return line.y[low] + part * (line.y[high] - line.y[low]);
}

function clockOf(section, name) {
  const names = Object.keys(section.clocks);
  return section.clocks[names.length === 1 ? names[0] : names.find((known) => name.startsWith(known))];
}

function axisOf(chart) {
  return chart.x.startsWith("minutes") ? chart.x : state.axis === "step" ? chart.x : AXES[state.axis];
}

function xs(section, chart, line) {
  const clock = clockOf(section, line.name);
  if (state.axis === "step" || chart.x.startsWith("minutes") || !clock) return line.x;
  const found = line.x.map((x) => state.axis === "tokens" ? at(clock.tokens, x) : at(clock.seconds, x) / 60);
  // uPlot needs ascending x: points of one moment stay apart.
  for (let i = 1; i < found.length; i++) if (found[i] <= found[i - 1]) found[i] = found[i - 1] + 1e-9;
  return found;
}

// Exponential moving mean, corrected for its start (as Adam's).
function smoothed(values) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    mean = state.smooth * mean + (1 - state.smooth) * value;
    weight = state.smooth * weight + (1 - state.smooth);
    return mean / weight;
  });
}

const isLog = (chart) => chart.log !== state.log.has(chart.title);

// uPlot's series and columns of a chart.
function columns(section, chart) {
  const tables = [], series = [{ label: axisOf(chart) }], log = isLog(chart);
  const many = chart.lines.length > 3; // the points of many lines hide each other: their means alone
  chart.lines.forEach((line, i) => {
    const x = xs(section, chart, line), y = log ? line.y.map((v) => v > 0 ? v : null) : line.y;
    const label = line.name || chart.title.toLowerCase();
    const stroke = () => colour(`--c${i % COLOURS}`), dash = i >= COLOURS ? [6, 4] : [];
    const smooth = chart.smooth && state.smooth > 0 && y.length > 2;
    const points = { show: chart.dots || y.length === 1, size: 6 };
    if (!smooth || !many) tables.push([x, y]);
    if (!smooth || !many) series.push({ label, stroke, dash, width: smooth ? 1 : 2, alpha: smooth ? 0.35 : 1, spanGaps: true, points });
    if (smooth) {
      tables.push([x, smoothed(line.y)]);
      series.push({ label: `${label}, smoothed`, stroke, dash, width: 2, spanGaps: true, points: { show: false } });
    }
  });
  return { series, columns: tables.length ? uPlot.join(tables) : [[]] };
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (v) => v == null ? "" : v && Math.abs(v) < 1e-3 ? v.toExponential(2).replace(/\.?0*e/, "e") :
  String(+v.toPrecision(5));
const tick = (v) => v == null ? "" : Math.abs(v) >= 1e9 ? `${+(v / 1e9).toPrecision(4)}G` : Math.abs(v) >= 1e6 ?
  `${+(v / 1e6).toPrecision(4)}M` : Math.abs(v) >= 1e4 ? `${+(v / 1e3).toPrecision(4)}k` : short(v);

function options(entry, series) {
  const { chart, host } = entry, log = isLog(chart);
  const axis = { stroke: () => colour("--soft"), grid: { stroke: () => colour("--grid"), width: 1 }, ticks: { show: false } };
  const values = (u, splits) => splits.map(tick);
  const range = chart.unit ? [0, 1] : (u, low, high) =>
    low == null || (!low && !high) ? [0, 1] : uPlot.rangeNum(Math.min(low, 0), Math.max(high, 0), 0.05, true);
  const decades = (u, splits) => splits.map((v) => Math.abs(Math.log10(v) % 1) < 1e-9 ? v : null);
  const vertical = log ? { ...axis, grid: { ...axis.grid, filter: decades }, filter: decades } : axis;
  const value = (u, v, of, at) => short(at == null ? u.data[of].findLast((y) => y != null) : v); // without a cursor the last
  return {
    width: Math.max(240, host.clientWidth), height: 240, series: series.map((s) => ({ ...s, value })),
    cursor: { sync: { key: axisOf(chart) }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range } },
    axes: [{ ...axis, values, label: axisOf(chart), labelSize: 20, size: 34 }, { ...vertical, values, size: 56 }],
    hooks: { draw: [(u) => marks(u, chart)], setScale: [(u, key) => { if (key === "x") entry.zoomed = isZoomed(u); }] },
  };
}

function isZoomed(u) {
  const x = u.data[0];
  return x.length > 0 && (u.scales.x.min > x[0] || u.scales.x.max < x[x.length - 1]);
}

// Dotted lines where the run resumed.
function marks(u, chart) {
  if (state.axis !== "step") return;
  u.ctx.save();
  u.ctx.strokeStyle = colour("--c1");
  u.ctx.setLineDash([2, 3]);
  for (const mark of chart.marks) {
    const x = u.valToPos(mark, "x", true);
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
    u.ctx.beginPath();
    u.ctx.moveTo(x, u.bbox.top);
    u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
    u.ctx.stroke();
  }
  u.ctx.restore();
}

function draw(entry) {
  const { series, columns: found } = columns(entry.section, entry.chart);
  const zoom = entry.plot && entry.zoomed ? { ...entry.plot.scales.x } : null;
  entry.plot?.destroy();
  entry.plot = new uPlot(options(entry, series), found, entry.host);
  if (zoom) entry.plot.setScale("x", { min: zoom.min, max: zoom.max });
  const last = entry.chart.lines.map((line) => `${line.name} ${short(line.y[line.y.length - 1])}`.trim()).join(", ");
  entry.host.setAttribute("aria-label", `${entry.chart.title}, last: ${last}`);
}

const seen = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  const entry = [...drawn.values()].find(({ host }) => host === target);
  if (entry && isIntersecting && !entry.plot) draw(entry);
}), { rootMargin: "400px" });

// Puts the charts of all sections into the figures of the body; those drawn before keep their zoom.
function mount() {
  const before = new Map(drawn);
  drawn.clear();
  for (const section of data.sections) {
    const figures = byId(section.id)?.querySelectorAll("figure") ?? [];
    section.charts.forEach((chart, i) => {
      const key = `${section.id}/${chart.title}`, old = before.get(key);
      const host = old?.host ?? element("div", { class: "chart", role: "img", "aria-label": chart.title });
      const entry = { host, plot: old?.plot, zoomed: old?.zoomed ?? false, section, chart };
      const button = element("button", { type: "button", "aria-pressed": String(isLog(chart)),
        "aria-label": `${chart.title}: log axis` }, "log");
      button.addEventListener("click", () => {
        if (!state.log.delete(chart.title)) state.log.add(chart.title);
        button.setAttribute("aria-pressed", String(isLog(chart)));
        draw(entry);
      });
      figures[i].append(button, host);
      drawn.set(key, entry);
      if (old?.plot) draw(entry); else seen.observe(host);
    });
  }
  for (const [key, old] of before) if (!drawn.has(key)) { seen.unobserve(old.host); old.plot?.destroy(); }
}

const redraw = () => drawn.forEach((entry) => entry.plot && draw(entry));
const reset = () => { drawn.forEach((entry) => { entry.zoomed = false; }); redraw(); };

function tools() {
  const axis = element("select", { id: "axis" });
  for (const [value, name] of Object.entries(AXES)) axis.append(element("option", { value }, name));
  const smooth = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth });
  const again = element("button", { type: "button", title: "key 0" }, "reset zoom");
  axis.addEventListener("change", () => { state.axis = axis.value; reset(); });
  smooth.addEventListener("input", () => { state.smooth = +smooth.value; redraw(); });
  again.addEventListener("click", reset);
  addEventListener("keydown", (event) => {
    if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "0") reset();
    if (event.key === "x") { axis.selectedIndex = (axis.selectedIndex + 1) % 3; axis.dispatchEvent(new Event("change")); }
  });
  const bar = element("nav", { id: "tools", "aria-label": "charts" }, element("label", {}, "x (key x)", axis),
    element("label", {}, "smoothing", smooth), again, element("span", { id: "state", role: "status" }));
  document.body.prepend(bar);
}

// The body is HTML of our own server, in which every text of a user or a model is escaped.
function update(newer) {
  const open = [...byId("main").querySelectorAll("details")].map((one) => one.open), place = scrollY;
  data = newer;
  byId("main").innerHTML = data.body;
  byId("main").querySelectorAll("details").forEach((one, i) => { one.open = open[i] ?? one.open; });
  mount();
  scrollTo(0, place);
  document.dispatchEvent(new Event("newer"));
}

async function follow() {
  let tag = "";
  for (;;) {
    await new Promise((done) => setTimeout(done, PERIOD_MS));
    if (document.hidden) continue;
    try {
      const open = [...document.querySelectorAll("details[data-plots]")].filter((one) => one.open);
      const query = new URLSearchParams(open.map((one) => ["open", one.dataset.plots]));
      const answer = await fetch(`data?${query}`, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) { tag = answer.headers.get("ETag") ?? ""; update(await answer.json()); }
      else if (answer.status !== 304) throw new Error(`status ${answer.status}`);
      byId("state").textContent = "live";
    } catch (error) {
      byId("state").textContent = "not live: the server of this page does not answer";
    }
  }
}

tools();
mount();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
addEventListener("beforeprint", () => drawn.forEach((entry) => entry.plot || !entry.host.checkVisibility() || draw(entry)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
if (document.body.dataset.live) follow();
