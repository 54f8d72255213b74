"use strict";
/* A chart with what makes it usable for everybody: drawn when it comes into view, in the page's colours, light or
   dark, without motion; hover texts made of text nodes; and the same numbers as a table, by one switch for the page. */

ampdoctor.chart = (() => {
  const { element, color } = ampdoctor;
  const charts = new Set();
  const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  const MOST_OF_WIDTH = 0.45;

  /** Draw into `host`.
   *
   *  label: the text for screen readers.  title: optional text on the left above the chart.
   *  height(width): pixels.  option(width): ECharts' option, asked for at every draw.  started(instance, canvas): optional, once.
   *  columns and rows(): the table that says the same (see ampdoctor.table).  clicked(params): optional. */
  function chart(host, { label, title = [], height, option, columns, rows, clicked, started }) {
    const canvas = element("div", { class: "chart", role: "img", "aria-label": label });
    const place = element("div", { class: "as-table", hidden: true });
    const legend = element("span", { class: "legend" });
    host.append(element("figure", {}, element("figcaption", {}, ...title, legend), canvas, place));
    let instance = null, table = null, seen = false;

    function draw() {
      if (canvas.hidden) return;
      canvas.style.height = `${height(canvas.clientWidth)}px`;
      if (!seen) return;
      if (instance === null) {
        instance = echarts.init(canvas, null, { renderer: "canvas" });
        if (clicked) instance.on("click", clicked);
        if (started) started(instance, canvas);
      }
      instance.resize();
      instance.setOption({ ...base(), ...option(canvas.clientWidth) }, { notMerge: true });
      instance.getZr().flush();  // now: paper does not wait for the next frame
      canvas.dataset.drawn = "true";
    }

    function update() {
      draw();
      if (table) table.rows(rows());
    }

    function tabled(wanted) {
      legend.hidden = canvas.hidden = wanted;
      place.hidden = !wanted;
      if (wanted && table === null) table = ampdoctor.table(place, { caption: label, columns, rows: rows() });
      draw();
    }
    const inView = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) { seen = true; inView.disconnect(); draw(); }
    }, { rootMargin: "300px" });
    const self = { update, draw, tabled, show: () => { seen = true; draw(); }, legend };
    charts.add(self);
    draw();
    inView.observe(canvas);
    return self;
  }

  /** The switch that turns all charts into tables; `host` is where it stands. */
  function tables(host) {
    if (charts.size) host.append(ampdoctor.checkbox("Show as tables", false, (wanted) => charts.forEach((one) => one.tabled(wanted))));
  }

  /** What all charts have in common. */
  function base() {
    return {
      animation: false,
      backgroundColor: "transparent",
      textStyle: { fontFamily: FONT, color: color("ink") },
      color: [color("series-1"), color("series-2"), color("series-3"), color("series-4")],
      aria: { enabled: false },
    };
  }

  /** An axis in the page's colours. */
  function axis(more) {
    const { axisLabel, nameTextStyle, splitLine, ...rest } = more;
    return {
      axisLine: { lineStyle: { color: color("line") } },
      axisTick: { lineStyle: { color: color("line") } },
      splitLine: { lineStyle: { color: color("line"), opacity: 0.6 }, ...splitLine },
      axisLabel: { color: color("muted"), fontSize: 12, ...axisLabel },
      nameTextStyle: { color: color("muted"), fontSize: 12, ...nameTextStyle },
      ...rest,
    };
  }

  const pen = document.createElement("canvas").getContext("2d");

  function breadth(text, size) {
    pen.font = `${size}px ${FONT}`;
    return pen.measureText(text).width;
  }

  /** `text` in lines no wider than `room`: after its dots where that will do, else between any two letters. */
  function broken(text, room, size) {
    const lines = [""];
    const fits = (more) => breadth(lines.at(-1) + more, size) <= room;
    for (const piece of text.split(/(?<=\.)/)) {
      if (fits(piece)) lines[lines.length - 1] += piece;
      else if (breadth(piece, size) <= room) lines.push(piece);
      else for (const letter of piece) {
        if (fits(letter)) lines[lines.length - 1] += letter;
        else lines.push(letter);
      }
    }
    return lines.filter(Boolean);
  }

  /** Whole names beside a chart that is `width` wide: as wide as the longest of them, up to a share of the chart, and
   *  beyond that in lines.
   *
   *  names: {name, text, indent}: what is to be written, and pixels before each of its lines.
   *  Returns {written: Map of name to text, label: settings of the axis' labels, width: pixels, row: pixels that each
   *  name takes in height}. */
  function names(list, width, size = 11) {
    const room = MOST_OF_WIDTH * width;
    const lines = new Map(list.map(({ name, text = name, indent = 0 }) => [name, broken(text, room - indent, size)]));
    const widths = list.map(({ name, indent = 0 }) => indent + Math.max(...lines.get(name).map((line) => breadth(line, size))));
    const written = new Map([...lines].map(([name, parts]) => [name, parts.join("\n")]));
    const lineHeight = Math.ceil(1.25 * size);
    return {
      written,
      label: { interval: 0, fontSize: size, lineHeight, formatter: (name) => written.get(name) },
      width: Math.ceil(Math.max(0, ...widths)),
      row: lineHeight * Math.max(1, ...[...lines.values()].map((parts) => parts.length)) + 4,
    };
  }

  /** A hover text: `lines(params)` gives strings, which become text nodes and never HTML. */
  function tooltip(lines, more = {}) {
    return {
      confine: true,
      backgroundColor: color("panel"),
      borderColor: color("line"),
      textStyle: { color: color("ink"), fontSize: 13, fontFamily: FONT },
      extraCssText: "max-width: 20rem; white-space: normal; overflow-wrap: anywhere;",
      formatter: (params) => element("div", {}, ...lines(params).map((line) => element("div", {}, line))),
      ...more,
    };
  }

  /** Keys of the colours, as text beside a swatch. Entries are [class of the swatch, text]. */
  function legend(entries) {
    return entries.map(([swatch, text]) =>
      element("span", { class: "key" }, element("span", { class: `swatch ${swatch}`, "aria-hidden": "true" }), text));
  }

  let waiting = 0;
  const again = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => charts.forEach((one) => one.draw()), 80);
  };
  window.addEventListener("resize", again);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  window.addEventListener("beforeprint", () => {
    document.documentElement.dataset.printing = "true";
    charts.forEach((one) => one.show());
  });
  window.addEventListener("afterprint", () => {
    delete document.documentElement.dataset.printing;
    charts.forEach((one) => one.draw());
  });

  return Object.assign(chart, { axis, tooltip, legend, names, breadth, tables });
})();
