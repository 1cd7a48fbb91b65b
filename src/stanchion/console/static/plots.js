/* Reading charts of time: the values under the pointer, or beside it with the arrow keys.
   The charts are drawn by the server; .plots[data-series] has their numbers, the first column is the time in seconds. */
"use strict";
(() => {
  const exact = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
  const chosen = new Map(); // the time that is read, by the id of its chart
  const columns = (plot) => JSON.parse(plot.closest(".plots").dataset.series);
  const nearest = (times, at) => times.reduce((best, each, place) => Math.abs(each - at) < Math.abs(times[best] - at) ? place : best, 0);
  const show = (plot) => {
    const all = columns(plot), times = all[0], svg = plot.querySelector("svg");
    const at = chosen.get(plot.id);
    let line = svg.querySelector(".cursor");
    if (at === undefined) { line?.remove(); return; }
    const place = nearest(times, at), first = times[0], last = times[times.length - 1];
    const [left, right] = plot.dataset.edges.split(" ").map(Number);
    const x = left + (right - left) * (times[place] - first) / Math.max(1, last - first);
    if (!line) {
      line = svg.appendChild(document.createElementNS(svg.namespaceURI, "path"));
      line.setAttribute("class", "cursor");
    }
    line.setAttribute("d", `M${x} 0V${svg.viewBox.baseVal.height}`);
    const values = plot.dataset.pick.split(" ").map((each, number) => `${plot.dataset.names.split(", ")[number]} ${all[each][place]}`);
    plot.querySelector("output").textContent = `${exact.format(times[place] * 1000)}: ${values.join(", ")}`;
  };
  const plotOf = (event) => event.target.closest?.(".plot[data-pick]");
  const clear = (event) => {
    const plot = plotOf(event);
    if (!plot || plot.contains(event.relatedTarget)) return;
    chosen.delete(plot.id);
    const words = plot.querySelector("output");
    words.ariaLive = "off";
    words.textContent = plot.dataset.latest;
    show(plot);
  };
  document.addEventListener("pointermove", (event) => {
    const plot = plotOf(event);
    if (!plot) return;
    const svg = plot.querySelector("svg"), box = svg.getBoundingClientRect(), times = columns(plot)[0];
    const [left, right] = plot.dataset.edges.split(" ").map(Number);
    const share = ((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width - left) / (right - left);
    chosen.set(plot.id, times[0] + share * (times[times.length - 1] - times[0]));
    show(plot);
  });
  document.addEventListener("keydown", (event) => {
    const plot = plotOf(event), step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!plot || !step) return;
    event.preventDefault();
    plot.querySelector("output").ariaLive = "polite";
    const times = columns(plot)[0], at = chosen.get(plot.id) ?? times[times.length - 1];
    chosen.set(plot.id, times[Math.min(times.length - 1, Math.max(0, nearest(times, at) + step))]);
    show(plot);
  });
  document.addEventListener("pointerout", clear);
  document.addEventListener("focusout", clear);
  document.addEventListener("console:refreshed", () => document.querySelectorAll(".plot[data-pick]").forEach(show));
})();
