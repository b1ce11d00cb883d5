"use strict";
// One plot a section, drawn for the chosen setting. Buttons hide a policy in all plots at once.
const report = JSON.parse(document.getElementById("figures").textContent);
// Plotly would offer to send a plot to its cloud.
const config = {
  responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", modeBarButtonsToRemove: ["lasso2d", "select2d"],
};
const hidden = new Set();
const setting = document.getElementById("setting");
const outcome = document.getElementById("outcome");

function draw(id, figure) {
  const section = document.getElementById(id);
  section.hidden = !figure;
  if (!figure) return;
  const data = figure.data.map((trace) => ({ ...trace, visible: !(trace.meta && hidden.has(trace.meta.policy)) }));
  Plotly.react(section.querySelector(".plot"), data, figure.layout, config);
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
  const before = outcome.value;
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
choose();
