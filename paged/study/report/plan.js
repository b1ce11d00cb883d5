"use strict";
// A plot a plan, as wide as there is room.
const plans = JSON.parse(document.getElementById("figures").textContent);
const plots = [...document.querySelectorAll(".plot")];

function draw() {
  plots.forEach((plot, i) => {
    const layout = { ...plans[i].layout, width: plot.clientWidth };
    Plotly.react(plot, plans[i].data, layout, { displaylogo: false, showSendToCloud: false, plotlyServerURL: "", displayModeBar: false });
  });
}

addEventListener("resize", draw);
draw();
