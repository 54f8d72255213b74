"use strict";
/* The share of a layer's values that a format flushes to zero (or cannot hold): layers by format and loss scale. */

ampdoctor.heatmap = (() => {
  const { data, element, percent } = ampdoctor;
  const PAGE = 48, FEW = 10, SIZE = 12, LINE = 15;
  const MEASURES = { flushed: "flushed to zero", subnormal: "subnormal", overflowed: "overflowing" };
  const SCALES = [0, 4, 8, 12, 16, 20, 24];
  const STEPS = [0, 1e-4, 1e-3, 1e-2, 0.1, 0.5];
  const LEVELS = ["none", "to 0.01%", "to 0.1%", "to 1%", "to 10%", "to 50%", "more"];
  const FITTED = ["e4m3fn", "e5m2"];

  const level = (share) => STEPS.filter((limit) => share > limit).length;

  /** What is beside what: each column gives the share of a site; `now` marks fp16 as it is in the run, `plain` what a choice is between. */
  function columns(kind, measure) {
    const { at, scaled } = ampdoctor.ranges;
    const fp16 = (name, scale) => ({ name, share: (site) => at(site, "fp16", scale)[measure] });
    const others = [
      { name: "bf16", plain: true, share: (site) => at(site, "bf16", 1)[measure] },
      ...FITTED.map((name) => ({ name: `${name} *`, share: (site) => site.fitted[name]?.[Object.keys(MEASURES).indexOf(measure)] ?? null })),
    ];
    if (!scaled(kind)) return [{ ...fp16("fp16", 1), now: true }, ...others];
    const run = Number(data.profile.loss_scale);
    const fits = ampdoctor.real(data.profile.recommended_scale);
    const marked = new Map(SCALES.map((exponent) => [2 ** exponent, ""]));
    marked.set(run, " run");
    if (fits !== null) marked.set(fits, fits === run ? " run, fits" : " fits");
    const scales = [...marked].sort(([a], [b]) => a - b);
    return [...scales.map(([scale, mark]) => ({
      ...fp16(`fp16 ${ampdoctor.power(scale)}${mark}`, scale), now: scale === run, plain: mark !== "" || scale === 1 })), ...others];
  }

  /** `brief`: the worst layers alone, without controls. */
  function start(host, brief = false) {
    const page = brief ? FEW : PAGE;
    const { state } = ampdoctor.ranges;
    const lost = (name) => ampdoctor.ranges.chosen().some((site) => columns(state.kind, name).some((column) => column.share(site) > 0));
    const view = { measure: ampdoctor.about({ overflow: "overflowed" }) ?? ["flushed", "overflowed"].find(lost) ?? "flushed", order: "worst", page: 0 };
    const measure = ampdoctor.choice("Share", Object.entries(MEASURES), (value) => { view.measure = value; refresh(); }, view.measure);
    const order = ampdoctor.choice("Order", [["worst", "worst first"], ["name", "by name"]],
      (value) => { view.order = value; view.page = 0; refresh(); });
    const pages = ampdoctor.pager((by) => { view.page += by; refresh(); });
    if (!brief) host.append(element("div", { class: "tools" }, measure, order, ...pages.nodes));
    let cells = [], sites = [], kinds = [];
    const shown = () => sites.slice(page * view.page, page * (view.page + 1));
    const about = element("span", { class: "muted" });

    const chart = ampdoctor.chart(host, {
      label: brief ? "Heat map: the worst layers by format" : "Heat map: layers by format and loss scale",
      title: brief ? [element("strong", {}, `Share ${MEASURES[view.measure]}`), about] : [],
      height: (width) => { const { top, row } = room(width); return top + 4 + row * Math.max(1, shown().length); },
      option,
      columns: [
        { label: "layer", kind: "name", value: (cell) => cell.site.label },
        { label: "format and scale", value: (cell) => cell.column.name },
        { label: "share", kind: "number", value: (cell) => cell.share, show: (cell) => percent(cell.share) },
      ],
      rows: () => cells.flat(),
      clicked: ({ value }) => ampdoctor.ranges.set({ site: shown()[value[1]] }),
    });
    chart.legend.append(...ampdoctor.chart.legend(LEVELS.map((text, index) => [`heat-${index}`, text])));
    if (!brief) host.append(element("p", { class: "muted" }, "* each tensor scaled to fit the format in each step. " +
      "Worst first: by the share in fp16 as in the run, then over all columns."));

    /** What the names take of the drawing: on the left those of the layers, on top those of the columns. */
    function room(width) {
      const { names, breadth } = ampdoctor.chart;
      const beside = names(shown().map(({ label }) => ({ name: label })), width, SIZE);
      const words = Math.max(0, ...kinds.flatMap(({ name }) => name.split(" ").map((word) => breadth(word, SIZE))));
      const upright = words + 6 <= (width - beside.width - 20) / Math.max(kinds.length, 1);  // a word a line, else turned
      const lines = Math.max(1, ...kinds.map(({ name }) => name.split(" ").length));
      const top = upright ? lines * LINE + 12 : Math.ceil(Math.max(0, ...kinds.map(({ name }) => breadth(name, SIZE)))) + 14;
      return { ...beside, top, upright };
    }

    function refresh() {
      kinds = columns(state.kind, view.measure).filter((column) => !brief || column.plain || column.now);
      sites = [...ampdoctor.ranges.chosen()];
      let rows = sites.map((site) => kinds.map((column) => ({ site, column, share: column.share(site) })));
      if (view.order === "worst") {
        const now = (row) => row.find((cell) => cell.column.now).share ?? 0;
        const all = (row) => row.reduce((sum, cell) => sum + (cell.share ?? 0), 0);
        rows = rows.sort((a, b) => now(b) - now(a) || all(b) - all(a));
        sites = rows.map((row) => row[0].site);
      }
      cells = rows;
      about.textContent = `of ${ampdoctor.ranges.KINDS[state.kind]}${sites.length > page ? `, the ${page} worst of ${sites.length}` : ""}`;
      view.page = pages.clamp(view.page, Math.ceil(sites.length / page));
      chart.update();
    }

    function option(width) {
      const { axis, tooltip } = ampdoctor.chart;
      const rows = cells.slice(page * view.page, page * (view.page + 1));
      const { label, width: left, top, upright } = room(width);
      const colors = LEVELS.map((_, index) => ampdoctor.color(`heat-${index}`));
      return {
        grid: { left: left + 12, right: 8, top, bottom: 4, outerBoundsMode: "none" },
        tooltip: tooltip(({ value }) => {
          const cell = rows[value[1]][value[0]];
          return [cell.site.label, `${cell.column.name}: ${percent(cell.share)} ${view.measure}`];
        }),
        xAxis: axis({
          type: "category", position: "top", data: kinds.map((column) => column.name),
          axisLabel: { rotate: upright ? 0 : 90, interval: 0, fontSize: SIZE, lineHeight: LINE, color: ampdoctor.color("ink"),
            formatter: (name) => (upright ? name.split(" ").join("\n") : name) }, axisTick: { show: false },
        }),
        yAxis: axis({
          type: "category", inverse: true, data: rows.map((row) => row[0].site.label), axisTick: { show: false },
          axisLabel: { color: ampdoctor.color("ink"), ...label },
        }),
        series: [{  // ECharts 6.1's own heat map always draws on a canvas apart, which hides the labels on paper
          type: "custom",
          data: rows.flatMap((row, y) => row.flatMap((cell, x) => (cell.share === null ? [] : [[x, y, level(cell.share)]]))),
          encode: { x: 0, y: 1 },
          renderItem: (_, api) => {
            const [x, y] = api.coord([api.value(0), api.value(1)]);
            const [width, height] = api.size([1, 1]);
            const shape = { x: x - width / 2 + 0.5, y: y - height / 2 + 0.5, width: width - 1, height: height - 1 };
            return { type: "rect", shape, style: { fill: colors[api.value(2)] } };
          },
        }],
      };
    }

    ampdoctor.ranges.listen(() => { if (signature() !== last) { last = signature(); refresh(); } });
    const signature = () => `${state.kind} ${state.half}`;  // its columns have scales of their own
    let last = signature();
    refresh();
  }

  return { start };
})();
