"use strict";
/* The way of a non-finite value from its origin to the harm: over the module tree, and by magnitude. */

ampdoctor.path = (() => {
  const { data, element, real, number } = ampdoctor;
  const SYMBOL = { before: "circle", origin: "diamond", carrier: "circle", affected: "triangle" };
  const COLOR = { before: "series-1", origin: "overflow", carrier: "series-3", affected: "series-4" };

  const ORDER = { name: "order of execution", nameLocation: "middle", nameGap: 12,
    axisLabel: { show: false }, axisTick: { show: false }, axisLine: { onZero: false } };
  const ROOT = "(the root's own code)";
  const LEVEL = "\u2003", SIZE = 12;
  const place = (node) => node.module || ROOT;

  function lines(node) {
    const value = (amax) => (amax === null ? "unknown" : number(amax));
    return [
      `${node.role}: ${place(node)}`, `${node.phase} ${node.op}, ${node.dtype} [${node.shape.join(", ")}]`,
      `largest finite value in ${value(node.input_amax)}, out ${value(node.output_amax)}` +
        (node.limit === null ? "" : `, limit ${number(node.limit)}`),
      `${number(node.nan)} NaN, ${number(node.inf)} Inf`,
    ];
  }

  const columns = [
    { label: "order", kind: "number", value: (node) => node.order },
    { label: "role", value: (node) => node.role },
    { label: "module", kind: "name", value: place },
    { label: "op", value: (node) => node.op },
    { label: "largest finite in", kind: "number", value: (node) => real(node.input_amax), show: (node) => number(node.input_amax) },
    { label: "largest finite out", kind: "number", value: (node) => real(node.output_amax), show: (node) => number(node.output_amax) },
    { label: "NaN", kind: "number", value: (node) => node.nan },
    { label: "Inf", kind: "number", value: (node) => node.inf },
  ];

  function start(host) {
    const nodes = data.path.nodes;
    const entries = Object.keys(SYMBOL).filter((role) => nodes.some((node) => node.role === role));
    const legend = () => ampdoctor.chart.legend(entries.map((role) => [`${COLOR[role]} dot`, role]));
    const rows = () => nodes;
    const modules = branches(nodes);

    const tree = ampdoctor.chart(host, {
      label: "The path over the modules, in order of execution", rows, columns,
      height: (width) => 60 + Math.max(24, names(modules, width).row) * modules.length,
      option: (width) => overModules(nodes, modules, width),
    });
    tree.legend.append(...legend());
    const ranges = ampdoctor.chart(host, {
      label: "Largest finite magnitude after each op, with the limit of its format", rows, columns,
      height: () => 260,
      option: () => magnitudes(nodes),
    });
    ranges.legend.append(...legend(), ...ampdoctor.chart.legend([["muted line dotted", "limit of the output's format"]]));
  }

  /** The modules on the path with those that hold them, as a tree in order of execution: {name, depth}. */
  function branches(nodes) {
    const root = { inner: new Map() };
    for (const name of nodes.map(place)) {
      let at = root, path = "";
      for (const part of name === ROOT ? [ROOT] : name.split(".")) {
        path = path ? `${path}.${part}` : part;
        if (!at.inner.has(path)) at.inner.set(path, { part, inner: new Map() });
        at = at.inner.get(path);
      }
    }
    const walk = (branch, depth) => [...branch.inner].flatMap(([name, { part, inner }]) =>
      [{ name, part, depth }, ...walk({ inner }, depth + 1)]);
    return walk(root, 0);
  }

  const ENDS = ["origin", "affected"];
  const op = (node) => node.op.replace(/^aten\./, "");

  /** Dots with words above them, beside the line and inside the drawing. */
  const dots = (nodes, at, words) => nodes.map((node, index) => ({
    value: at(node, index), symbol: SYMBOL[node.role], symbolSize: node.role === "origin" ? 15 : 10,
    itemStyle: { color: ampdoctor.color(COLOR[node.role]), opacity: 1 },
    label: { show: true, position: "top", align: index < 0.6 * nodes.length ? "left" : "right", distance: 4, fontSize: SIZE, formatter: words(node),
      fontWeight: ENDS.includes(node.role) ? "bold" : "normal", color: ampdoctor.color("ink"), textBorderColor: ampdoctor.color("bg"), textBorderWidth: 3 },
  }));
  const what = (node) => (!ENDS.includes(node.role) ? op(node) : ampdoctor.narrow() ? node.role : `${node.role}: ${op(node)}`);
  const size = (node) => (node.output_amax === null ? "" : number(node.output_amax));
  const bad = (node) => [[node.inf, "Inf"], [node.nan, "NaN"]].filter(([many]) => many > 0).map(([many, kind]) => `${number(many)} ${kind}`).join(", ");

  /** The modules' own parts of their names, each level further in than the one above, at the most half of the room. */
  function names(modules, width) {
    const deep = ampdoctor.chart.breadth(LEVEL, SIZE);
    const steps = ({ depth }) => Math.min(depth, Math.floor((0.2 * width) / deep));
    const room = ampdoctor.chart.names(
      modules.map((module) => ({ name: module.name, text: module.part, indent: steps(module) * deep })), width, SIZE);
    for (const module of modules) {
      const lines = room.written.get(module.name).split("\n");
      room.written.set(module.name, lines.map((line) => LEVEL.repeat(steps(module)) + line).join("\n"));
    }
    return room;
  }

  function overModules(nodes, modules, width) {
    const { axis, tooltip } = ampdoctor.chart;
    const { label, width: room } = names(modules, width);
    return {
      grid: { left: room + 16, right: 16, top: 20, bottom: 30, outerBoundsMode: "none" },
      tooltip: tooltip(({ dataIndex }) => lines(nodes[dataIndex])),
      xAxis: axis({ type: "value", min: -0.5, max: nodes.length - 0.5, interval: 1, splitLine: { show: false },
        ...ORDER }),
      yAxis: axis({ type: "category", inverse: true, data: modules.map(({ name }) => name), splitLine: { show: true },
        axisLine: { show: false }, axisTick: { show: false },
        axisLabel: { ...label, align: "left", margin: room + 12 } }),
      series: [{ type: "line", color: ampdoctor.color("muted"), lineStyle: { width: 1 },
        labelLayout: { hideOverlap: true }, data: dots(nodes, (node, index) => [index, place(node)], what) }],
    };
  }

  /** The largest finite value after each op; what is not finite stands at the top as well. */
  function magnitudes(nodes) {
    const { axis, tooltip } = ampdoctor.chart;
    const log = (value) => { const known = real(value); return known > 0 && Number.isFinite(known) ? Math.log2(known) : null; };
    const known = (key) => nodes.map((node) => log(node[key])).filter((exponent) => exponent !== null);
    const nearest = Math.min(...known("limit"), 128);  // fp32's limit would leave no room for what is below fp16's
    const top = Math.ceil(Math.max(nearest, ...known("output_amax"))) + 4;
    const bottom = Math.floor(Math.min(0, ...known("output_amax"))) - 1;
    const hover = tooltip(({ dataIndex }) => lines(nodes[dataIndex]));
    return {
      grid: { left: 4, right: 16, top: 28, bottom: 30, containLabel: true },
      tooltip: hover,
      xAxis: axis({ type: "value", min: -0.5, max: nodes.length - 0.5, interval: 1, splitLine: { show: false }, ...ORDER }),
      yAxis: axis({ type: "value", min: bottom, max: top, axisLine: { show: false }, axisLabel: {
        hideOverlap: true, showMinLabel: false, formatter: (value) => (value === top ? "Inf, NaN" : `2^${value}`) } }),
      series: [
        { type: "line", color: ampdoctor.color("muted"), connectNulls: true, lineStyle: { width: 1 },
          labelLayout: { hideOverlap: true }, data: dots(nodes, (node, index) => [index, log(node.output_amax)], size) },
        { type: "scatter", labelLayout: { hideOverlap: true }, data: dots(nodes, (node, index) => [index, node.nan || node.inf ? top : null], bad) },
        { type: "line", symbol: "none", silent: true, step: "middle", color: ampdoctor.color("muted"),
          lineStyle: { width: 1.5, type: "dotted" }, tooltip: { show: false },
          data: nodes.map((node, index) => [index, log(node.limit) < top ? log(node.limit) : null]) },
      ],
    };
  }

  /** The way in a list: the origin with what is before and after it, and the last that is harmed. */
  function way(host) {
    const { nodes } = data.path, origin = nodes.findIndex(({ role }) => role === "origin");
    const wanted = [...nodes.keys()].filter((at) => (at >= origin - 1 && at <= origin + 2) || at === nodes.length - 1);
    const line = (at, index) => {
      const node = nodes[at], left = at - (wanted[index - 1] ?? at) - 1;
      return [...(left > 0 ? [element("li", { class: "muted" }, ampdoctor.count(left, "more op"))] : []),
        element("li", {}, element("span", { class: `swatch dot ${COLOR[node.role]}`, "aria-hidden": "true" }),
          element("span", {}, element("strong", {}, place(node)), ` ${node.role}, ${op(node)}`),
          element("span", { class: "muted" }, [real(node.output_amax) > 0 && `up to ${size(node)}`, bad(node)].filter(Boolean).join(", ")))];
    };
    host.append(element("p", {}, element("strong", {}, "From the origin to the harm")), element("ol", { class: "way" }, ...wanted.flatMap(line)));
  }

  return { start, way };
})();
