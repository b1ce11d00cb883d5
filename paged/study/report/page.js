"use strict";
// One plot a section, drawn for the chosen setting, as wide as there is room, in the reader's colours. Buttons hide a policy in all plots at once.
const report = JSON.parse(document.getElementById("figures").textContent);
const hidden = new Set();
const setting = document.getElementById("setting");
const outcome = document.getElementById("outcome");
const dark = matchMedia("(prefers-color-scheme: dark)");
// Below so many pixels panels stand above one another.
const NARROW = 900;
const CHARACTER = 7.2, LINE = 18;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Text in lines of at most so many characters, broken between words.
function wrapped(text, most) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length >= most) lines.push(word);
    else lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
  }
  return lines.join("<br>");
}

function numLines(text) {
  return text.split("<br>").length;
}

function axesOf(layout, letter) {
  return Object.keys(layout).filter((key) => new RegExp(`^${letter}axis\\d*$`).test(key));
}

// Panels that stand beside each other, above one another; each as high as it was.
function stack(layout, titles) {
  const across = axesOf(layout, "x"), up = axesOf(layout, "y");
  const { t, b } = layout.margin;
  const each = layout.height - t - b, gap = 78 + LINE * (Math.max(...titles.map(numLines)) - 1);
  const whole = across.length * each + (across.length - 1) * gap;
  across.forEach((key, i) => {
    const top = 1 - (i * (each + gap)) / whole;
    layout[key].domain = [0, 1];
    Object.assign(layout[up[i]], { domain: [Math.max(0, top - each / whole), top], showticklabels: true });
  });
  layout.height = whole + t + b;
}

function fitted(figure, width) {
  const layout = structuredClone(figure.layout);
  const isNarrow = width < NARROW;
  const across = axesOf(layout, "x"), axes = [...across, ...axesOf(layout, "y")];
  const num = isNarrow ? 1 : across.length;
  const room = Math.floor((width - 120) / num / CHARACTER);
  for (const each of layout.annotations ?? []) each.text = wrapped(each.text, room);
  const titles = (layout.annotations ?? []).map((each) => each.text);
  for (const key of axes) {
    const axis = layout[key];
    Object.assign(axis, { gridcolor: colour("--grid"), linecolor: colour("--axis"), tickcolor: colour("--axis") });
    axis.title.font.color = colour("--quiet");
    if (across.includes(key)) axis.title.text = wrapped(axis.title.text, room);
    // What is written at the end of a bar is as long as ever.
    if (isNarrow && "bargap" in layout && across.includes(key)) axis.range = [0, 1.4 * axis.range[1]];
    if (isNarrow) Object.assign(axis, { nticks: across.includes(key) ? 5 : axis.nticks });
  }
  for (const each of layout.annotations ?? []) Object.assign(each, { align: "left", font: { ...each.font, color: colour("--ink") } });
  layout.margin.t += LINE * (Math.max(1, ...titles.map(numLines)) - 1);
  if (isNarrow && across.length > 1) stack(layout, titles);
  if (isNarrow && layout.margin.r > 60) layout.margin.r = 36;
  if (layout.showlegend && (isNarrow || layout.legend.yref === "container")) {
    layout.legend = { ...layout.legend, orientation: "h", x: 0, y: 0, yref: "container", xanchor: "left", yanchor: "bottom" };
    const names = figure.data.filter((trace) => trace.showlegend !== false).map((trace) => wrapped(trace.name, room));
    // Short names stand beside each other.
    const rows = names.every((name) => name.length < 16) ? Math.ceil((names.length * 130) / width) : names.reduce((sum, name) => sum + numLines(name), 0);
    layout.margin.b += 14 + (LINE + 3) * rows;
    layout.height += 14 + (LINE + 3) * rows;
  }
  layout.width = width;
  layout.modebar = { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: colour("--axis"), activecolor: colour("--ink") };
  Object.assign(layout, { paper_bgcolor: colour("--paper"), plot_bgcolor: colour("--paper") });
  layout.font.color = colour("--ink");
  layout.hoverlabel = { ...layout.hoverlabel, bgcolor: colour("--paper"), bordercolor: colour("--axis") };
  layout.hoverlabel.font = { ...layout.hoverlabel.font, color: colour("--ink") };
  return { layout, room };
}

// Colours of paper and ink are the reader's; those of policies are the same on both.
function painted(trace, room) {
  const own = { "#fff": "--paper", "#57606a": "--quiet", "#eaedf0": "--free", "#b9cddb": "--cached", "#3d5a75": "--tokens" };
  const of = (value) => (own[value] ? colour(own[value]) : value);
  const painted = { ...trace, visible: !(trace.meta && hidden.has(trace.meta.policy)) };
  if (trace.name) painted.name = trace.meta ? trace.name : wrapped(trace.name, room);
  if (trace.fillcolor) painted.fillcolor = of(trace.fillcolor);
  if (trace.line) painted.line = { ...trace.line, color: of(trace.line.color) };
  if (trace.textfont) painted.textfont = { ...trace.textfont, color: colour("--ink") };
  if (trace.marker?.pattern) {
    const pattern = { ...trace.marker.pattern, bgcolor: of(trace.marker.pattern.bgcolor) };
    painted.marker = { ...trace.marker, pattern };
  }
  return painted;
}

function draw(id, figure) {
  const section = document.getElementById(id);
  section.hidden = !figure;
  if (!figure) return;
  const plot = section.querySelector(".plot");
  const { layout, room } = fitted(figure, plot.clientWidth);
  // Plotly would offer to send a plot to its cloud.
  const config = {
    displaylogo: false, showSendToCloud: false, plotlyServerURL: "", modeBarButtonsToRemove: ["lasso2d", "select2d"],
    displayModeBar: plot.clientWidth < NARROW ? false : "hover",
  };
  Plotly.react(plot, figure.data.map((trace) => painted(trace, room)), layout, config);
}

function drawMemory() {
  draw("memory", report[setting.selectedIndex].memory[outcome.selectedIndex]);
}

function drawPlots() {
  const { plots } = report[setting.selectedIndex];
  for (const id of Object.keys(plots)) draw(id, plots[id]);
}

function choose() {
  const chosen = report[setting.selectedIndex];
  document.querySelectorAll("#summary table").forEach((table, i) => { table.hidden = i !== setting.selectedIndex; });
  const before = outcome.value || "paged";
  outcome.replaceChildren(...chosen.labels.map((label) => new Option(label, label)));
  if (chosen.labels.includes(before)) outcome.value = before;
  drawMemory();
  drawPlots();
}

document.querySelectorAll("#controls button").forEach((button) => {
  button.addEventListener("click", () => {
    const { policy } = button.dataset;
    if (!hidden.delete(policy)) hidden.add(policy);
    button.setAttribute("aria-pressed", String(!hidden.has(policy)));
    drawPlots();
  });
});
setting.addEventListener("change", choose);
outcome.addEventListener("change", drawMemory);
dark.addEventListener("change", choose);
let drawnWidth = document.body.clientWidth, waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (document.body.clientWidth !== drawnWidth) choose();
    drawnWidth = document.body.clientWidth;
  }, 120);
});
choose();
