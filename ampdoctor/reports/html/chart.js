"use strict";
/* A chart with what makes it usable for everybody: drawn when it comes into view, in the page's colours, light or
   dark, without motion; hover texts made of text nodes; and the same numbers as a table. */

ampdoctor.chart = (() => {
  const { element, color } = ampdoctor;
  const charts = new Set();
  const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

  /** Draw into `host`.
   *
   *  label: what a screen reader says.  height(): pixels.  option(): ECharts' option, asked for at every draw.
   *  columns and rows(): the table that says the same (see ampdoctor.table).  clicked(params): optional. */
  function chart(host, { label, height, option, columns, rows, clicked }) {
    const canvas = element("div", { class: "chart", role: "img", "aria-label": label });
    const details = element("details", { class: "as-table" }, element("summary", {}, "Show as table"));
    const legend = element("div", { class: "legend" });
    host.append(element("figure", {}, legend, canvas, details));
    let instance = null, table = null, seen = false;

    function draw() {
      canvas.style.height = `${height()}px`;
      if (!seen) return;
      if (instance === null) {
        instance = echarts.init(canvas, null, { renderer: "canvas" });
        if (clicked) instance.on("click", clicked);
      }
      instance.resize();
      instance.setOption({ ...base(), ...option() }, { notMerge: true });
      instance.getZr().flush();  // now: paper does not wait for the next frame
      canvas.dataset.drawn = "true";
    }

    function update() {
      draw();
      if (table) table.rows(rows());
    }

    details.addEventListener("toggle", () => {
      if (details.open && table === null) table = ampdoctor.table(details, { caption: label, columns, rows: rows() });
    });
    const inView = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) { seen = true; inView.disconnect(); draw(); }
    }, { rootMargin: "300px" });
    const self = { update, draw, show: () => { seen = true; draw(); }, legend };
    charts.add(self);
    draw();
    inView.observe(canvas);
    return self;
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
    const { axisLabel, nameTextStyle, ...rest } = more;
    return {
      axisLine: { lineStyle: { color: color("line") } },
      axisTick: { lineStyle: { color: color("line") } },
      splitLine: { lineStyle: { color: color("line"), opacity: 0.6 } },
      axisLabel: { color: color("muted"), fontSize: 12, ...axisLabel },
      nameTextStyle: { color: color("muted"), fontSize: 12, ...nameTextStyle },
      ...rest,
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

  return Object.assign(chart, { axis, tooltip, legend });
})();
