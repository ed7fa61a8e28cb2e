// Draws what analysis/view.py gathered. One run is the case of one: then colours stand for kinds of heads,
// with several they stand for runs.
"use strict";

const { runs, kinds, labels, colours } = JSON.parse(document.getElementById("data").textContent);
const meanings = Object.fromEntries([...document.querySelectorAll(".meanings div")].map(({ children: [name, meaning] }) => [name.textContent, meaning.textContent]));
const several = runs.length > 1;
const runColour = (r) => (several ? colours[r % colours.length] : "#222222");
const kindColour = (kind) => (several || !kinds[kind] ? "#2b3a67" : kinds[kind][1]);
const lastStep = Math.max(1, ...runs.flatMap((run) => [...run.train.step, ...run.eval.step, ...run.probe.step]));
const CONFIG = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]] };
const AXIS = { gridcolor: "#ececec", zeroline: false, showline: true, linecolor: "#999", ticks: "outside", tickcolor: "#bbb" };
const FONT = { family: "system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif", size: 13, color: "#222" };

// Plotly reads some tags and entities in any text that it shows: these come out as they went in.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function number(value) {
  return value === null || value === undefined ? "no number" : Math.abs(value) < 10 ? value.toFixed(3).replace(/^-(0\.0*)$/, "$1") : value.toPrecision(4);
}

function make(tag, parent, text = "", className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  node.className = className;
  parent.append(node);
  return node;
}

// ---- lines over steps -----------------------------------------------------------------------------------

function drawLines(id, traces, layout) {
  const stages = stageBorders(), shown = traces.filter((trace) => trace.showlegend !== false);
  const legendRows = Math.ceil(shown.reduce((sum, trace) => sum + 60 + 8 * trace.name.length, 0) / 800);
  const base = {
    font: FONT, hovermode: "x unified", hoversubplots: "axis", hoverlabel: { namelength: -1 },
    margin: { l: 56, r: 16, t: 14 + 16 * stages.rows, b: 56 + 22 * legendRows },
    legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" },
    shapes: stages.shapes, annotations: stages.annotations,
    xaxis: { ...AXIS, title: { text: "step" }, unifiedhovertitle: { text: "step %{x}" }, range: [-0.01 * lastStep, 1.01 * lastStep], ...layout.xaxis },
  };
  Plotly.newPlot(id, traces, { ...base, ...layout, xaxis: base.xaxis }, CONFIG);
}

// A line where the data change, its label above the plot; labels of borders that are near each other take turns.
function stageBorders() {
  const found = new Map();
  runs.forEach((run) => run.stages.forEach((stage) => {
    const key = JSON.stringify([stage.after, stage.mix]);
    found.set(key, { ...stage, names: [...(found.get(key)?.names || []), run.name] });
  }));
  const stages = [...found.values()].sort((a, b) => a.after - b.after);
  const rows = Math.min(stages.length, stages.length > 2 || several ? 3 : 1);
  return {
    rows,
    shapes: stages.filter((stage) => stage.after > 0).map((stage) => ({
      type: "line", x0: stage.after, x1: stage.after, y0: 0, y1: 1, yref: "paper", line: { color: "#777", width: 1, dash: "dot" },
    })),
    annotations: stages.map((stage, i) => ({
      x: stage.after, y: 1, yref: "paper", yanchor: "bottom", yshift: 15 * (i % rows), showarrow: false,
      xanchor: stage.after > 0.7 * lastStep ? "right" : "left", font: { size: 12, color: "#555" },
      text: plain(stage.names.length < runs.length ? `${stage.names.join(", ")}: ${stage.mix}` : stage.mix),
    })),
  };
}

function drawLosses() {
  const traces = runs.flatMap((run, r) => {
    const colour = several ? runColour(r) : "#7a7a7a";
    const x = run.train.step, legendgroup = several ? String(r) : "training";
    return [
      { x, y: run.train.loss, legendgroup, showlegend: false, hoverinfo: "skip", line: { color: colour, width: 1 }, opacity: 0.45 },
      { x, y: run.train.smooth, customdata: run.train.loss, name: several ? plain(run.name) : "training", legendgroup, line: { color: colour, width: 2 },
        mode: x.length > 1 ? "lines" : "markers", hovertemplate: "%{customdata:.3f} (mean %{y:.3f})" },
      { x: run.eval.step, y: run.eval.loss, customdata: run.eval.loss_sem.map((sem) => sem === null ? "" : ` ± ${sem.toFixed(3)}`), name: plain(several ? `${run.name}, validation` : `validation on ${run.validated_on}`), legendgroup: several ? String(r) : "validation",
        showlegend: !several || !x.length, mode: "lines+markers",
        line: { color: several ? colour : "#111", width: 2, dash: "dot" }, marker: { size: 8, symbol: "diamond" },
        hovertemplate: "%{y:.3f}%{customdata}" },
    ].filter((trace) => trace.x.length);
  });
  drawLines("losses", traces, { height: 380, yaxis: { ...AXIS, title: { text: "loss", standoff: 8 } } });
}

// One panel for the scores of one run, a panel each where runs are laid over each other; the losses below.
function drawPhase() {
  const crossed = runs.flatMap((run) => run.crossed.map(({ kind }) => kind));
  const shown = Object.keys(kinds).filter((kind) => ["induction", "previous", "sink", ...crossed].includes(kind)), panels = several ? shown.length : 1, layout = {}, traces = [];
  const share = several ? 1 / (panels + 1.4) : 0.58, gap = 0.05;
  runs.forEach((run, r) => {
    const x = run.probe.step, mode = x.length > 1 ? "lines" : "markers", legendgroup = several ? String(r) : undefined;
    if (!x.length) return;
    shown.forEach((kind, k) => traces.push({
      x, mode, legendgroup, yaxis: several && k ? `y${k + 1}` : "y", line: { color: several ? runColour(r) : kindColour(kind), width: 2.5 },
      y: run.probe[kind].map((found) => found && found[0]), customdata: run.probe[kind].map((found) => found && found[1]),
      name: plain(several ? run.name : `best ${kinds[kind][0]}`), showlegend: !several || k === 0,
      hovertemplate: `%{y:.3f}, head %{customdata}${several ? ` (${kinds[kind][0]})` : ""}`,
    }));
    shown.forEach((kind, k) => traces.push(...crossings(run, r, kind, several && k ? `y${k + 1}` : "y")));
    [["repeat_loss_2", "second time", "solid"], ["repeat_loss_1", "first time", "dot"]].forEach(([key, what, dash]) => traces.push({
      x, y: run.probe[key], mode, legendgroup, yaxis: `y${panels + 1}`, line: { color: several ? runColour(r) : "#444", width: 2, dash },
      name: plain(several ? `${run.name}, ${what}` : `loss, ${what}`), showlegend: !several, hovertemplate: "%{y:.3f}",
    }));
  });
  for (let k = 0; k < panels; k++) {
    const title = several ? kinds[shown[k]][0] : "score";
    layout[k ? `yaxis${k + 1}` : "yaxis"] = { ...AXIS, title: { text: title }, range: [0, 1.02], domain: [1 - (k + 1) * share + gap, 1 - k * share] };
  }
  layout[`yaxis${panels + 1}`] = { ...AXIS, title: { text: "loss" }, rangemode: "tozero", domain: [0, 1 - panels * share] };
  drawLines("phase", traces, { ...layout, height: several ? 760 : 500, xaxis: { anchor: `y${panels + 1}` } });
  const fell = runs.flatMap((run, r) => (run.fell === null ? [] : [{
    type: "line", x0: run.fell, x1: run.fell, y0: 0, y1: 1 - panels * share, yref: "paper", line: { color: runColour(r), width: 1.5, dash: "dash" },
  }]));
  const node = document.getElementById("phase");
  Plotly.relayout(node, { shapes: [...(node.layout.shapes || []), ...fell] });
}

// A mark where each head got its label first. Heads of one step are told by one of them: lists stay short.
function crossings(run, r, kind, yaxis) {
  const marks = run.crossed.filter((mark) => mark.kind === kind), x = marks.map(({ step }) => step);
  const said = marks.map(({ step }, n) => {
    const heads = marks.filter((mark) => mark.step === step).map(({ head }) => head);
    return x.indexOf(step) === n ? `labelled from here: ${heads.slice(0, 8).join(", ")}${heads.length > 8 ? ` and ${heads.length - 8} more` : ""}` : "";
  });
  return marks.length ? [{
    x, y: marks.map(({ score }) => score), mode: "markers", yaxis, showlegend: false, name: kinds[kind][0],
    text: said, hoverinfo: said.map((text) => (text ? "text+name" : "skip")), legendgroup: several ? String(r) : undefined,
    marker: { symbol: "triangle-down", size: 11, color: several ? runColour(r) : kindColour(kind), line: { color: "#fff", width: 1 } },
  }] : [];
}

// ---- head maps ------------------------------------------------------------------------------------------

const steps = [...new Set(runs.flatMap((run) => run.maps.step))].sort((a, b) => a - b);
const maps = []; // {node, run, name}

function statistics() {
  const all = [...new Set(runs.flatMap((run) => Object.keys(run.maps.scores)))], known = Object.keys(meanings);
  const order = (name) => (known.includes(name) ? known.indexOf(name) : known.length);
  all.sort((a, b) => order(a) - order(b));
  const isVariant = (name) => all.includes(name.replace(/_(short|long)$/, "")) && /_(short|long)$/.test(name);
  return [all.filter((name) => !isVariant(name)), all.filter(isVariant)];
}

// 0 to 1 for what is a share by definition, else from the lowest to the highest number of all runs and steps.
function rangeOf(name) {
  const known = name.replace(/_(short|long)$/, "");
  if (known in meanings && !["entropy", "max_logit", "head_norm"].includes(known)) return [0, 1];
  let [low, high] = [Infinity, -Infinity];
  for (const value of runs.flatMap((run) => (run.maps.scores[name] || []).flat(2))) {
    if (value === null) continue;
    [low, high] = [Math.min(low, value), Math.max(high, value)];
  }
  return low < high ? [low, high] : [Math.min(low, 0), Math.max(high, 1)];
}

function frame(run, name, step) {
  const k = Math.max(0, run.maps.step.findLastIndex((probed) => probed <= step)), z = run.maps.scores[name][k] || [];
  const text = z.map((row, i) => row.map((value, j) => {
    const [, , , uniform = null, random = null] = run.heads[`${i}.${j}`]?.scores[name] || [];
    const nulls = random === null ? "" : `<br>uniform attention ${number(uniform)}<br>random initialisation ${number(random)}`;
    return `${plain(name)}<br>head ${i}.${j}${run.maps.step[k] === null ? "" : `, step ${run.maps.step[k]}`}<br><b>${number(value)}</b>${nulls}`;
  }));
  return { z, text };
}

function drawMap(parent, name, run, heading) {
  const node = make("div", parent), { z, text } = frame(run, name, steps.at(-1));
  const [L, H] = [z.length, z[0]?.length || 1], [zmin, zmax] = rangeOf(name), cell = Math.min(44, 190 / Math.max(L, H));
  const ticks = { dtick: Math.ceil(Math.max(L, H) / 8), showgrid: false, zeroline: false, ticks: "", tickfont: { size: 11 }, fixedrange: true };
  const bar = { thickness: 8, outlinewidth: 0, tickvals: [zmin, zmax], ticktext: [zmin, zmax].map((v) => String(+v.toPrecision(2))), tickfont: { size: 10 }, xpad: 4 };
  Plotly.newPlot(node, [{
    type: "heatmap", z, text, zmin, zmax, xgap: 1, ygap: 1, colorscale: [[0, "#f4f4f4"], [1, kindColour(name.replace(/_(short|long)$/, ""))]],
    colorbar: bar, hovertemplate: "%{text}<extra></extra>", hoverongaps: true,
  }], {
    font: FONT, width: 66 + Math.max(90, cell * H), height: 24 + Math.max(40, cell * L), margin: { l: 22, r: 44, t: 4, b: 20 },
    xaxis: { ...ticks, range: [-0.5, H - 0.5] }, yaxis: { ...ticks, range: [L - 0.5, -0.5] }, plot_bgcolor: "#fff",
  }, { ...CONFIG, displayModeBar: false, responsive: false });
  node.dataset.name = name;
  node.on("plotly_click", ({ points: [{ x, y }] }) => go(runs.indexOf(run), `${y}.${x}`));
  maps.push({ node, run, name, heading });
}

function drawCards(parent, names) {
  for (const name of names) {
    const card = make("figure", parent), caption = make("figcaption", card);
    make("b", caption, name);
    make("div", caption, meanings[name] || "");
    const row = make("div", card, "", "row");
    runs.forEach((run, r) => {
      if (!run.maps.scores[name]) return;
      const cell = make("div", row);
      const heading = several ? make("h4", cell, run.name) : null;
      heading?.style.setProperty("--c", runColour(r));
      drawMap(cell, name, run, heading);
    });
  }
}

function drawMaps() {
  const slider = document.getElementById("step"), play = document.getElementById("play"), more = document.getElementById("more");
  const [headline, variants] = statistics();
  let timer = null;
  slider.parentElement.hidden = steps.length < 2;
  slider.max = slider.value = steps.length - 1;
  const show = () => {
    const step = steps[slider.value];
    document.getElementById("at").textContent = `step ${step?.toLocaleString("en")}`;
    for (const { node, run, name, heading } of maps) {
      const { z, text } = frame(run, name, step), last = run.maps.step.at(-1);
      if (heading) heading.textContent = last < step ? `${run.name}, its last step ${last.toLocaleString("en")}` : run.name;
      if (node.offsetParent) Plotly.restyle(node, { z: [z], text: [text] });
    }
  };
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "Play"; };
  slider.addEventListener("input", show);
  slider.addEventListener("pointerdown", stop);
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (+slider.value === steps.length - 1) {
      slider.value = 0;
      show();
    }
    play.textContent = "Pause";
    timer = setInterval(() => {
      slider.value = +slider.value + 1;
      show();
      if (+slider.value === steps.length - 1) stop();
    }, 400);
  });
  drawCards(document.getElementById("maps"), headline);
  more.hidden = !variants.length;
  more.addEventListener("toggle", () => {
    const box = more.querySelector(".maps");
    if (!box.childElementCount) drawCards(box, variants);
    show();
  });
  show();
}

// ---- one head -------------------------------------------------------------------------------------------

function mixed(colour, share) {
  return [1, 3, 5].map((at) => Math.round(250 + share * (parseInt(colour.slice(at, at + 2), 16) - 250)));
}

const MONO = "ui-monospace, Menlo, Consolas, monospace", LONGEST_LABEL = 12, SMALLEST_FONT = 6;

function shortened(token) {
  const letters = [...token];
  return letters.length > LONGEST_LABEL ? letters.slice(0, LONGEST_LABEL - 1).join("") + "…" : token;
}

// Labels of one letter stand upright over the keys, longer ones are turned; BOS among letters is stacked.
// Plotly finds the margins. Where not even the smallest font gives each label room, only every second is shown, or
// every third and so on.
function labelled(node, tokens) {
  const T = tokens.length, labels = tokens.map(shortened), turned = tokens.some((token) => token !== "BOS" && [...token].length > 1);
  const context = document.createElement("canvas").getContext("2d");
  context.font = `100px ${MONO}`;
  const longest = Math.max(...labels.map((label) => context.measureText(label).width)) / 100;
  // Lines of single letters may be as dense as their font; beside the T cells there are labels and titles.
  const line = turned ? 1.15 : 1, size = (node.clientWidth - 60) / (line * T + longest), font = Math.max(SMALLEST_FONT, Math.min(13, Math.floor(size)));
  const cell = (node.clientWidth - 60 - longest * font) / T, every = Math.ceil(line * font / cell);
  const crowded = !turned && longest * font > every * cell, shown = tokens.map((_, i) => i).filter((i) => i % every === 0);
  const ticks = {
    tickvals: shown, ticktext: shown.map((i) => plain(labels[i])), tickangle: 0, ticks: "", showgrid: false, zeroline: false,
    tickfont: { family: MONO, size: font }, ticklabelstandoff: 2, automargin: true,
  };
  const keys = crowded ? ticks.ticktext.map((label) => (label === "BOS" ? "B<br>O<br>S" : label)) : ticks.ticktext;
  return {
    xaxis: { ...ticks, ticktext: keys, tickangle: turned ? -90 : 0, side: "top", range: [-0.5, T - 0.5], title: { text: "key", standoff: 6 } },
    yaxis: { ...ticks, range: [T - 0.5, -0.5], title: { text: "query", standoff: 6 } },
  };
}

// Weights come as a byte each, 255 times the square root, a row per query up to itself.
function drawMatrix(node, { tokens, weights }, head, colour) {
  const shown = tokens.map(plain), bytes = atob(weights[head]);
  const z = tokens.map((_, i) => tokens.map((_, j) => (j <= i ? (bytes.charCodeAt((i * (i + 1)) / 2 + j) / 255) ** 2 : null)));
  const text = z.map((row, i) => row.map((weight, j) => `query ${i}: <b>${shown[i]}</b><br>key ${j}: <b>${shown[j]}</b><br>weight ${+(weight || 0).toPrecision(2)}`));
  const colorscale = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10].map((n) => [n * n / 100, `rgb(${mixed(colour, n / 10)})`]);
  Plotly.react(node, [{
    type: "heatmap", z, text, zmin: 0, zmax: 1, colorscale, hovertemplate: "%{text}<extra></extra>", hoverongaps: false,
    colorbar: {
      thickness: 10, outlinewidth: 0, len: 0.45, x: 0.97, xanchor: "right", y: 0.97, yanchor: "top",
      tickvals: [0, 0.1, 0.25, 0.5, 1], title: { text: "weight" },
    },
  }], {
    font: FONT, margin: { l: 30, r: 8, t: 30, b: 10 }, ...labelled(node, tokens),
  }, CONFIG);
}

// A head on its own is a place of the page, `#head-3.1`: it can be linked, and the browser goes back to it.
const address = (r, head) => `#${several ? `run-${r + 1}-` : ""}head-${head}`;

function headLink(parent, r, head, text = head) {
  const link = make("a", parent, text, "head");
  link.href = address(r, head);
  Object.assign(link.dataset, { run: r, head });
  return link;
}

function go(r, head) {
  location.hash = address(r, head);
  follow(true);
}

// Of many labels the first colours what has one colour. Before there are labels: what the head is the best of.
const labelsOf = (run, head) => run.typed ? run.heads[head].labels : Object.keys(run.best).filter((kind) => run.best[kind] === head).map((kind) => kinds[kind][0]);
const headColour = (run, head) => labels[labelsOf(run, head)[0]] || "#2b3a67";
const short = (value) => (value === null || value === undefined ? "none" : Math.abs(value) < 10 ? value.toFixed(2).replace(/^-(0\.0*)$/, "$1") : value.toPrecision(3));
const interval = (ci, show = short) => (ci && ci[0] !== null ? ` (${show(ci[0])} to ${show(ci[1])})` : "");
const named = (label, head) => label + (label === "previous-token" && head.scores.previous2?.[0] > head.scores.previous?.[0] ? ", two back" : "");

function chip(parent, label, text = label) {
  const node = make("span", parent, text, "label");
  node.style.setProperty("--c", labels[label] || "#ccc");
  return node;
}

function drawGrid(box, r) {
  const run = runs[r], grid = box.querySelector(".grid"), legend = box.querySelector(".legend"), names = Object.keys(run.heads);
  const [L, H] = [0, 1].map((at) => 1 + Math.max(...names.map((name) => +name.split(".")[at])));
  const cell = Math.max(11, Math.min(44, Math.floor(400 / H), Math.floor(520 / L))), every = Math.ceil(16 / cell);
  grid.style.gridTemplateColumns = `22px repeat(${H}, minmax(0, ${cell}px))`;
  const tick = (n, row, column) => { if (n % every === 0) make("span", grid, n).style.gridArea = `${row} / ${column}`; };
  for (let i = 0; i < L; i++) tick(i, i + 2, 1);
  for (let j = 0; j < H; j++) tick(j, 1, j + 2);
  for (const name of names.sort((a, b) => a.split(".")[0] - b.split(".")[0] || a.split(".")[1] - b.split(".")[1])) {
    const [i, j] = name.split(".").map(Number), found = labelsOf(run, name), link = headLink(grid, r, name, "");
    link.setAttribute("aria-label", `head ${name}: ${found.join(", ") || "untyped"}`);
    link.style.gridArea = `${i + 2} / ${j + 2}`;
    const stripes = found.map((label, n) => `${labels[label]} ${(100 * n) / found.length}% ${(100 * (n + 1)) / found.length}%`);
    if (found.length) link.style.background = `linear-gradient(135deg, ${stripes.join(", ")})`;
  }
  const known = Object.keys(run.heads), order = Object.keys(labels).filter((label) => known.some((name) => labelsOf(run, name).includes(label)));
  for (const label of order) {
    const kind = Object.keys(kinds).find((kind) => kinds[kind][0] === label), score = (name) => run.heads[name].scores[kind]?.[0] || 0;
    const item = make("li", legend), found = known.filter((name) => labelsOf(run, name).includes(label)).sort((a, b) => score(b) - score(a));
    chip(item, label, run.typed ? `${label} (${found.length})` : `best ${label}`);
    for (const name of found.slice(0, 5)) {
      item.append(" ");
      headLink(item, r, name);
    }
    if (found.length > 5) item.append(" …");
  }
  const untyped = known.filter((name) => !labelsOf(run, name).length).length;
  if (untyped && run.typed) chip(make("li", legend), "", `untyped (${untyped} of ${known.length})`);
}

// One number on its scale from `low` to `high`: a dot, its interval a line, what it is compared with as marks.
function gauge(parent, name, { value, ci, bar, diamond, range: [low, high], colour, about = "", show = short }) {
  const row = make("div", parent, "", "gauge"), at = (x) => `${100 * Math.max(0, Math.min(1, (x - low) / (high - low)))}%`;
  row.title = about;
  row.style.setProperty("--c", colour);
  make("span", row, name);
  const track = make("span", row, "", "track"), mark = (kind, x) => { if (x !== null && x !== undefined) make("i", track, "", kind).style.left = at(x); };
  if (ci && ci[0] !== null) Object.assign(make("i", track, "", "ci").style, { left: at(ci[0]), right: `calc(100% - ${at(ci[1])})` });
  mark("bar", bar);
  mark("diamond", diamond);
  mark("dot", value);
  make("small", make("span", row, show(value)), interval(ci, show));
}

function block(parent, title, ...key) {
  const node = make("div", parent);
  make("h4", node, title);
  const about = make("p", node);
  for (const [kind, meaning] of key) {
    if (kind) make("i", about, "", kind);
    about.append(meaning);
  }
  return node;
}

function drawScores(parent, run, head) {
  const { scores } = run.heads[head], box = block(parent, `Scores of head ${head}`, ["dot", "score and 95 % interval"], ["bar", "uniform attention"], ["diamond", "random initialisation"]);
  for (const name of statistics()[0].filter((name) => scores[name])) {
    const [value, low, high, uniform, random] = scores[name], about = `${meanings[name] || name}: ${number(value)}${interval([low, high], number)}; uniform attention ${number(uniform)}, random initialisation ${number(random)}`;
    const known = [...rangeOf(name), low, high, uniform, random].filter((bound) => bound !== null), range = [Math.min(...known), Math.max(...known)];
    gauge(box, name, { value, ci: [low, high], bar: uniform, diamond: random, range, colour: kindColour(name), about });
  }
}

const EFFECTS = [["natural", "text"], ["repeat", "repeat"]], MEANS = ["mean", "zero"];

function drawEffects(parent, run, head) {
  const { ablation, copying, syntax } = run.heads[head];
  if (!run.typed) return;
  const box = block(parent, "What its removal changes", ["", ablation ? "By how much the loss rises, in nats per token, on natural text and on the second time of a repeat, when the head gives its mean instead, or zero. " : "Not measured: "], ["", ablation ? "" : "--ablate labelled removes each head with a label, --ablate all every head."], ...(ablation ? [["dot", "change and 95 % interval"], ["bar", "no change"]] : []));
  for (const [probe, words] of ablation ? EFFECTS : []) {
    const bounds = Object.values(run.heads).flatMap((one) => MEANS.flatMap((how) => one.ablation?.[how]?.[probe].ci || [])), range = [Math.min(0, ...bounds), Math.max(0.01, ...bounds)];
    for (const how of MEANS) {
      const { change, ci } = ablation[how][probe];
      gauge(box, `${words}, ${how}`, { value: change, ci, bar: 0, range, colour: "#2b3a67", show: number });
    }
  }
  if (copying) {
    const box = block(parent, "Copying", ["", "Whether it raises (1) or lowers (-1) the logit of the token that it looks at, by its weights alone. "], ["dot", "this head"], ["diamond", "random initialisation"]);
    gauge(box, "OV circuit", { value: copying.score, diamond: copying.random_init, range: [-1, 1], colour: "#2b3a67" });
  }
  if (syntax && Object.keys(syntax).length) {
    const box = block(parent, "Syntax", ["", "Share of held-out arcs where the other word gets most weight. "], ["dot", "this head"], ["bar", "best offset"], ["diamond", "random initialisation"]), known = run.summary.syntax?.relations || {};
    for (const [relation, value] of Object.entries(syntax).sort(([, a], [, b]) => b - a)) {
      gauge(box, relation, { value, bar: known[relation]?.offset_accuracy, diamond: known[relation]?.random_init, range: [0, 1], colour: labels["syntactic:"] });
    }
  }
}

const desks = [...document.querySelectorAll(".heads")].map((box) => {
  const r = +box.dataset.run, run = runs[r], find = (name) => box.querySelector(name), state = { text: 0, head: null };
  drawGrid(box, r);
  const showMatrix = () => {
    const text = run.attention[state.text], there = text?.weights[state.head];
    find("figure").hidden = !text;
    if (!text) return;
    const cut = text.of > text.tokens.length ? `, the first ${text.tokens.length} of ${text.of} tokens` : "";
    const count = Object.keys(text.weights).length, none = `not on this page, which has room for the attention of ${count} of ${Object.keys(run.heads).length} heads: labelled ones first`;
    find("figcaption").textContent = there ? `head ${state.head} on ${text.title}${cut}` : `head ${state.head}: ${none}`;
    find(".matrix").hidden = !there;
    if (there) drawMatrix(find(".matrix"), text, state.head, headColour(run, state.head));
    find(".texts").childNodes.forEach((button, n) => button.setAttribute("aria-pressed", String(n === state.text)));
  };
  run.attention.forEach(({ title }, n) => {
    const button = make("button", find(".texts"), title);
    button.type = "button";
    button.addEventListener("click", () => { state.text = n; showMatrix(); });
  });
  const show = (head) => {
    if (head === state.head) return;
    state.head = head;
    box.querySelectorAll(".grid a").forEach((link) => link.setAttribute("aria-current", String(link.dataset.head === head)));
    find("h3").textContent = `Head ${head}`;
    find(".labels").replaceChildren();
    for (const label of labelsOf(run, head)) {
      const since = run.heads[head].crossed?.[label];
      chip(find(".labels"), label, (run.typed ? named(label, run.heads[head]) : `best ${label}`) + (since === undefined ? "" : ` since step ${since.toLocaleString("en")}`));
    }
    if (run.typed && !labelsOf(run, head).length) chip(find(".labels"), "", "untyped");
    for (const [name, draw] of [[".scores", drawScores], [".effects", drawEffects]]) {
      find(name).replaceChildren();
      draw(find(name), run, head);
    }
    showMatrix();
  };
  addEventListener("resize", showMatrix);
  return { r, run, show, first: Object.values(run.best)[0] || Object.keys(run.heads)[0], look: find(".look") };
});

function follow(reveal) {
  const [, number, head] = location.hash.match(/^#(?:run-(\d+)-)?head-(\d+\.\d+)$/) || [];
  for (const { r, run, show, first, look } of desks) {
    const meant = r === (number || 1) - 1 && head in run.heads;
    if (meant) show(head);
    else if (!head || !look.querySelector("h3").textContent) show(first);
    const top = look.getBoundingClientRect().top;
    if (meant && reveal && (top < 0 || top > innerHeight * 0.6)) look.scrollIntoView();
  }
}

// ---- hovering over heads --------------------------------------------------------------------------------

const tip = document.getElementById("tip");

function tell(link) {
  tip.hidden = !link;
  if (!link) return;
  const { run: r, head } = link.dataset, { scores } = runs[r].heads[head], box = link.getBoundingClientRect();
  tip.replaceChildren();
  make("b", tip, `head ${head} `);
  if (runs[r].typed) tip.append(labelsOf(runs[r], head).join(", ") || "untyped");
  const table = make("table", tip);
  for (const kind of Object.keys(kinds).filter((kind) => scores[kind])) {
    const [value, low, high, uniform, random] = scores[kind], row = make("tr", table);
    make("td", row, kind);
    make("b", make("td", row), short(value));
    make("td", row, interval([low, high]));
    make("small", make("td", row), random === null ? "" : `null ${short(uniform)}, ${short(random)}`);
  }
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${box.bottom + 8 + tip.offsetHeight < innerHeight ? box.bottom + 8 : box.top - tip.offsetHeight - 8}px`;
}

for (const kind of ["mouseover", "focusin"]) addEventListener(kind, ({ target }) => tell(target.closest?.("a.head")));
addEventListener("scroll", () => tell(null));
addEventListener("hashchange", () => follow(false));
addEventListener("click", ({ target }) => {
  const link = target.closest("a.head"), row = target.closest("tr[data-head]");
  if (link || row) setTimeout(() => (link ? follow(true) : go(+row.dataset.run, row.dataset.head)));
});

// ---- tables ---------------------------------------------------------------------------------------------

// Columns: title, what it sorts by, and what a cell shows, text or a function that fills it.
function drawTable(parent, title, about, columns, rows) {
  if (!rows.length) return;
  make("h3", parent, title);
  if (about) make("p", parent, about);
  const table = make("table", make("div", parent, "", rows.length > 32 ? "scroll" : "scroll whole")), top = make("tr", make("thead", table)), body = make("tbody", table);
  const lines = rows.map((row) => {
    const line = make("tr", body);
    if (row.head && row.scores) Object.assign(line.dataset, { run: row.r, head: row.name });
    columns.forEach(([, , fill], n) => {
      const cell = make(n ? "td" : "th", line), said = fill(row, cell);
      if (typeof said === "string") cell.textContent = said;
    });
    return { row, line };
  });
  columns.forEach(([name, key], n) => {
    const head = make("th", top), button = make("button", head, name);
    button.type = "button";
    button.addEventListener("click", () => {
      const falling = head.ariaSort ? head.ariaSort === "ascending" : typeof key(rows[0]) !== "string";
      top.querySelectorAll("th").forEach((other) => { other.ariaSort = null; });
      head.ariaSort = falling ? "descending" : "ascending";
      const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
      const known = (value) => value !== null && value !== undefined && value !== "";
      lines.sort(({ row: a }, { row: b }) => known(key(b)) - known(key(a)) || (known(key(a)) ? (falling ? -1 : 1) * compare(key(a), key(b)) : 0));
      body.append(...lines.map(({ line }) => line));
    });
  });
}

const heads = (r, places) => (row, cell) => {
  const names = places(row).map(([i, j]) => `${i}.${j}`);
  names.slice(0, 8).forEach((name) => { headLink(cell, r, name); cell.append(" "); });
  if (names.length > 8) cell.append(`and ${names.length - 8} more`);
};
const numeric = (title, key) => [title, key, (row) => short(key(row))];
const withInterval = (title, effect) => [title, (row) => effect(row)?.change ?? null, (row, cell) => {
  cell.textContent = effect(row) ? number(effect(row).change) : "not measured";
  if (effect(row)) make("small", make("div", cell), interval(effect(row).ci, number));
}];

function drawTables(box) {
  const r = +box.dataset.run, run = runs[r], rows = Object.entries(run.heads).map(([name, head]) => ({ r, name, ...head }));
  const { ablation, circuits, syntax } = run.summary, removed = rows.some((row) => row.ablation);
  drawTable(box, "Heads", run.typed ? "In brackets the 95 % interval over probe sequences; below, the null: what uniform attention and a randomly initialised model score." + (removed ? " Removal: change in loss, nats per token, when the head is replaced by its mean." : "") : "Scores of the last probe.", [
    ["head", ({ name }) => name, ({ name }, cell) => { headLink(cell, r, name); }],
    ["labels", (row) => labelsOf(run, row.name).join(" "), (row, cell) => {
      row.labels.forEach((label) => chip(cell, label, named(label, row)));
      if (!row.labels.length) chip(cell, "", "untyped");
    }],
    ...Object.keys(kinds).map((kind) => [kind, (row) => row.scores[kind]?.[0] ?? null, (row, cell) => {
      const [value, low, high, uniform, random] = row.scores[kind] || [];
      cell.className = "score";
      cell.style.cssText = `--c: ${kinds[kind][1]}; --share: ${value || 0}`;
      make("b", cell, short(value));
      make("small", cell, interval([low ?? null, high]));
      if ((random ?? null) !== null) make("small", make("div", cell), `null ${short(uniform)}, ${short(random)}`);
    }]),
    ...(removed ? EFFECTS.map(([probe, words]) => withInterval(`removal, ${words}`, (row) => row.ablation?.mean[probe])) : []),
    ...(rows.some((row) => row.copying) ? [numeric("copying", (row) => row.copying?.score)] : []),
  ], rows);
  drawTable(box, "Syntax", syntax && `Best head per relation, chosen on one half of the arcs of ${syntax.treebank} and scored on the other; so is the best offset. ${syntax.sentences} sentences, ${syntax.words} words${syntax.cut ? `; ${syntax.cut} sentences were cut to the context` : ""}${Object.entries(syntax.skipped).map(([reason, n]) => `; left out: ${n} ${reason}`).join("")}. A label needs n of 200.`, [
    ["relation", (row) => row.relation, (row) => row.relation],
    ["n", (row) => row.n, (row) => String(row.n)],
    ["best head", (row) => row.head?.join("."), heads(r, (row) => (row.head ? [row.head] : []))],
    ["accuracy", (row) => row.accuracy, (row, cell) => { make("b", cell, short(row.accuracy)); make("small", cell, interval(row.ci)); }],
    ["best offset", (row) => row.offset_accuracy, (row) => `${short(row.offset_accuracy)} (at ${row.offset})`],
    numeric("random initialisation", (row) => row.random_init),
    numeric("margin", (row) => row.margin),
  ], Object.entries(syntax?.relations || {}).map(([relation, row]) => ({ relation, ...row })));
  drawTable(box, "All heads of a label removed", ablation && `Change in loss, nats per token, with 95 % interval; the control removes as many heads at random, or as many as have no label. Untouched, the model loses ${number(ablation.baseline.natural)} on natural text and ${number(ablation.baseline.repeat)} on the second repeat.`, [
    ["label", (row) => row.label, (row, cell) => { if (row.draws) cell.textContent = row.draws[0].length < row.size ? `control, ${row.draws[0].length} of ${row.size}` : "control"; else chip(cell, row.label); }],
    ["heads", (row) => row.size ?? row.heads.length, (row, cell) => row.draws ? `${row.draws.map((draw) => draw.map((head) => head.join(".")).join(" ")).join(" or ")}, ${row.pool}` : heads(r, () => row.heads)(row, cell)],
    ...EFFECTS.flatMap(([probe, words]) => MEANS.map((how) => withInterval(`${words}, ${how}`, (row) => row[how][probe]))),
  ], (ablation?.groups || []).flatMap((group) => [group, ...(group.control ? [{ ...group.control, label: group.label, size: group.heads.length }] : [])]));
  drawTable(box, "Circuits", "How much the keys of the induction head read what the previous-token head writes (K-composition), beside the mean of all other earlier heads and the same two heads of a randomly initialised model (none where those write nothing yet).", [
    ["previous-token", (row) => row.previous.join("."), heads(r, (row) => [row.previous])],
    ["induction", (row) => row.induction.join("."), heads(r, (row) => [row.induction])],
    numeric("K-composition", (row) => row.k_composition), numeric("other heads", (row) => row.others), numeric("random initialisation", (row) => row.random_init),
  ], circuits || []);
}

if (document.getElementById("losses")) drawLosses();
if (document.getElementById("phase")) drawPhase();
if (document.getElementById("maps")) drawMaps();
document.querySelectorAll(".tables").forEach(drawTables);
follow(true);
