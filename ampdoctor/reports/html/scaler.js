"use strict";
/* The loss scale over the steps ahead in a simulation: settings in use, settings recommended, skipped steps; and the
   largest scale at which no step that was recorded overflows. That is an edge, not what to use: the scale that fits leaves
   room for larger gradients than those recorded. */

ampdoctor.scaler = (() => {
  const { data, element, number, power } = ampdoctor;
  const SERIES = [["current", "in use", "series-2", "dashed"], ["recommended", "recommended", "series-1", "solid"]];

  /** Points where the scale changes, as a line that holds its value in between; the last is drawn to `end`. */
  const held = (points, end) => (points.length ? [...points, [end, points.at(-1)[1]]] : []);

  /** The scale that holds at a step. */
  function scaleAt(points, step) {
    let held = null;
    for (const [at, scale] of points) if (at <= step) held = scale;
    return held;
  }

  function start(host) {
    const { trajectory, horizon } = data.scaler;
    const known = SERIES.filter(([key]) => trajectory[key]);
    const limit = trajectory.limit ?? [];
    const steps = known.flatMap(([key]) => [...trajectory[key].points.map(([step]) => step), ...trajectory[key].skips]);
    const end = Math.max(horizon ?? 1, ...steps);
    const edge = limit.length ? Math.min(...limit.map(([, scale]) => Number(scale))) : null;
    host.append(element("p", { class: "muted" }, "One replica of the simulation for each, that with the median number of " +
      `skipped steps: ${known.map(([key, label]) => `${label} ${trajectory[key].skipped} of ${end}`).join(", ")}.` +
      (edge === null ? "" : ` No recorded step overflows at scales up to ${power(edge)} (dotted). That is the edge; the scale ` +
        "that fits is bound by how large gradients are expected to become, by the loss and by a cap.")));
    const paths = known.map(([key, label, color, dash]) => [label, color, dash, trajectory[key]]);
    const events = paths.flatMap(([label, , , path]) => [
      ...path.points.map(([step, scale]) => ({ step, label, scale, event: "scale from here on" })),
      ...path.skips.map((step) => ({ step, label, scale: scaleAt(path.points, step), event: "step skipped" })),
    ]).sort((a, b) => a.step - b.step).concat(limit.map(([step, scale]) => ({ step, label: "recorded", scale, event: "largest scale without overflow" })));
    const chart = ampdoctor.chart(host, {
      label: "Loss scale over the steps, simulated",
      height: () => 300,
      option,
      columns: [
        { label: "step", kind: "number", value: (row) => row.step },
        { label: "settings", value: (row) => row.label },
        { label: "event", value: (row) => row.event },
        { label: "scale", kind: "number", value: (row) => row.scale, show: (row) => number(row.scale) },
      ],
      rows: () => events,
    });
    chart.legend.append(...ampdoctor.chart.legend([
      ...paths.map(([label, color, dash]) => [`${color} line ${dash}`, label]),
      ...(paths.some(([, , , path]) => path.skips.length) ? [["overflow", "step skipped"]] : []),
      ...(edge === null ? [] : [["muted line dotted", "edge: above it a recorded step overflows"]]),
    ]));

    function option() {
      const { axis, tooltip } = ampdoctor.chart;
      const says = (name) => ({ value }) => [`step ${value[0]}`, `${name}: scale ${power(value[1])}`];
      const lines = paths.map(([label, color, dash, { points }]) => ({
        type: "line", step: "end", symbol: "circle", symbolSize: 5, showSymbol: points.length < 60,
        data: held(points, end), tooltip: tooltip(says(label)),
        lineStyle: { width: 2, type: dash }, color: ampdoctor.color(color),
      }));
      const skips = paths.filter(([, , , path]) => path.skips.length).map(([label, , , path]) => ({
        type: "scatter", symbol: "diamond", symbolSize: path.skips.length > 100 ? 6 : 10, color: ampdoctor.color("overflow"), z: 5,
        data: path.skips.map((step) => [step, scaleAt(path.points, step)]),
        tooltip: tooltip(({ value }) => [`step ${value[0]} skipped`, `${label}: scale ${power(value[1])}`]),
      }));
      const bound = edge === null ? [] : [{
        type: "line", symbol: "none", data: [[0, edge], [end, edge]], color: ampdoctor.color("muted"),
        lineStyle: { width: 1.5, type: "dotted" }, tooltip: { show: false }, silent: true,
      }];
      return {
        grid: { left: 8, right: 20, top: 16, bottom: 34, containLabel: true },
        tooltip: tooltip(() => []),
        xAxis: axis({ type: "value", max: end, min: 0, minInterval: 1, splitLine: { show: false },
          name: "step", nameLocation: "middle", nameGap: 26, axisLabel: { hideOverlap: true } }),
        yAxis: axis({ type: "log", logBase: 2, axisLabel: { formatter: (value) => power(value), hideOverlap: true } }),
        series: [...bound, ...lines, ...skips],
      };
    }
  }

  return { start };
})();
