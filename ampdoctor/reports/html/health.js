"use strict";
/* Runs over their steps: the packed numbers made ready, and what all views of them share: which axis, which window of
   it, which runs, and the place that is read. The views listen and draw; none holds any of this itself. */

ampdoctor.health = (() => {
  const { data, element } = ampdoctor;
  const AXES = { step: ["last", "step", "Steps"], samples: ["samples", "samples", "Samples"], tokens: ["tokens", "tokens", "Tokens"] };
  const LOOKS = [["series-1", "solid"], ["series-2", "dashed"], ["series-3", "dotted"], ["series-4", "solid"],
    ["muted", "dashed"], ["overflow", "dotted"]];
  const LEAST_SPANS = 4;  // how far one can zoom in

  function unpack(column) {
    const letters = atob(column.f4 ?? column.f8);
    const bytes = new Uint8Array(letters.length);
    for (let at = 0; at < bytes.length; at += 1) bytes[at] = letters.charCodeAt(at);
    return column.f4 === undefined ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
  }
  const unpackAll = (columns) => Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, unpack(column)]));

  /** Where each span is a single step, the extremes are its value, and the page has them once. */
  const extremes = (curve) => ({ low: curve.middle, high: curve.middle, ...curve });
  const ends = (axis) => ({ first: axis.last, ...axis });

  const runs = (data.health?.runs ?? []).map((run, index) => ({
    ...run, index, color: LOOKS[index % LOOKS.length][0], dash: LOOKS[index % LOOKS.length][1],
    axis: ends(unpackAll(run.axis)),
    curves: Object.fromEntries(Object.entries(run.curves).map(([name, curve]) => [name, extremes(unpackAll(curve))])),
    maps: run.maps.map((map) => ({ ...map, steps: unpack(map.steps), values: unpack(map.values) })),
  }));
  const alerts = data.health?.alerts ?? [];
  const axes = Object.keys(AXES).filter((name) => runs.some((run) => run.axis[AXES[name][0]]?.length));
  const view = { axis: axes.includes(data.health?.axis) ? data.health.axis : "step", from: 0, to: 1, at: null, held: null, hidden: new Set() };
  const listeners = { window: new Set(), look: new Set(), at: new Set() };
  const tell = (kind) => listeners[kind].forEach((heard) => heard());
  const listen = (kind, heard) => listeners[kind].add(heard);

  const shown = () => runs.filter((run) => !view.hidden.has(run.index));
  const label = () => AXES[view.axis][1];

  /** Where the spans of a run end on the axis that is chosen; empty where the run has no such numbers. */
  const places = (run) => run.axis[AXES[view.axis][0]] ?? new Float64Array(0);

  /** The index of the first of ascending values that is at least `wanted`; the last one's where none is. */
  function firstAt(values, wanted) {
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] >= wanted) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** Where a step of a run lies on the axis; null where the run has no such numbers. */
  function place(run, step) {
    if (view.axis === "step") return step;
    const ends = places(run);
    if (ends.length === 0) return null;
    const span = firstAt(run.axis.last, step);
    const before = span ? ends[span - 1] : 0, first = span ? run.axis.last[span - 1] : run.axis.first[0] - 1;
    const share = Math.min((step - first) / Math.max(run.axis.last[span] - first, 1), 1);
    return before + share * (ends[span] - before);
  }

  /** The span of a run that is read at a place; -1 where the run is not there. */
  function spanAt(run, at) {
    const ends = places(run);
    if (ends.length === 0 || at > ends.at(-1) + (ends.at(-1) - ends[0]) / 100) return -1;
    return firstAt(ends, at);
  }

  /** The whole of what is shown. */
  function whole() {
    let low = Infinity, high = -Infinity;
    for (const run of shown()) {
      const ends = places(run);
      if (view.axis === "step" && ends.length) low = Math.min(low, run.axis.first[0]);
      for (const end of ends) if (end === end) { low = Math.min(low, end); high = Math.max(high, end); }
      const steps = [...run.checkpoints, ...run.looks, ...run.actions, ...alerts.filter((it) => it.run === run.index)].map((it) => it.step);
      for (const scaler of run.scalers) for (const [step] of scaler.path.points) steps.push(step);
      for (const step of steps) { const x = place(run, step); if (x !== null) { low = Math.min(low, x); high = Math.max(high, x); } }
    }
    if (!(low < high)) return Number.isFinite(low) ? [low - 1, low + 1] : [0, 1];
    return [low > 0 && low < high / 20 ? 0 : low, high];
  }

  let extent = runs.length ? whole() : [0, 1];
  [view.from, view.to] = extent;

  /** Show another window; the charts follow. `told` is false where a chart has said so itself. */
  function zoom(from, to) {
    const [low, high] = extent, least = Math.min(leastWidth(), high - low);
    const width = Math.min(Math.max(to - from, least), high - low);
    view.from = Math.min(Math.max(from, low), high - width);
    view.to = view.from + width;
    tell("window");
  }
  const leastWidth = () => LEAST_SPANS * (extent[1] - extent[0]) / Math.max(4, ...runs.map((run) => run.axis.last.length));
  const reset = () => zoom(...extent);

  /** Something else than the window has changed: the axis, or which runs are shown. */
  function look(change) {
    const before = view.axis, all = view.from === extent[0] && view.to === extent[1];
    change();
    extent = whole();
    if (before !== view.axis || all) [view.from, view.to] = extent;
    view.from = Math.max(view.from, extent[0]);
    view.to = Math.min(view.to, extent[1]);
    if (!(view.from < view.to)) [view.from, view.to] = extent;
    view.at = view.held = null;
    tell("look");
    tell("at");
  }

  /** Read a place, and stay there: a mouse that passes over the charts is followed, and comes back to it. */
  function readAt(at) { view.held = at; passBy(at); }
  function passBy(at) { view.at = at ?? view.held; tell("at"); }

  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 3 });
  /** A count of steps, samples or tokens. */
  const counted = (value) => (Math.abs(value) < 1e7 ? Math.round(value).toLocaleString("en") : compact.format(value));

  /** A swatch that draws the line of a run. */
  const swatch = (run) => element("span", { class: `swatch line ${run.color} ${run.dash}`, "aria-hidden": "true" });

  return { runs, alerts, axes, AXES, view, listen, shown, label, places, place, spanAt, firstAt, extent: () => extent, zoom, reset, look, readAt, passBy, counted, swatch };
})();
