"use strict";
/* The replayed steps without and with the change, fp32 beside them. What is not finite is marked at the top. */

ampdoctor.proof = (() => {
  const { data, element, real, number } = ampdoctor;
  const RUNS = [
    ["without", "without the change", "series-2", "dashed", "diamond"],
    ["with", "with the change", "series-1", "solid", "circle"],
    ["fp32", "fp32", "series-3", "dotted", "rect"],
  ];
  const MEASURES = [["loss", "loss"], ["gradient_norm", "gradient norm"], ["scale", "loss scale"]];

  function start(host) {
    const steps = data.proof.steps;
    if (steps.length < 3) return;  // the table beside it says as much
    const known = MEASURES.filter(([key]) => steps.some((step) => RUNS.some(([run]) => step[run] && step[run][key] !== null)));
    if (known.length === 0) return;
    const wanted = ampdoctor.about({ underflow: "gradient_norm", scaler: "scale" });
    const view = { measure: known.some(([key]) => key === wanted) ? wanted : known[0][0] };
    host.append(element("div", { class: "tools" }, ampdoctor.choice("Show", known, (value) => { view.measure = value; chart.update(); }, view.measure)));
    const bad = (run, step) => step[run] && (!step[run].finite || step[run].skipped);
    const cell = (run, step) => (step[run] ? real(step[run][view.measure]) : null);
    const chart = ampdoctor.chart(host, {
      label: "The replayed steps, without and with the change",
      height: () => 260,
      option,
      columns: [
        { label: "step", kind: "number", value: (step) => step.step },
        ...RUNS.map(([run, label]) => ({ label, kind: "number", value: (step) => cell(run, step),
          show: (step) => number(cell(run, step)) })),
      ],
      rows: () => steps,
    });
    chart.legend.append(...ampdoctor.chart.legend([
      ...RUNS.filter(([run]) => steps.some((step) => step[run])).map(([, label, color, type]) => [`${color} line ${type}`, label]),
      ...(steps.some((step) => RUNS.some(([run]) => bad(run, step))) ? [["overflow", "not finite, or skipped"]] : [])]));

    function option() {
      const { axis, tooltip } = ampdoctor.chart;
      const all = steps.flatMap((step) => RUNS.map(([run]) => cell(run, step))).filter(Number.isFinite);
      const most = all.length ? Math.max(...all) : 1, least = all.length ? Math.min(...all) : 0;
      const room = (most - least || Math.abs(most) || 1) / 8;
      const top = most + room;
      return {
        grid: { left: 8, right: 20, top: 16, bottom: 34, containLabel: true },
        tooltip: tooltip(() => []),
        xAxis: axis({ type: "value", min: steps[0].step, max: Math.max(steps.at(-1).step, steps[0].step + 1), minInterval: 1,
          splitLine: { show: false }, name: "step", nameLocation: "middle", nameGap: 26 }),
        yAxis: axis({ type: "value", min: least - room, max: top, axisLabel: {
          showMinLabel: false, showMaxLabel: false, hideOverlap: true, formatter: number } }),
        series: RUNS.map(([run, label, color, type, symbol]) => ({
          type: "line", z: run === "without" ? 4 : 3, symbol, symbolSize: run === "without" ? 11 : 9, color: ampdoctor.color(color), lineStyle: { width: 2, type },
          tooltip: tooltip(({ dataIndex }) => {
            const step = steps[dataIndex];
            return [`step ${step.step}, ${label}`, `${view.measure.replace("_", " ")} ${number(cell(run, step))}` +
              (step[run]?.skipped ? ", step skipped" : step[run]?.finite === false ? ", not finite" : "")];
          }),
          data: steps.map((step) => {
            const value = cell(run, step);
            const beyond = step[run] && (bad(run, step) || (value !== null && !Number.isFinite(value)));
            const y = Number.isFinite(value) && value !== null ? value : beyond ? top : null;
            return { value: [step.step, y], ...(beyond ? { itemStyle: { color: ampdoctor.color("overflow") } } : {}) };
          }),
        })),
      };
    }
  }

  return { start };
})();
