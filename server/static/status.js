// The status page's life: fetches the page again, puts the new parts in the old ones' places, and draws the charts.
"use strict";

(() => {
  const EVERY_MS = 2000;
  const charts = new Map();
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
  const seconds = (value) =>
    value == null ? "–"
    : value >= 1 ? number.format(value) + " s"
    : value >= 1e-3 ? number.format(value * 1e3) + " ms"
    : number.format(value * 1e6) + " µs";
  const rate = (value) => (value == null ? "–" : number.format(value));
  const ago = (value) => (value > -1 ? "now" : value > -60 ? `${Math.round(-value)} s ago` : `${Math.floor(-value / 60)}:${String(Math.round(-value % 60)).padStart(2, "0")} min ago`);

  const kinds = {
    requests: { format: rate, lines: [["requests", "requests/s", "--one"]] },
    times: { format: seconds, log: true, lines: [["p50", "p50", "--one"], ["p99", "p99", "--two"]] },
  };

  function decades(low, high) {
    const first = Math.round(Math.log10(low)), last = Math.round(Math.log10(high));
    return Array.from({ length: last - first + 1 }, (_, place) => 10 ** (first + place));
  }

  function options(kind, width, height) {
    const axis = { stroke: color("--soft"), grid: { stroke: color("--rule"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    return {
      width, height,
      scales: {
        x: { time: false },
        y: kind.log
          ? { distr: 3, range: (_, low, high) => (low > 0 ? [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high * 1.01))] : [1e-6, 1]) }
          : { range: (_, low, high) => [0, Math.max(high * 1.15, 1)] },
      },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map(ago), incrs: [5, 10, 15, 30, 60, 120], space: 70 },
        {
          ...axis, size: 62,
          values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : kind.format(tick))),
          ...(kind.log && { splits: (_, __, low, high) => decades(low, high) }),
        },
      ],
      series: [
        { label: "at", value: (_, value) => (value == null ? "" : ago(value)) },
        ...kind.lines.map(([, label, stroke]) => ({
          label, stroke: color(stroke), width: 1.5, points: { show: false }, value: (_, value) => kind.format(value),
        })),
      ],
      cursor: { y: false },
      legend: { live: true },
    };
  }

  function draw(data, anew) {
    for (const box of document.querySelectorAll(".chart")) {
      const kind = kinds[box.dataset.chart], device = data[box.dataset.device];
      if (!device || device.ago.length < 2) continue;
      const columns = [device.ago, ...kind.lines.map(([name]) => device[name])];
      const chart = charts.get(box);
      if (chart && !anew) {
        chart.setData(columns);
        continue;
      }
      if (chart) chart.destroy();
      box.replaceChildren();
      charts.set(box, new uPlot(options(kind, box.clientWidth, box.clientHeight - 26), columns, box));
    }
  }

  const read = (page) => JSON.parse(page.getElementById("data").textContent);

  async function refresh() {
    if (document.hidden) return;
    const stale = document.getElementById("stale");
    try {
      const answer = await fetch(location.pathname, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const boxes = (from) => [...from.querySelectorAll(".live")].map((part) => part.id).join();
      if (boxes(page) !== boxes(document)) {  // a device has come or gone
        document.querySelector("main").replaceWith(page.querySelector("main"));
        charts.clear();
      }
      for (const part of document.querySelectorAll(".live")) {
        const next = page.getElementById(part.id);
        if (next && next.innerHTML !== part.innerHTML) part.replaceChildren(...next.childNodes);
      }
      last = read(page);
      draw(last, false);
      stale.hidden = true;
    } catch {
      if (stale.hidden) stale.querySelector("time").textContent = new Date().toLocaleTimeString();
      stale.hidden = false;
    }
  }

  let last = read(document);
  draw(last, true);
  setInterval(refresh, EVERY_MS);
  document.addEventListener("visibilitychange", refresh);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(last, true));
  addEventListener("resize", () => draw(last, true));
})();
