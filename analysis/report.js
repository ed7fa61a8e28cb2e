// Draws what analysis/view.py gathered. One run is the case of one: then colours stand for kinds of heads,
// with several they stand for runs.
"use strict";

const { runs, kinds, colours } = JSON.parse(document.getElementById("data").textContent);
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
  return value === null || value === undefined ? "no number" : Math.abs(value) < 10 ? value.toFixed(3) : value.toPrecision(4);
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
  const shown = ["induction", "previous", "sink"], panels = several ? shown.length : 1, layout = {}, traces = [];
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
    const none = run.heads[`${i}.${j}`]?.null[name];
    const nulls = none ? `<br>uniform attention ${number(none.uniform)}<br>random initialisation ${number(none.random_init)}` : "";
    return `${plain(name)}<br>head ${i}.${j}, step ${run.maps.step[k]}<br><b>${number(value)}</b>${nulls}`;
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
  slider.max = slider.value = steps.length - 1;
  const show = () => {
    const step = steps[slider.value];
    document.getElementById("at").textContent = `step ${step.toLocaleString("en")}`;
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

// ---- attention on a text --------------------------------------------------------------------------------

function mixed(colour, share) {
  return [1, 3, 5].map((at) => Math.round(250 + share * (parseInt(colour.slice(at, at + 2), 16) - 250)));
}

function drawThumbnail(canvas, rows, colour) {
  const T = (canvas.width = canvas.height = rows.length), context = canvas.getContext("2d"), image = context.createImageData(T, T);
  image.data.fill(255);
  rows.forEach((row, i) => row.forEach((weight, j) => image.data.set(mixed(colour, Math.sqrt(weight / 1000)), 4 * (i * T + j))));
  context.putImageData(image, 0, 0);
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

function drawMatrix(node, { tokens, thousandths }, head, colour) {
  const shown = tokens.map(plain), rows = thousandths[head];
  const z = tokens.map((_, i) => tokens.map((_, j) => (j <= i ? rows[i][j] / 1000 : null)));
  const text = z.map((row, i) => row.map((weight, j) => `query ${i}: <b>${shown[i]}</b><br>key ${j}: <b>${shown[j]}</b><br>weight ${number(weight)}`));
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

// Thumbnails stand at their layer and head; the buttons above choose the text and the best head of each kind.
function drawAttention(box) {
  const run = runs[box.dataset.run], find = (name) => box.querySelector(`.${name}`);
  const names = Object.keys(run.attention[0].thousandths), places = names.map((name) => name.split(".").map(Number));
  // That of its first label or, before there are any, of what it is the best of.
  const kindOf = (head) => Object.keys(kinds).find((kind) => run.typed ? run.heads[head]?.labels.includes(kinds[kind][0]) : run.best[kind] === head);
  const colourOf = (head) => kinds[kindOf(head)]?.[1] || "#2b3a67";
  const state = { text: 0, head: names[0] };
  const buttons = [];
  const button = (parent, key, value, label, colour) => {
    const node = make("button", parent, label);
    node.type = "button";
    node.style.setProperty("--c", colour);
    node.addEventListener("click", () => { state[key] = value; show(); });
    buttons.push({ node, key, value });
    return node;
  };
  const showMatrix = () => drawMatrix(find("matrix"), run.attention[state.text], state.head, colourOf(state.head));
  const show = () => {
    const { text, head } = state;
    buttons.forEach(({ node, key, value }) => node.setAttribute("aria-pressed", String(state[key] === value)));
    find("thumbs").querySelectorAll("canvas").forEach((canvas, n) => drawThumbnail(canvas, run.attention[text].thousandths[names[n]], colourOf(names[n])));
    box.querySelector("figcaption").textContent = `head ${head} on ${run.attention[text].title}`;
    showMatrix();
  };
  run.attention.forEach(({ title }, n) => button(find("texts"), "text", n, title, "#222"));
  for (const [kind, head] of Object.entries(run.best)) {
    button(find("picks"), "head", head, `best ${kinds[kind][0]}: head ${head} (${number(run.heads[head].scores[kind])})`, kinds[kind][1]);
  }
  names.forEach((name, n) => {
    const node = button(find("thumbs"), "head", name, "", "#222");
    node.title = `head ${name}`;
    node.style.gridArea = `${places[n][0] + 1} / ${places[n][1] + 1}`;
    make("canvas", node);
  });
  find("thumbs").style.gridTemplateColumns = `repeat(${Math.max(...places.map(([, head]) => head)) + 1}, minmax(0, 110px))`;
  show();
  addEventListener("resize", showMatrix);
}

if (document.getElementById("losses")) drawLosses();
if (document.getElementById("phase")) {
  drawPhase();
  drawMaps();
}
document.querySelectorAll(".attention").forEach(drawAttention);
