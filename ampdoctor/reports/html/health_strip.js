"use strict";
/* What holds for all panels: which axis, which window, which runs, which place is read; and on top of the panels the
   alerts, checkpoints and actions of each run as flags on the same axis. */

ampdoctor.strip = (() => {
  const { element, color } = ampdoctor;
  const { view, runs, alerts, shown, place, places } = ampdoctor.health;
  /** Of each mark its shape, colour and size, and whether it is hollow. */
  const SEVERITY = { error: ["triangle", "error", 13], warning: ["diamond", "warning", 13], note: ["circle", "note", 9] };
  const HEALTH = { good: ["circle", "ok", 10], finite: ["circle", "ok", 9, true], probation: ["diamond", "warning", 11, true], sick: ["path://M0 0L3 0L5 3L7 0L10 0L6.5 5L10 10L7 10L5 7L3 10L0 10L3.5 5Z", "error", 10],
    unknown: ["circle", "muted", 8, true] };
  const SAYS = { good: "good", finite: "finite when it was scanned", probation: "waits for clean steps", sick: "sick", unknown: "not judged" };
  const ROW = 22;

  function start(host, opened) {
    toolbar(host);
    const { margins, xAxis, onAxis, titled } = ampdoctor.lanes;
    const rows = () => shown().flatMap((run) => lines(run));
    if (!runs.some((run) => lines(run).length)) return;
    const { drawing } = ampdoctor.lanes.lane(host, "flags");
    let drawn = [];  // beside the chart, which copies all that it is given
    const marks = () => rows().flatMap((row) => row.marks.map((mark) => ({ ...mark, row })));
    const chart = onAxis(drawing, {
      label: "Alerts, checkpoints and actions over the steps",
      title: titled("Alerts and checkpoints"),
      wheel: true,
      height: () => 30 + ROW * Math.max(1, rows().length),
      option: (width) => ({
        grid: { ...margins(width), top: 4, bottom: 22, outerBoundsMode: "none" },
        xAxis: xAxis(),
        yAxis: ampdoctor.chart.axis({ type: "category", inverse: true, data: rows().map((row) => row.name), axisTick: { show: false }, axisLine: { show: false },
          splitLine: { show: true }, axisLabel: { fontSize: 11, interval: 0 } }),
        tooltip: ampdoctor.chart.tooltip(({ dataIndex }) => drawn[dataIndex].says),
        series: [{ id: "flags", type: "scatter", clip: true, data: (drawn = marks()).map((mark) => ({
          value: [place(mark.run, mark.step), mark.row.name], symbol: mark.look[0], symbolSize: mark.look[2],
          itemStyle: { color: color(mark.look[3] ? "bg" : mark.look[1]), borderColor: color(mark.look[1]), borderWidth: mark.look[3] ? 2 : 0, opacity: 1 }, cursor: mark.alert ? "pointer" : "default" })) }],
      }),
      again: () => ({}),
      started: (instance) => instance.on("click", ({ dataIndex }) => { if (drawn[dataIndex]?.alert) opened(drawn[dataIndex].alert); }),
      columns: [
        { label: "step", kind: "number", value: (row) => row.step, show: (row) => row.step.toLocaleString("en") },
        { label: "of", value: (row) => row.row.name },
        { label: "what", value: (row) => row.says.slice(1).join(" ") },
      ],
      rows: marks,
    });
    chart.legend.append(...ampdoctor.chart.legend([
      ...[...new Set(alerts.map((it) => it.severity))].map((one) => [`flag ${SEVERITY[one][0]} ${one}`, one]),
      ...[...new Set(runs.flatMap((run) => run.checkpoints.map((it) => it.health)))].map((one) => [`flag ${one}`, `checkpoint ${SAYS[one]}`])]));

    /** The rows of a run; one that says nothing is not there. */
    function lines(run) {
      const own = (name) => (runs.length > 1 ? `${run.letter} ${name}` : name);
      const step = (it) => `Step ${it.step.toLocaleString("en")}`;
      const alert = alerts.filter((it) => it.run === run.index).map((it) => ({
        run, step: it.step, alert: it, look: SEVERITY[it.severity], says: [step(it), `${it.severity} ${it.code} ${it.name}`, it.message] }));
      const saved = run.checkpoints.map((it) => ({
        run, step: it.step, look: HEALTH[it.health], says: [step(it), it.path, `${SAYS[it.health]}${it.reason ? `: ${it.reason}` : ""}`] }));
      const done = [
        ...run.looks.map((it) => ({ run, step: it.step, look: ["pin", "accent", 16], says: [step(it), `looked at in place: ${it.verdict.replace("_", " ")}`, it.says] })),
        ...run.actions.map((it) => ({ run, step: it.step, look: ["rect", "accent", 9], says: [step(it), it.action, it.reason] })),
      ];
      return [["alerts", alert], ["saved", saved], ["actions", done]].filter(([, marks]) => marks.length)
        .map(([name, found]) => ({ name: own(name), marks: found.filter((mark) => place(run, mark.step) !== null) }));
    }
  }

  function toolbar(host) {
    const { AXES, axes, look, zoom, reset, counted, extent, swatch } = ampdoctor.health;
    const bar = element("div", { class: "health-controls" });
    const tools = element("div", { class: "tools" });
    if (axes.length > 1) tools.append(ampdoctor.choice("Axis", axes.map((name) => [name, AXES[name][2]]), (name) => look(() => { view.axis = name; }), view.axis));
    const from = element("input", { type: "text", inputmode: "numeric", class: "place", change: () => typed() });
    const to = element("input", { type: "text", inputmode: "numeric", class: "place", change: () => typed() });
    tools.append(ampdoctor.field("From", from), ampdoctor.field("To", to));
    const digits = (input) => Number(input.value.replace(/[\s,_]/g, ""));
    function typed() {
      if (digits(from) < digits(to)) zoom(digits(from), digits(to));
      else say();
    }
    const by = (start, end) => () => { const width = view.to - view.from; zoom(view.from + start * width, view.to + end * width); };
    const button = (text, clicked) => element("button", { type: "button", click: clicked }, text);
    const back = button("Earlier", by(-0.5, -0.5)), on = button("Later", by(0.5, 0.5)), far = button("Zoom out", by(-0.5, 0.5)), all = button("Whole run", reset);
    tools.append(button("Zoom in", by(0.25, -0.25)), far, back, on, all);
    const cursor = element("input", { type: "range", min: 0, max: 1000, value: 1000, input: () => {
      ampdoctor.health.readAt(view.from + (cursor.valueAsNumber / 1000) * (view.to - view.from)); } });
    const said = element("output", {});
    tools.append(ampdoctor.field("Read at", cursor, { grow: true, beside: said }));
    bar.append(element("details", { class: "menu" }, element("summary", {}, "Axis, zoom and values"), element("div", { class: "controls" }, tools)),
      element("p", { class: "muted by-mouse" }, "Drag over a chart to zoom, or scroll: over the flags, or over a curve with Ctrl. A double click shows the whole run."));
    if (runs.length > 1) {
      const boxes = runs.map((run) => {
        const box = ampdoctor.checkbox(` ${run.letter} ${run.name}`, true, (checked) => look(() => (checked ? view.hidden.delete(run.index) : view.hidden.add(run.index))));
        box.querySelector("input").after(swatch(run));
        return box;
      });
      const absent = element("p", { class: "muted", role: "status" });
      bar.append(element("div", { class: "tools" }, ...boxes), absent);
      const miss = () => {
        const without = shown().filter((run) => places(run).length === 0);
        absent.hidden = without.length === 0;
        absent.textContent = without.length ? `${without.map((run) => run.letter).join(", ")}: the log does not say how many ${ampdoctor.health.label()} it has seen.` : "";
      };
      ampdoctor.health.listen("look", miss);
      miss();
    }
    host.append(bar);

    function say() {
      [from.value, to.value] = [view.from, view.to].map((value) => Math.round(value).toLocaleString("en"));
      const [low, high] = extent();
      all.disabled = far.disabled = view.from <= low && view.to >= high;
      [back.disabled, on.disabled] = [view.from <= low, view.to >= high];
      cursor.valueAsNumber = view.at === null ? 1000 : 1000 * Math.min(Math.max((view.at - view.from) / (view.to - view.from), 0), 1);
      said.textContent = view.at === null ? "the end" : `${ampdoctor.health.label()} ${counted(view.at)}`;
      cursor.setAttribute("aria-valuetext", said.textContent);
    }
    for (const kind of ["window", "look", "at"]) ampdoctor.health.listen(kind, say);
    say();
  }

  return { start };
})();
