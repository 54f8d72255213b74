"use strict";
/* The checkpoints of a folder in order: largest magnitude, share flushed in fp16, loss scale and loss. */

ampdoctor.trend = (() => {
  const { data, element, real, number, percent, power } = ampdoctor;
  const ROLES = { weight: "weights", buffer: "buffers", ema: "averaged copies", moment: "optimizer state",
    scaler: "scaler", other: "other tensors" };
  const COLORS = ["series-1", "series-2", "series-3", "series-4", "overflow", "muted"];
  const DASHES = ["solid", "dashed", "dotted"];

  function start(host) {
    const { points, unit } = data.trend;
    if (points.length < 3) return;  // the table below says as much
    const roles = Object.keys(ROLES).filter((role) => points.some((point) => point.roles[role]));
    const byRole = (key) => roles.map((role) => ({ label: ROLES[role], of: (point) => real(point.roles[role]?.[key]) }));
    const one = (label, key) => [{ label, of: (point) => real(point[key]) }];
    const measures = {
      amax: { label: "largest magnitude", series: byRole("amax"), log: true, show: number },
      fp16_flushed: { label: "flushed in fp16", series: byRole("fp16_flushed"), show: percent },
      scale: { label: "loss scale", series: one("loss scale", "scale"), log: true, show: power },
      loss: { label: "loss", series: one("loss", "loss"), show: number },
    };
    const known = Object.entries(measures).filter(([, m]) => m.series.some((s) => points.some((p) => s.of(p) !== null)));
    if (known.length === 0) return;
    const wanted = ampdoctor.about({ overflow: "amax", underflow: "fp16_flushed", scaler: "scale", data: "loss" });
    const view = { measure: known.some(([key]) => key === wanted) ? wanted : known[0][0] };
    const now = () => measures[view.measure];
    const at = (point) => (point.step === null ? point.name : `${unit} ${point.step}`);
    host.append(element("div", { class: "tools" }, ampdoctor.choice("Show", known.map(([key, m]) => [key, m.label]),
      (value) => { view.measure = value; legend(); chart.update(); }, view.measure)));
    const chart = ampdoctor.chart(host, {
      label: "The checkpoints over their steps",
      height: () => 280,
      option,
      columns: [
        { label: unit, kind: "number", value: (row) => row.point.step },
        { label: "checkpoint", kind: "name", value: (row) => row.point.name },
        { label: "of", value: (row) => row.series.label },
        { label: "value", kind: "number", value: (row) => row.series.of(row.point), show: (row) => now().show(row.series.of(row.point)) },
      ],
      rows: () => points.flatMap((point) => now().series.map((series) => ({ point, series }))),
    });
    function legend() {
      chart.legend.replaceChildren(...ampdoctor.chart.legend(
        now().series.map(({ label, of }, index) => [`${COLORS[index]} line ${DASHES[index % DASHES.length]}`, label, of])
          .filter(([, , of]) => points.some((point) => of(point) !== null))));
    }
    legend();

    function option() {
      const { axis, tooltip } = ampdoctor.chart;
      const { series, log, show, label } = now();
      const drawable = (value) => value !== null && Number.isFinite(value) && (!log || value > 0);
      return {
        grid: { left: 8, right: 20, top: 16, bottom: 34, containLabel: true },
        tooltip: tooltip(() => []),
        xAxis: axis({ type: "category", data: points.map(at), axisLabel: {
          ...ampdoctor.chart.names(points.map((point) => ({ name: at(point) })), 240, 12).label, interval: "auto", hideOverlap: true } }),
        yAxis: axis({ type: log ? "log" : "value", logBase: 2, scale: true,
          axisLabel: { hideOverlap: true, formatter: (value) => show(value) } }),
        series: series.map(({ label: name, of }, index) => ({
          type: "line", symbolSize: 8, color: ampdoctor.color(COLORS[index]), connectNulls: true,
          lineStyle: { width: 2, type: DASHES[index % DASHES.length] },
          tooltip: tooltip(({ dataIndex }) => [points[dataIndex].name, `${name}, ${label}: ${show(of(points[dataIndex]))}`]),
          data: points.map((point) => (drawable(of(point)) ? of(point) : null)),
        })),
      };
    }
  }

  return { start };
})();
