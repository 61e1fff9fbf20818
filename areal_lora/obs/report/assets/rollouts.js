"use strict";
// Shows the rollouts of PageData (inspector.py): a filter, a list in pages, the answers of one group side by side.
// A live page queries its server; a file has the groups inside. All texts are set as text.
const OUTCOMES = ["solved", "failed", "truncated", "stale", "retried", "dropped", "trained"];
const COLOURS_BY = ["version", "mismatch", "advantage", "entropy"];
const LEVELS = { mismatch: [0.01, 0.1, 0.5, 1], advantage: [1e-6, 0.5, 1, 2], entropy: [0.1, 0.5, 1, 2] };
const UNKNOWN = { mismatch: ["trainer_logprobs", "the trainer's log-probabilities were not recorded"],
  entropy: ["entropies", "entropies were not recorded: algorithm.entropy_coef is 0"] };
const LOCAL_PAGE = 25;
const host = byId("rollouts"), isLive = Boolean(document.body.dataset.live);
const pages = { starts: [null], below: null, query: 0 };
const shownGroup = { first: null, second: null, colour: "version" };
const overview = () => data.rollouts[+form.elements.run.value] ?? { kept: 0, steps: [0, 0], adapters: [], groups: [] };

const option = (value, name = value) => element("option", { value }, name);
const field = (name, label, input) => { input.setAttribute("name", name); return element("label", {}, label, input); };
const num = (name, label) => field(name, label, element("input", { type: "number", step: "any" }));
const button = (text, press, attributes = {}) => {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", press);
  return made;
};

const step = element("input", { type: "range", min: -1, max: 0, value: -1 }), stepText = element("output", {});
const form = element("form", { id: "filter", "aria-label": "filter of rollouts" },
  field("run", "run", element("select", {})), field("adapter", "adapter", element("select", {})),
  field("outcome", "outcome", element("select", {}, option("", "any"), ...OUTCOMES.map((name) => option(name)))),
  num("lowest", "reward from"), num("highest", "to"), field("text", "text", element("input", { type: "search" })),
  field("step", "step", step), stepText);
const found = element("p", { class: "sub", role: "status" }), list = element("ol", { class: "rollouts" });
const newer = button("newer", () => { pages.starts.pop(); load(); }), older = button("older", () => {
  pages.starts.push(pages.below);
  load();
});
const download = element("a", { download: "rollouts.parquet" }, "download as Parquet");
const opened = element("section", { id: "group", tabindex: "-1", "aria-label": "group of rollouts" });

function filled() {
  const values = [...new FormData(form)].filter(([name, value]) => value !== "" && name !== "step");
  if (+step.value >= +step.min + 1) values.push(["step", step.value]);
  return Object.fromEntries(values);
}

async function query(path, values) {
  if (!isLive) return path === "group" ? localGroup(values) : localPage(values);
  const answer = await fetch(`${path}?${new URLSearchParams(values)}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

function localPage(chosen) {
  const text = chosen.text ?? "", heads = overview().groups.flatMap((group) => group.rollouts.map((one) => one.head));
  const rows = heads.filter((head) => (!chosen.adapter || head.adapter === chosen.adapter) &&
    (chosen.step == null || head.step === +chosen.step) && (!chosen.outcome || (chosen.outcome === "trained" ? !head.dropped : head.outcomes.includes(chosen.outcome))) &&
    (chosen.lowest == null || (head.reward ?? NaN) >= +chosen.lowest) &&
    (chosen.highest == null || (head.reward ?? NaN) <= +chosen.highest) &&
    (chosen.below == null || head.rollout < +chosen.below) && (head.prompt.includes(text) || head.answer.includes(text)));
  rows.sort((a, b) => b.rollout - a.rollout);
  const more = rows.length > LOCAL_PAGE;
  return { rows: rows.slice(0, LOCAL_PAGE), matches: rows.length, below: more ? rows[LOCAL_PAGE - 1].rollout : null };
}

const isAt = (place) => (group) => ["adapter", "step", "group"].every((key) => group.rollouts[0].head[key] === place[key]);
function localGroup({ adapter, step, group }) {
  const place = { adapter, step: +step, group: +group }, { groups } = overview();
  const chosen = groups.find(isAt(place));
  if (!chosen) return { rollouts: [], others: [] };
  return { ...chosen, others: chosen.others.filter((other) => groups.some(isAt(other))) };
}

async function load() {
  const mine = ++pages.query, below = pages.starts[pages.starts.length - 1], chosen = filled();
  download.href = `rollouts.parquet?${new URLSearchParams(chosen)}`;
  try {
    const page = await query("rollouts", below == null ? chosen : { ...chosen, below });
    if (mine !== pages.query) return;
    pages.below = page.below;
    newer.disabled = pages.starts.length < 2;
    older.disabled = page.below == null;
    const kept = `${overview().kept} rollouts kept${isLive ? "" : ", some of them in this file"}`;
    const hits = page.matches == null ? `${page.rows.length} on this page${page.below == null ? "" : ", more may follow"}`
      : below == null ? `${page.matches} match` : `${page.matches} older ones match`;
    found.textContent = `${kept}; ${hits}`;
    list.replaceChildren(...page.rows.map(row));
  } catch (error) {
    found.textContent = `no rollouts: ${error.message}`;
  }
}

const versions = (head) => head.oldest === head.newest ? `v${head.newest}` : `v${head.oldest} to v${head.newest}`;
function row(head) {
  const title = `${head.adapter}, step ${head.step}, group ${head.group}, sample ${head.sample}`;
  const open = button(title, () => show(head, null));
  return element("li", {}, open, element("div", { class: "head" }, ...facts(head)),
    element("p", { class: "excerpt prompt" }, head.prompt.slice(-240)),
    element("p", { class: "excerpt" }, head.answer.slice(0, 240)));
}

function facts(head) {
  const parts = Object.entries(head.components).map(([name, value]) => `${name} ${short(value)}`).join(", ");
  const mismatch = head.mismatch == null ? "" : `mismatch ${short(head.mismatch)}`;
  const advantage = head.advantage == null ? "" : `advantage ${short(head.advantage)}`;
  const texts = [advantage, parts, mismatch, versions(head), head.outcomes.join(", "), head.dropped && `because ${head.dropped}`,
    head.gold && `gold ${head.gold}`];
  const scored = head.reward == null ? "not scored" : `reward ${short(head.reward)}`;
  const reward = element("span", { class: head.reward > 0 ? "good" : "bad" }, scored);
  return [reward, ...texts.filter(Boolean).map((text) => element("span", {}, text))];
}

// Opens the group of ``place``; ``other`` is one of the same prompt, beside it.
async function show(place, other) {
  const at = ({ adapter, step, group }) => ({ run: form.elements.run.value, adapter, step, group });
  try {
    shownGroup.first = await query("group", at(place));
    shownGroup.second = other && await query("group", at(other));
  } catch (error) {
    found.textContent = `no group: ${error.message}`;
    return;
  }
  drawGroup();
  opened.focus();
}

function drawGroup() {
  const { first, second, colour } = shownGroup;
  if (!first?.rollouts.length) { opened.replaceChildren(element("p", { class: "sub" }, "This group is not kept.")); return; }
  const { head, messages } = first.rollouts[0];
  const name = (place) => `step ${place.step}, group ${place.group}, ${place.adapter}`;
  const by = element("select", {}, ...COLOURS_BY.map((name) => option(name)));
  const beside = element("select", {}, option("", "none"), ...first.others.map((place, i) => option(i, name(place))));
  by.value = colour;
  beside.value = second?.rollouts.length ? first.others.findIndex((place) => isAt(place)(second)) : "";
  by.addEventListener("change", () => { shownGroup.colour = by.value; drawGroup(); opened.querySelector("select").focus(); });
  beside.addEventListener("change", () => show(head, first.others[beside.value] ?? null));
  const columns = [first, second].filter((group) => group?.rollouts.length).map((group) => element("div", {},
    element("h4", {}, name(group.rollouts[0].head)), ...group.rollouts.map(answer)));
  opened.replaceChildren(element("h3", {}, `Answers to ${head.uid}`),
    element("p", { class: "controls" }, element("label", {}, "tokens by", by), element("label", {}, "same prompt beside", beside),
      button("close", () => { opened.replaceChildren(); list.querySelector("button")?.focus(); })), legend(first, second),
    element("pre", { class: "prompt" }, head.prompt), ...messageBox("messages", messages),
    element("div", { class: second?.rollouts.length ? "beside" : "samples" },
      ...(columns.length > 1 ? columns : [...columns[0].children].slice(1))));
}

const messageBox = (title, messages) => messages ? [element("details", {}, element("summary", {}, title), ...messageList(messages))] : [];

// Messages of a prompt or of an agent: calls of tools as calls, and results with the name of what was called.
function messageList(messages) {
  const names = new Map(), written = (value) => typeof value === "string" ? value : JSON.stringify(value, null, 2) ?? "";
  return [JSON.parse(messages)].flat().flatMap((one) => {
    if (typeof one !== "object" || one === null) return [element("pre", {}, written(one))];
    const calls = [one.tool_calls ?? []].flat().map((call) => {
      const { name, arguments: given } = call?.function ?? {};
      names.set(call?.id, name);
      return element("pre", { class: "call" }, `${written(name)}(${written(given)})`);
    });
    const role = one.role === "tool" ? `result of ${written(names.get(one.tool_call_id) ?? one.name)}` : written(one.role);
    const text = one.content == null ? [] : [element("pre", {}, written(one.content))];
    return [element("p", { class: "head" }, element("span", {}, role)), ...text, ...calls];
  });
}

const versionsOf = (groups) => [...new Set(groups.flatMap((group) => group?.rollouts ?? []).flatMap((one) =>
  one.versions.filter((_, i) => i % 2 === 0)))].filter((version) => version >= 0).sort((a, b) => a - b);

function legend(...groups) {
  const { colour } = shownGroup, mark = (name, text) => element("span", { class: `token ${name}` }, text);
  const [column, reason] = UNKNOWN[colour] ?? [], unknown = column && groups.every((group) => !group?.rollouts[0]?.[column]);
  const marks = colour === "version" ? versionsOf(groups).map((v) => mark(`v${v % COLOURS}`, `v${v}`)) : unknown ?
    [reason] : LEVELS[colour].map((limit, i) => mark(`l${i + 1}`, `${colour === "advantage" ? "±" : ""}${limit} or more`));
  return element("p", { class: "head" }, ...marks);
}

const level = (value, limits) => limits.filter((limit) => value >= limit).length;

// The tokens after the prompt; neighbours of one colour are one element.
function answer(one) {
  const pre = element("pre", {}), each = [];
  for (let i = 0; i < one.versions.length; i += 2) each.push(...Array(one.versions[i + 1]).fill(one.versions[i]));
  const start = Math.max(0, each.findIndex((version) => version >= 0));
  const kind = (t) => {
    if (each[t] < 0) return "given";
    if (shownGroup.colour === "version") return `v${each[t] % COLOURS}`;
    if (shownGroup.colour === "advantage") return (one.advantages[t] < 0 ? "minus l" : "l") + level(Math.abs(one.advantages[t]), LEVELS.advantage);
    if (shownGroup.colour === "entropy") return `l${level(one.entropies?.[t] ?? 0, LEVELS.entropy)}`;
    return one.trainer_logprobs ? `l${level(Math.abs(one.trainer_logprobs[t] - one.logprobs[t]), LEVELS.mismatch)}` : "l0";
  };
  for (let t = start; t < one.tokens.length;) {
    const name = kind(t);
    let text = "";
    do text += one.tokens[t++]; while (t < one.tokens.length && kind(t) === name);
    pre.append(element("span", { class: `token ${name}` }, text));
  }
  return element("div", { class: "sample" }, element("div", { class: "head" },
    element("span", {}, `sample ${one.head.sample}`), ...facts(one.head)), ...messageBox("turns", one.turns), pre);
}

// The choices that the runs offer; what is chosen stays.
function choices() {
  const { run, adapter } = form.elements, all = +step.value < +step.min + 1 || step.value === "";
  const was = [run.value || "0", adapter.value, all ? "" : step.value];
  run.replaceChildren(...data.rollouts.map((one, i) => option(i, one.run)));
  run.value = was[0];
  run.parentElement.hidden = data.rollouts.length < 2;
  const { kept, steps: [first, last], adapters } = overview();
  adapter.replaceChildren(option("", "all"), ...adapters.map((name) => option(name)));
  adapter.value = adapters.includes(was[1]) ? was[1] : "";
  adapter.parentElement.hidden = adapters.length < 2;
  step.min = first - 1;
  step.max = last;
  step.value = was[2] === "" ? first - 1 : was[2];
  stepText.textContent = +step.value < first ? "all steps" : `step ${step.value}`;
  step.setAttribute("aria-valuetext", stepText.textContent);
  return kept;
}

let timer = 0;
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", () => {
  choices();
  pages.starts = [null];
  clearTimeout(timer);
  timer = setTimeout(load, 150);
});
host.append(form, found, list, element("p", { class: "controls" }, newer, older, ...(isLive ? [download] : [])), opened);
let kept = choices();
load();
document.addEventListener("newer", () => {
  const now = choices();
  if (now !== kept && pages.starts.length === 1 && !list.contains(document.activeElement)) load();
  kept = now;
});
