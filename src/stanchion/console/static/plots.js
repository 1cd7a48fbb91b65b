/* Time series with uPlot: an element with data-series (columns as JSON, the first is the time). */
"use strict";
(() => {
  const plots = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
  const seconds = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const exact = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
  const strokes = ["--s0", "--s1", "--s3"];
  const draw = () => {
    for (const place of document.querySelectorAll(".plot[data-series]")) {
      const all = JSON.parse(place.dataset.series);
      const picked = place.dataset.pick.split(" ").map(Number);
      const data = [all[0], ...picked.map((each) => all[each])];
      const known = plots.get(place.id);
      if (known && known.root.isConnected) { known.setData(data); continue; }
      const names = (place.dataset.names || place.dataset.plot).split(", ");
      const axis = { space: 70, stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "12px system-ui" };
      plots.set(place.id, new uPlot({
        title: place.dataset.plot,
        width: Math.max(240, place.clientWidth),
        height: 190,
        padding: [null, 26, null, null],
        cursor: { y: false },
        scales: { y: { range: (_plot, _low, high) => [0, Math.max(4, high * 1.1)] } },
        axes: [{ ...axis, values: (_plot, ticks) => { const form = ticks.some((each) => each % 60) ? seconds : clock; return ticks.map((each) => form.format(each * 1000)); } }, { ...axis, space: 30, size: 44 }],
        series: [{ label: "at", value: (_plot, each) => each == null ? "" : exact.format(each * 1000) }, ...names.map((label, index) => ({ label, stroke: colour(strokes[index]), width: 1.6, points: { show: false }, dash: index ? [6, 2 + 2 * index] : undefined }))],
      }, data, place));
    }
  };
  draw();
  document.addEventListener("console:refreshed", draw);
  addEventListener("resize", () => {
    for (const [id, plot] of plots) {
      const place = document.getElementById(id);
      if (place) plot.setSize({ width: Math.max(240, place.clientWidth), height: 190 });
    }
  });
})();
