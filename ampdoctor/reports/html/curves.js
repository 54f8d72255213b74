"use strict";
/* A few points in order: the checkpoints of a folder, or the replayed steps without and with a change and in fp32. What
   is not finite, and a step that was skipped, is marked at the top. */

ampdoctor.curves = (() => {
  const { data, element, real, number, percent, power } = ampdoctor;
  const ROLES = { weight: "weights", buffer: "buffers", ema: "averaged copies", moment: "optimizer state",
    scaler: "scaler", other: "other tensors" };
  const RUNS = { with: "with the change", without: "without the change", fp32: "fp32" };
  const COLORS = ["series-1", "series-2", "series-3", "series-4", "overflow", "muted"];
  const DASHES = ["solid", "dashed", "dotted"];

  /** The checkpoints: a measure of each role's tensors, or of the training. */
  function trend(host) {
    const { points, unit } = data.trend;
    const roles = Object.keys(ROLES).filter((role) => points.some((point) => point.roles[role]));
    const byRole = (key) => roles.map((role) => ({ label: ROLES[role], of: (point) => real(point.roles[role]?.[key]) }));
    const one = (label, key) => [{ label, of: (point) => real(point[key]) }];
    draw(host, { label: "The checkpoints over their steps", points, unit, measures: {
      amax: { label: "largest magnitude", series: byRole("amax"), log: true, show: number },
      fp16_flushed: { label: "flushed in fp16", series: byRole("fp16_flushed"), show: percent },
      scale: { label: "loss scale", series: one("loss scale", "scale"), log: true, show: power },
      loss: { label: "loss", series: one("loss", "loss"), show: number },
    }, about: { overflow: "amax", underflow: "fp16_flushed", scaler: "scale", data: "loss" } });
  }

  /** The replayed steps: a measure of each run. */
  function proof(host) {
    const points = data.proof.steps, runs = Object.keys(RUNS).filter((run) => points.some((step) => step[run]));
    const of = (label, key) => ({ label, show: number, series: runs.map((run) => ({ label: RUNS[run],
      of: (step) => (step[run] ? real(step[run][key]) : null), bad: (step) => step[run] && (!step[run].finite || step[run].skipped) })) });
    draw(host, { label: "The replayed steps, without and with the change", points, unit: "step",
      measures: { loss: of("loss", "loss"), gradient_norm: of("gradient norm", "gradient_norm"), scale: of("loss scale", "scale") },
      about: { underflow: "gradient_norm", scaler: "scale" } });
  }

  function draw(host, { label, points, unit, measures, about }) {
    if (points.length < 3) return;  // the table beside it says as much
    const known = Object.entries(measures).filter(([, m]) => m.series.some((s) => points.some((p) => s.of(p) !== null)));
    if (known.length === 0) return;
    const wanted = ampdoctor.about(about);
    const view = { measure: known.some(([key]) => key === wanted) ? wanted : known[0][0] };
    const now = () => measures[view.measure];
    const at = (point) => (point.step === null ? point.name : `${unit} ${point.step}`);
    const isBad = (series, point) => series.bad?.(point) || (series.of(point) !== null && !Number.isFinite(series.of(point)));
    host.append(element("div", { class: "tools" }, ampdoctor.choice("Show", known.map(([key, m]) => [key, m.label]),
      (value) => { view.measure = value; refresh(); }, view.measure)));
    const chart = ampdoctor.chart(host, {
      label,
      height: () => 280,
      option,
      columns: [
        { label: unit, kind: "number", value: (row) => row.point.step },
        ...(points[0].name ? [{ label: "checkpoint", kind: "name", value: (row) => row.point.name }] : []),
        { label: "of", value: (row) => row.series.label },
        { label: "value", kind: "number", value: (row) => row.series.of(row.point), show: (row) => now().show(row.series.of(row.point)) },
      ],
      rows: () => points.flatMap((point) => now().series.map((series) => ({ point, series }))),
    });

    function refresh() {
      const drawn = now().series.map((series, index) => [`${COLORS[index]} line ${DASHES[index % DASHES.length]}`, series.label, series])
        .filter(([, , { of }]) => points.some((point) => of(point) !== null));
      const marked = drawn.some(([, , series]) => points.some((point) => isBad(series, point)));
      chart.legend.replaceChildren(...ampdoctor.chart.legend([...drawn, ...(marked ? [["overflow", "not finite, or skipped"]] : [])]));
      chart.update();
    }

    function option() {
      const { axis, tooltip } = ampdoctor.chart;
      const { series, log, show, label: measure } = now();
      const drawable = (value) => value !== null && Number.isFinite(value) && (!log || value > 0);
      const values = series.flatMap(({ of }) => points.map(of)).filter(drawable);
      const most = values.length ? Math.max(...values) : 1, least = values.length ? Math.min(...values) : 0;
      const room = (most - least || Math.abs(most) || 1) / 8, top = log ? 2 * most : most + room;
      return {
        grid: { left: 8, right: 20, top: 16, bottom: 34, containLabel: true },
        tooltip: tooltip(() => []),
        xAxis: axis({ type: "category", data: points.map(at), axisLabel: {
          ...ampdoctor.chart.names(points.map((point) => ({ name: at(point) })), 240, 12).label, interval: "auto", hideOverlap: true } }),
        yAxis: axis({ type: log ? "log" : "value", logBase: 2, scale: true, ...(log ? {} : { min: least - room, max: top }),
          axisLabel: { hideOverlap: true, showMinLabel: Boolean(log), showMaxLabel: Boolean(log), formatter: (value) => show(value) } }),
        series: series.map((one, index) => ({
          type: "line", z: series.length - index, symbol: "circle", symbolSize: 8 + index, color: ampdoctor.color(COLORS[index]), connectNulls: true,
          lineStyle: { width: 2, type: DASHES[index % DASHES.length] },
          tooltip: tooltip(({ dataIndex }) => [points[dataIndex].name ?? at(points[dataIndex]),
            `${one.label}, ${measure}: ${show(one.of(points[dataIndex]))}${one.bad?.(points[dataIndex]) ? ", not finite or skipped" : ""}`]),
          data: points.map((point) => {
            const bad = isBad(one, point), value = drawable(one.of(point)) ? one.of(point) : bad ? top : null;
            return bad ? { value, symbol: "diamond", itemStyle: { color: ampdoctor.color("overflow") } } : value;
          }),
        })),
      };
    }
    refresh();
  }

  return { trend, proof };
})();
