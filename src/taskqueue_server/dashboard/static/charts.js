// Charts: one uPlot for each figure.chart, drawn from the rows of the stream.
// Columns of a row: time, published/s, done/s, waiting, scheduled, in flight, p50, p95.
const Charts = (() => {
  "use strict";
  const KEPT = 600;
  // Seconds that the charts show; 0: what there is, at least a minute.
  const SPAN = Number(document.querySelector(".charts")?.dataset.seconds || 0);
  const NARROW = 0.001;
  let charts = [];
  let rows = [];

  const colour = (element) => getComputedStyle(element).color;
  const short = (value) => {
    if (value === null || value === undefined) return "–";
    if (Math.abs(value) >= 1e9) return `${+(value / 1e9).toPrecision(3)}B`;
    if (Math.abs(value) >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (Math.abs(value) >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    return `${+value.toPrecision(3)}`;
  };
  const clock = (at) => new Date(at * 1000).toTimeString().slice(0, SPAN > 3600 ? 5 : 8);
  const seconds = (value) => {
    if (value === null || value === undefined) return "–";
    return value < 1 ? `${+(value * 1000).toPrecision(2)} ms` : `${+value.toPrecision(3)} s`;
  };

  function make(figure) {
    const box = figure.querySelector(".plot");
    const legend = [...figure.querySelectorAll("[data-column]")];
    const format = figure.dataset.unit === "s" ? seconds : short;
    const quiet = colour(figure.querySelector("figcaption"));
    const grid = colour(box);
    box.replaceChildren();
    const axis = { stroke: quiet, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const plot = new uPlot({
      width: box.clientWidth,
      height: box.clientHeight,
      legend: { show: false },
      cursor: { points: { size: 6 }, drag: { x: false, y: false }, y: false },
      padding: [8, 26, 0, 0],
      scales: {
        x: { time: true, range: (_, low, high) => [SPAN ? (high ?? 0) - SPAN : Math.min(low ?? 0, (high ?? 0) - 60), high ?? 1] },
        y: { range: (_, low, high) => [0, Math.max((high ?? 0) * 1.15, figure.dataset.unit === "s" ? NARROW : 4)] },
      },
      axes: [
        { ...axis, space: 84, size: 28, gap: 8, values: (_, splits) => splits.map(clock) },
        { ...axis, size: 54, space: 28, values: (_, splits) => splits.map(format) },
      ],
      series: [{}, ...legend.map((item, index) => {
        const stroke = colour(item.querySelector(".swatch"));
        return { stroke, width: 1.5, points: { show: false }, fill: index ? undefined : stroke.replace("rgb(", "rgba(").replace(")", ", 0.10)") };
      })],
      hooks: { setCursor: [(self) => showValues(legend, self.cursor.idx ?? rows.length - 1, format)] },
    }, [[]], box);
    return { plot, legend, format, box };
  }

  function showValues(legend, index, format) {
    const row = rows[index];
    for (const item of legend) item.querySelector("b").textContent = row ? format(row[item.dataset.column]) : "";
  }

  function draw({ plot, legend, format }) {
    if (rows.length < 2) return;
    plot.setData([rows.map((row) => row[0]), ...legend.map((item) => rows.map((row) => row[item.dataset.column]))]);
    if (plot.cursor.idx === null || plot.cursor.idx === undefined) showValues(legend, rows.length - 1, format);
  }

  return {
    make() {
      for (const { plot } of charts) plot.destroy();
      charts = rows.length < 2 ? [] : [...document.querySelectorAll("figure.chart")].map(make);
      charts.forEach(draw);
    },
    add(more, fresh) {
      const before = rows.length;
      if (fresh) rows = [];
      const last = rows.length ? rows[rows.length - 1][0] : -Infinity;
      rows.push(...more.filter((row) => row[0] > last));
      rows = rows.slice(-KEPT);
      if (!charts.length || before < 2) this.make(); else charts.forEach(draw);
    },
    fit() {
      for (const { plot, box } of charts) plot.setSize({ width: box.clientWidth, height: box.clientHeight });
    },
  };
})();
