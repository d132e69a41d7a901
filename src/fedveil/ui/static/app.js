"use strict";
// The dashboard: four views chosen by the part of the address after '#'. All texts of runs go in as text, never as
// HTML; only charts, which the server draws and escapes, are inserted as markup.

const main = document.getElementById("main");
const said = document.getElementById("said");
const picked = new Set();
let timer = 0;      // of the next poll
let visit = 0;      // grows with each change of view; late answers of an earlier view are dropped
let filter = "";

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const put = (...children) => main.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false && child !== ""));

async function ask(path) {
  let answer;
  try { answer = await fetch(path, { headers: { Accept: "application/json" } }); }
  catch { throw new Error("The dashboard does not answer; was it stopped?"); }
  if (answer.status === 401) { location.href = "/login"; throw new Error("A token is needed."); }
  const data = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(data.error || (data.detail ? "A value is missing or not a number." : "The dashboard answered " + answer.status + "."));
  return data;
}

const number = (value, digits = 3) => value === null || value === undefined ? "–" : Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 || value === 0 ? String(+value.toPrecision(digits)) : value.toExponential(digits - 1).replace(/\.?0*e/, "e");
const share = (value) => value === null || value === undefined ? "–" : (100 * value).toFixed(1) + "%";
const outcome = (run) => run.metric === "rmse" ? number(run.result, 4) + " RMSE" : share(run.result);
const time = (s) => s === null || s === undefined ? "–" : s < 1 ? Math.round(1000 * s) + " ms" : s < 120 ? s.toFixed(1) + " s" : s < 7200 ? (s / 60).toFixed(1) + " min" : (s / 3600).toFixed(1) + " h";
const MARKS = { sound: "✓ ", nominal: "≈ ", none: "✕ " };
const badge = (verdict, pending, weak) => h("span", { class: "badge " + verdict + (pending && verdict === "sound" ? " pending" : "") + (weak && verdict === "sound" ? " weak" : "") }, (MARKS[verdict] || "") + verdict);
const link = (id) => "#/run?id=" + encodeURIComponent(id);
const reportOf = (ids, secret) => "/report?" + [...ids].map((id) => "id=" + encodeURIComponent(id)).join("&") + (secret ? "&private=true" : "");
const failed = (error) => h("p", { class: "error", role: "alert" }, error.message);
const alike = (a, b) => JSON.stringify(a) === JSON.stringify(b);

function charts(list) {
  const box = h("div", { class: "charts" });
  box.innerHTML = list.join("");
  return box;
}

// On a phone rows are cards without a head: each cell carries the name of its column.
function cards(table) {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.firstChild?.nodeType === 3 ? cell.firstChild.data : "");
  for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, i) => { if (cell.tagName === "TD" && names[i]) cell.dataset.about ??= names[i]; });
  table.classList.add("cards");
  return table;
}

// --- the list of runs

function promiseOf(run) {
  if (!run.verdict) return h("span", { class: "muted" }, "–");
  const value = run.epsilon === null || run.epsilon === undefined ? null : h("span", { class: "epsilon" }, "ε " + (run.verdict === "sound" ? "≤ " : "= ") + number(run.epsilon));
  return h("span", {}, badge(run.verdict, run.simulated, run.epsilon > 10), value, h("span", { class: "sub" }, run.observer));
}

function runRow(run, changed) {
  const box = h("input", { type: "checkbox", "aria-label": "Select " + run.name, onchange: (event) => { event.target.checked ? picked.add(run.id) : picked.delete(run.id); changed(); } });
  box.checked = picked.has(run.id);
  if (run.problem) {
    return h("tr", { "data-id": run.id }, h("td", { class: "pick" }), h("td", { class: "name" }, run.name), h("td", { "data-about": "Status" }, h("span", { class: "badge broken" }, "broken")), h("td", { colspan: 4, class: "problem" }, run.problem));
  }
  if (run.joined) box.disabled = true;
  const here = run.joined ? Object.keys(run.joined).length : run.round, all = run.joined ? run.clients_wanted : run.rounds;
  return h("tr", { "data-id": run.id },
    h("td", { class: "pick" }, box),
    h("td", { class: "name" }, h("a", { href: link(run.id) }, run.name), h("span", { class: "sub" }, (run.title && !run.name.endsWith(run.title) ? run.title + " · " : "") + run.recipe + " on " + run.dataset)),
    h("td", { "data-about": "Status" }, h("span", { class: "badge " + run.status }, run.status)),
    h("td", { "data-about": "Progress" }, h("progress", { max: Math.max(all, 1), value: here, "aria-label": "Progress of " + run.name }), h("span", { class: "sub" }, here + " of " + all + (run.joined ? " nodes joined" : " rounds"))),
    h("td", { "data-about": "Result", class: "right" }, outcome(run)),
    h("td", { "data-about": "Promise" }, promiseOf(run)),
    h("td", { "data-about": "Time", class: "right" }, time(run.seconds)));
}

async function showRuns(now) {
  const body = h("tbody"), shown = new Map();
  let runs = [];
  const compare = h("button", { type: "button", class: "primary", disabled: true, onclick: () => { location.hash = "#/compare?" + [...picked].map((id) => "id=" + encodeURIComponent(id)).join("&"); } }, "Compare");
  const report = h("button", { type: "button", disabled: true, onclick: () => { open(reportOf(picked), "_blank", "noopener"); } }, "Report");
  const search = h("input", { type: "search", placeholder: "Filter ( / )", "aria-label": "Filter runs", value: filter, oninput: (event) => { filter = event.target.value; draw(); } });
  const none = h("p", { class: "empty", hidden: true });
  function buttons() {
    compare.disabled = picked.size < 2; report.disabled = picked.size < 1;
    compare.textContent = picked.size ? "Compare " + picked.size : "Compare";
  }
  function draw() {
    const wanted = runs.filter((run) => (run.name + " " + (run.title || "") + " " + (run.recipe || "") + " " + (run.dataset || "") + " " + run.status).toLowerCase().includes(filter.toLowerCase()));
    const rows = wanted.map((run) => {
      const kept = shown.get(run.id);
      if (kept && alike(kept.run, run)) return kept.row;   // unchanged rows stay, and keep the focus
      const row = runRow(run, buttons);
      if (kept && kept.row.contains(document.activeElement)) {
        const place = kept.row.querySelectorAll("a, input"), at = [...place].indexOf(document.activeElement);
        kept.row.replaceWith(row);
        row.querySelectorAll("a, input")[at]?.focus();
      }
      shown.set(run.id, { run, row });
      return row;
    });
    if (rows.length !== body.children.length || rows.some((row, i) => body.children[i] !== row)) {
      const focus = document.activeElement;
      body.replaceChildren(...rows);
      if (focus && body.contains(focus)) focus.focus();
    }
    none.hidden = wanted.length > 0;
    none.textContent = runs.length ? "No run matches the filter." : "No runs here yet. Start one: fedveil run fed-cdp --out runs/first";
    buttons();
  }
  async function load() {
    try {
      const data = await ask("/api/runs");
      if (now !== visit) return;
      runs = data.runs;
      const known = new Set(runs.map((run) => run.id));
      for (const id of picked) if (!known.has(id)) picked.delete(id);
      count.textContent = runs.length + (runs.length >= data.most ? " or more" : "") + " in " + data.folder;
      document.querySelector("main .error")?.remove();
      draw();
    } catch (error) {
      if (now !== visit) return;
      document.querySelector("main .error")?.remove();
      main.prepend(failed(error));
    }
    timer = setTimeout(load, runs.some((run) => run.status === "live" || run.status === "waiting") ? 2000 : 8000);
  }
  const count = h("span", { class: "sub" });
  const table = h("table", { class: "runs cards", onkeydown: (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    const all = [...body.querySelectorAll("a, input")], here = document.activeElement, same = all.filter((e) => e.tagName === here.tagName);
    const next = same[same.indexOf(here) + (event.key === "ArrowDown" ? 1 : -1)];
    if (next) { next.focus(); event.preventDefault(); }
  } },
    h("caption", { class: "visually-hidden" }, "Runs"),
    h("thead", {}, h("tr", {}, h("th", { class: "pick" }, h("span", { class: "visually-hidden" }, "Select")), ...["Run", "Status", "Progress"].map((t) => h("th", { scope: "col" }, t)), h("th", { scope: "col", class: "right" }, "Result"), h("th", { scope: "col" }, "Promise"), h("th", { scope: "col", class: "right" }, "Time"))),
    body);
  put(
    h("div", { class: "head" }, h("h1", { tabindex: -1 }, "Runs ", count), h("div", { class: "actions" }, search, compare, report)),
    h("div", { class: "panel scroll" }, table, none),
    h("p", { class: "small muted gap" }, "Promise: what the named observer can learn, with its verdict. A dashed mark means that the promise holds when deployed with secret noise. Arrow keys move through the list, / filters."));
  await load();
}

// --- one run

function promiseTable(table) {
  if (!table.units.length) return h("p", { class: "muted" }, "Nothing was released yet.");
  return h("table", { class: "promise" },
    h("caption", { class: "visually-hidden" }, "What each observer can learn"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Who looks"), ...table.units.map(([unit, text]) => h("th", { scope: "col" }, "about one " + unit + ": " + text)))),
    h("tbody", {}, table.lines.map((line) => h("tr", {}, h("th", { scope: "row" }, line.observer, h("span", { class: "sub" }, line.who)),
      ...line.cells.map((cell, i) => h("td", { "data-about": "about one " + table.units[i][0] }, cell.map((c) => h("div", { class: "claim" }, badge(c.verdict, c.pending, c.weak),
        c.epsilon === null ? null : h("span", { class: "epsilon" }, "ε " + (c.verdict === "sound" ? "≤ " : "= ") + number(c.epsilon)),
        h("div", { class: "why" }, c.meaning + (c.reason ? ". Why: " + (c.plain || c.reason) : "") + (c.pending && !(c.plain || c.reason).includes(table.secret) ? "; " + table.secret : "") + "."))), cell.length ? null : h("span", { class: "muted small" }, "no claim")))))));
}

function budgetTable(run) {
  if (!run.clients.length) return null;
  const limited = run.clients.some((c) => c.budget !== null), rows = run.nodes.rows, words = run.nodes.words;
  const title = rows ? "Nodes" : "Per-client budgets", who = rows ? "Node" : "Client";
  const cell = (c) => words ? h("td", {}, h("span", { class: "word " + (words[c.client] || "").split(" ")[0] }, WORDS[words[c.client]] || words[c.client] || (Object.keys(words).length ? "not asked" : "–"))) : null;
  return h("section", {}, h("h2", {}, title), stageLine(run),
    h("div", { class: "panel budgets", tabindex: 0, role: "region", "aria-label": title }, cards(h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, who), rows ? h("th", { scope: "col", class: "right" }, "Rows") : null, words ? h("th", { scope: "col" }, "This round") : null, h("th", { scope: "col", class: "right" }, "Releases"), h("th", { scope: "col", class: "right" }, "ε spent", h("span", { class: "sub" }, "per " + run.unit)), limited ? h("th", { scope: "col" }, "Of its budget") : null)),
      h("tbody", {}, run.clients.map((c) => h("tr", { "data-client": c.client }, h("th", { scope: "row" }, h("span", { class: "who" }, who + " "), String(c.client)), rows ? h("td", { class: "right" }, number(rows[c.client], 7)) : null, cell(c), h("td", { class: "right" }, String(c.releases)), h("td", { class: "right" }, c.epsilon === null ? "no finite promise" : number(c.epsilon, 4)),
        limited ? h("td", {}, c.budget === null ? "no limit" : [h("progress", { max: c.budget || 1, value: c.epsilon ?? c.budget, class: c.epsilon === null || c.epsilon > c.budget ? "over" : "", "aria-label": who + " " + c.client + " has spent " + number(c.epsilon) + " of " + number(c.budget) }), " " + number(c.budget) + " at δ = " + number(c.delta)]) : null)))))),
    run.client_count > run.clients.length ? h("p", { class: "small muted" }, "The first " + run.clients.length + " of " + run.client_count + " " + who.toLowerCase() + "s.") : null);
}

// What a run over Flower waits for now; nothing between two rounds.
const WORDS = { asked: "working", rejected: "reply not usable", error: "node failed" };
function stageLine(run) {
  const now = run.nodes, count = Object.values(now.words || {});
  if (!now.words || now.stage === "done") return null;
  const closes = now.until ? ", closes at " + new Date(1000 * now.until).toLocaleTimeString([], { hour12: false }) : "";
  const head = "Round " + now.round + (now.attempt > 1 ? ", attempt " + now.attempt : "") + (now.stages.length ? ", secure sum" : ": nodes train");
  const got = count.length ? count.filter((word) => word === "answered").length + " of " + count.length + " answered" : "who is asked stays secret";
  return h("div", { class: "now", id: "now" }, h("p", {}, h("strong", {}, head), " · " + got + closes),
    now.stages.length ? h("ol", { class: "stages", "aria-label": "Stages of the secure sum" }, now.stages.map((name, i) => h("li", { class: i < now.stages.indexOf(now.stage) ? "past" : "", "aria-current": name === now.stage ? "step" : null }, name))) : null);
}

// A run over Flower before it begins: which nodes are there.
function drawWaiting(run) {
  const joined = Object.keys(run.joined), missing = Array.from({ length: run.clients_wanted }, (_, i) => String(i)).filter((c) => !(c in run.joined));
  const until = run.status === "waiting" ? " It waits until " + new Date(1000 * run.until).toLocaleTimeString([], { hour12: false }) + "." : " It does not wait any more: start the missing nodes, then `fedveil flower run` again.";
  document.title = run.name + " · fedveil";
  put(
    h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: -1 }, run.name), h("p", { class: "sub" }, run.recipe + " on " + run.dataset)),
      h("div", { class: "actions" }, h("span", { class: "badge " + run.status, id: "status" }, run.status))),
    h("h2", {}, "Nodes"),
    h("p", { class: "lead", id: "joined" }, joined.length + " of " + run.clients_wanted + " nodes have joined; nothing was asked of them yet." + until),
    h("div", { class: "panel budgets", tabindex: 0, role: "region", "aria-label": "Nodes" }, cards(h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Node"), h("th", { scope: "col", class: "right" }, "Rows"), h("th", { scope: "col" }, "State"))),
      h("tbody", {}, [...joined, ...missing].sort((a, b) => a - b).slice(0, 200).map((c) => h("tr", { "data-client": c }, h("th", { scope: "row" }, h("span", { class: "who" }, "Node "), c), h("td", { class: "right" }, number(run.joined[c], 7)), h("td", {}, c in run.joined ? "joined" : "awaited"))))))));
}

async function showRun(now, query) {
  const id = query.get("id") || "";
  let before = null;
  async function load() {
    let run;
    try { run = await ask("/api/run?id=" + encodeURIComponent(id)); }
    catch (error) {
      if (now !== visit) return;
      if (before) { timer = setTimeout(load, 4000); return; }
      put(h("h1", { tabindex: -1 }, "Run"), failed(error), h("p", {}, h("a", { href: "#/" }, "All runs")));
      return;
    }
    if (now !== visit) return;
    if (!alike(run, before)) run.joined ? drawWaiting(run) : draw(run);
    if (before && before.round !== run.round) said.textContent = "Round " + run.round + " of " + run.rounds + ", " + outcome(run);
    before = run;
    if (run.status === "live" || run.status === "waiting") timer = setTimeout(load, 1500);
  }
  function draw(run) {
    const focused = document.activeElement?.dataset?.key, scroll = document.querySelector(".budgets")?.scrollTop || 0;
    const wanted = document.activeElement === main.querySelector("h1");
    document.title = run.name + " · fedveil";
    put(
      h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: -1 }, run.name), h("p", { class: "sub" }, run.recipe + " on " + run.dataset + (run.created ? " · " + run.created : ""))),
        h("div", { class: "actions" }, h("span", { class: "badge " + run.status, id: "status" }, run.status), h("span", { id: "round", class: "small muted" }, "round " + run.round + " of " + run.rounds),
          h("a", { class: "button", "data-key": "report", href: reportOf([id]), target: "_blank", rel: "noopener" }, "Open report"),
          h("a", { class: "button", "data-key": "private", href: reportOf([id], true), target: "_blank", rel: "noopener" }, "Private report"))),
      run.promise_problem ? h("p", { class: "error", role: "alert" }, "No promise can be checked: " + run.promise_problem) : null,
      h("div", { class: "tiles" }, run.tiles.map((tile) => h("div", { class: "tile " + tile.kind }, h("div", { class: "title" }, tile.title), h("div", { class: "value" }, tile.value), h("div", { class: "text" }, tile.text)))),
      h("h2", {}, "Progress"), h("div", { class: "panel" }, run.charts.length ? charts(run.charts) : h("p", { class: "muted" }, "No round has been written yet.")),
      run.nodes.rows ? budgetTable(run) || "" : "",
      h("h2", {}, "What is promised to whom"), h("p", { class: "lead" }, run.sentence), h("div", { class: "panel scroll" }, promiseTable(run.table)),
      run.nodes.rows ? "" : budgetTable(run) || "",
      h("p", { class: "small muted gap" }, [run.stopped && "Ended: " + run.stopped + ".", run.attacks.length ? "Attacked: " + run.attacks.join(", ") + " (see the report)." : "Not attacked yet.", run.command && "Command: " + run.command].filter(Boolean).join(" ")));
    const budgets = document.querySelector(".budgets");
    if (budgets) budgets.scrollTop = scroll;
    if (focused) main.querySelector('[data-key="' + focused + '"]')?.focus();
    else if (wanted || !before) main.querySelector("h1").focus({ preventScroll: true });
  }
  put(h("h1", { tabindex: -1 }, "Loading…"));
  await load();
}

// --- several runs

async function showCompare(now, query) {
  const ids = query.getAll("id");
  put(h("h1", { tabindex: -1 }, "Compare"), h("p", { class: "muted" }, "Reading " + ids.length + " runs…"));
  let data;
  try { data = await ask("/api/compare?" + ids.map((id) => "id=" + encodeURIComponent(id)).join("&")); }
  catch (error) { if (now === visit) put(h("h1", { tabindex: -1 }, "Compare"), failed(error), h("p", {}, h("a", { href: "#/" }, "All runs"))); return; }
  if (now !== visit) return;
  put(
    h("div", { class: "head" }, h("h1", { tabindex: -1 }, data.rows.length + " runs compared"), h("div", { class: "actions" }, h("a", { class: "button", href: reportOf(ids), target: "_blank", rel: "noopener" }, "Open report"))),
    data.alike ? null : h("p", { class: "error", role: "alert" }, "These runs use different data or different measures: their results cannot be ranked against each other."),
    h("p", { class: "lead" }, "Up and to the left is better. Runs without a sound promise stand apart, however small the number that their method states."),
    h("div", { class: "panel" }, charts([data.pareto, data.curves])),
    h("div", { class: "panel scroll gap" }, cards(h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, ...["Run", "Data"].map((t) => h("th", { scope: "col" }, t)), h("th", { scope: "col", class: "right" }, "Result"), h("th", { scope: "col" }, "Promise"), ...["ε sound", "ε nominal", "Rounds", "Time"].map((t) => h("th", { scope: "col", class: "right" }, t)))),
      h("tbody", {}, data.rows.map((r) => h("tr", {}, h("th", { scope: "row", class: "name" }, h("a", { href: link(r.id) }, r.name), h("span", { class: "sub" }, r.recipe)), h("td", {}, r.dataset), h("td", { class: "right" }, r.result), h("td", {}, badge(r.verdict, r.pending, r.sound > 10), h("span", { class: "sub" }, r.observer + ", per " + r.unit)), h("td", { class: "right" }, r.sound === null ? "none" : number(r.sound)), h("td", { class: "right" }, number(r.nominal)), h("td", { class: "right" }, String(r.rounds)), h("td", { class: "right" }, time(r.seconds)))))))));
  main.querySelector("h1").focus({ preventScroll: true });
}

// --- the calculator

async function showCalculator(now) {
  const field = (name, label, text, attributes, value) => h("div", {}, h("label", { for: name }, label, h("span", { class: "sub" }, text)), h("input", { id: name, name, value, inputmode: "decimal", autocomplete: "off", required: true, ...attributes }));
  const pick = (name, label, text, options) => h("div", {}, h("label", { for: name }, label, h("span", { class: "sub" }, text)), h("select", { id: name, name }, options.map(([value, shown]) => h("option", { value }, shown))));
  const out = h("div", { class: "gap", id: "answers", "aria-live": "polite" });
  const honest = h("input", { type: "checkbox", id: "honest", name: "honest" });
  const wanted = h("input", { id: "wanted", value: "1", inputmode: "decimal", autocomplete: "off" });
  const find = h("button", { type: "button", id: "find" }, "Find σ");
  const form = h("form", { class: "calc panel", "aria-label": "ε calculator" },
    pick("mechanism", "Mechanism", "kind of noise", [["gaussian", "Gaussian"], ["laplace", "Laplace"], ["staircase", "Staircase (steps of the bound)"], ["joint-staircase", "Joint staircase"]]),
    field("sigma", "σ", "noise scale over clip bound; larger hides more", {}, "6"),
    field("rate", "q", "chance that a record is in a step (1: always)", {}, "0.01"),
    field("steps", "Steps", "number of noisy releases", { inputmode: "numeric" }, "10000"),
    field("delta", "δ", "probability that the promise may fail", {}, "1e-5"),
    field("layers", "Layers", "clipped one by one to the same bound", { inputmode: "numeric" }, "1"),
    pick("norm", "Clip norm", "how length is measured", [["l2", "L2"], ["l1", "L1"]]),
    field("dimension", "Dimension", "coordinates with noise (Laplace, staircase)", { inputmode: "numeric" }, "1"),
    h("label", { class: "check", for: "honest" }, honest, "pay the whole δ in every method"),
    h("div", {}, h("button", { type: "submit", class: "primary" }, "Calculate")),
    h("div", {}, h("label", { for: "wanted" }, "Wanted ε", h("span", { class: "sub" }, "the noise that reaches it is put in its field")), wanted),
    h("div", {}, find));
  let asked = 0;
  async function calibrate() {
    const mine = ++asked;
    const values = new URLSearchParams(new FormData(form));
    values.delete("sigma");
    values.set("epsilon", wanted.value);
    find.disabled = true;
    try {
      const found = await ask("/api/sigma?" + values);
      if (mine !== asked || now !== visit) return;
      form.elements.sigma.value = found.sigma;
      await calculate();
    } catch (error) { if (mine === asked && now === visit) out.replaceChildren(failed(error)); }
    finally { find.disabled = false; }
  }
  async function calculate() {
    const mine = ++asked;
    const values = new URLSearchParams(new FormData(form));
    values.set("honest", honest.checked);
    try {
      const rows = await ask("/api/epsilon?" + values);
      if (mine !== asked || now !== visit) return;
      out.replaceChildren(h("div", { class: "panel scroll" }, cards(h("table", {},
        h("caption", { class: "visually-hidden" }, "Epsilon by accountant"),
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Accountant"), h("th", { scope: "col", class: "right" }, "ε"), h("th", { scope: "col", class: "right" }, "δ paid"), h("th", { scope: "col" }, "Verdict"), h("th", { scope: "col" }, "What it means"))),
        h("tbody", {}, rows.map((r) => h("tr", {}, h("th", { scope: "row" }, r.accountant, h("span", { class: "sub" }, r.title)), h("td", { class: "right" }, r.epsilon === null ? "none" : number(r.epsilon, 4)), h("td", { class: "right" }, number(r.delta)), h("td", {}, badge(r.verdict, false, r.epsilon > 10)), h("td", { class: "words" }, (r.strength ? r.strength + ": " : "") + r.meaning, h("span", { class: "sub" }, r.reason)))))))),
        h("p", { class: "small muted gap" }, "Sound rows are all valid at once; the smallest one is the tightest. Nominal rows guarantee nothing."));
    } catch (error) { if (mine === asked && now === visit) out.replaceChildren(failed(error)); }
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); calculate(); });
  form.addEventListener("change", (event) => { if (event.target !== wanted) calculate(); });
  wanted.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); calibrate(); } });
  find.addEventListener("click", calibrate);
  put(h("div", { class: "head" }, h("h1", { tabindex: -1 }, "ε calculator")), h("p", { class: "lead" }, "What do so many noisy steps reveal about one record? Every accountant answers, with what its number is worth."), form, out);
  main.querySelector("h1").focus({ preventScroll: true });
  await calculate();
}

// --- choosing the view

const VIEWS = { "": showRuns, run: showRun, compare: showCompare, calculator: showCalculator };
const TITLES = { "": "Runs", run: "Run", compare: "Compare", calculator: "ε calculator" };

function route() {
  clearTimeout(timer);
  const [name, text] = location.hash.replace(/^#\/?/, "").split("?");
  if (name === "main") return;   // the skip link
  const view = name in VIEWS ? name : "";
  document.title = TITLES[view] + " · fedveil";
  for (const anchor of document.querySelectorAll(".bar nav a")) {
    const own = anchor.dataset.view === (view === "calculator" ? "calculator" : "runs");
    own ? anchor.setAttribute("aria-current", "page") : anchor.removeAttribute("aria-current");
  }
  VIEWS[view](++visit, new URLSearchParams(text || ""));
}
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
    const search = main.querySelector('input[type="search"]');
    if (search) { search.focus(); event.preventDefault(); }
  }
});
addEventListener("hashchange", route);
route();
