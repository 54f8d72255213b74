"use strict";
/* One panel a number of the runs, under each other on one axis: what lies above each other happened together. Each span's
   lowest and highest value is a band behind the line of its medians; what is not finite is marked at the top. What does
   not change, or has too few points for a curve, is a number. */

ampdoctor.lanes = (() => {
  const { element, number, power } = ampdoctor;
  const { view, runs, shown, places } = ampdoctor.health;
  const FEW = 60;  // points that are shown as dots as well
  const LEAST = 3;  // points that make a curve
  const WIDE_RANGE = 30;  // of a highest to a lowest value, from which on the axis is logarithmic

  const UNITS = ["B", "kB", "MB", "GB", "TB"];
  function bytes(value) {
    const step = Math.min(Math.max(Math.floor(Math.log10(Math.max(Math.abs(value), 1)) / 3), 0), UNITS.length - 1);
    return `${number(Number((value / 1000 ** step).toPrecision(3)))} ${UNITS[step]}`;
  }
  const seconds = (value) => (Math.abs(value) >= 1 || value === 0 ? `${number(Number(value.toPrecision(3)))} s` : `${number(Number((1e3 * value).toPrecision(3)))} ms`);
  const short = (value) => number(Number(value.toPrecision(3)));
  const rounded = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const many = (value) => (Math.abs(value) >= 1e4 ? rounded.format(value) : short(value));

  /** Each panel: its numbers in the order in which they are drawn, the first as the panel's own. */
  const LANES = [
    { id: "loss", title: "Loss", curves: { loss: "" }, show: short },
    { id: "norm", title: "Gradient norm", curves: { gradient_norm: "before clipping", clipped_norm: "after it" }, show: short },
    { id: "scale", title: "Loss scale", curves: scales(), show: (value) => (value === 0 ? "0" : power(value)), powers: true, held: true, skips: true },
    { id: "headroom", title: "Headroom", about: "powers of two between the largest gradient and overflow", curves: { log2_headroom: "" }, show: short, zero: true },
    { id: "rate", title: "Learning rate", curves: { learning_rate: "" }, show: short, linear: true },
    { id: "tokens", title: "Tokens per second", curves: { tokens_per_second: "" }, show: many, linear: true },
    { id: "samples", title: "Samples per second", curves: { samples_per_second: "" }, show: many, linear: true },
    { id: "seconds", title: "Step time", curves: { step_seconds: "median", "step_seconds.p99": "p99", data_seconds: "waits for data" }, show: seconds },
    { id: "memory", title: "Memory", about: "most that tensors held on the device", curves: { memory_bytes: "" }, show: bytes, linear: true },
  ];
  /** Where a value stands on a panel's own axis: a scale's exponent has whole marks where a logarithmic axis finds none. */
  const height = (spec, value) => (spec.powers ? Math.log2(value) : value);

  /** The curves of the loss scale: one, or one for each scaler that has a name. */
  function scales() {
    const names = [...new Set(runs.flatMap((run) => run.scalers.map(({ scaler }) => scaler)))].filter(Boolean);
    return names.length ? Object.fromEntries(names.map((name) => [`scaler.${name}`, name])) : { loss_scale: "" };
  }

  for (const run of runs) for (const { scaler, path } of run.scalers) {  // the scale that each span ends with
    let at = -1;
    const middle = Float64Array.from(run.axis.last, (step) => {
      while (at + 1 < path.points.length && path.points[at + 1][0] <= step) at += 1;
      return at < 0 ? NaN : Number(path.points[at][1]);
    });
    run.curves[`scaler.${scaler}`] = { low: middle, middle, high: middle };
  }

  /** Room to the largest number means something in fp16 alone; a run that does not say its format has a scaler for it. */
  const inHalf = (run) => (run.precision ? run.precision === "fp16" : run.scalers.length > 0);
  const ROLES = [{ width: 2, opacity: 1 }, { width: 1.2, opacity: 0.75 }, { width: 2.2, opacity: 0.45 }];

  /** A curve of a run; "step_seconds.p99" is the percentile of another, where the report has it. */
  function curveOf(run, name) {
    if (name === "log2_headroom" && !inHalf(run)) return undefined;
    const [base, part] = name.split("."), curve = run.curves[name] ?? run.curves[base];
    if (!curve || !part || curve === run.curves[name]) return curve;
    const values = curve[part];
    return values && { low: values, middle: values, high: values };
  }

  const margins = (width) => (width < 560 ? { left: 52, right: 10 } : { left: 64, right: 14 });

  const titled = (title, about = "") => [element("strong", {}, title), ...(about ? [element("span", { class: "muted" }, about)] : [])];

  /** Make room for a panel: the values that are read beside its drawing. */
  function lane(host, name) {
    const readout = element("dl", { class: "readout" });
    const drawing = element("div", { class: "lane-chart" });
    host.append(element("div", { class: `lane lane-${name}` }, drawing, readout));
    return { readout, drawing };
  }

  /** A chart on the common axis: it zooms with all others, by a drag, by its wheel (`wheel`: what is held for it), from outside,
   *  and shows the place that is read. */
  function onAxis(host, settings) {
    const cross = element("div", { class: "cross", hidden: true }), choice = element("div", { class: "chosen", hidden: true });
    let instance = null, width = 0;
    const chart = ampdoctor.chart(host, {
      ...settings,
      option: (room) => { width = room; mark(); return { dataZoom: zooms(settings.wheel ?? "ctrl"), ...settings.option(room) }; },
      started: (made, canvas) => {
        instance = made;
        canvas.append(cross, choice);
        made.on("datazoom", (event) => {  // in shares of the whole axis
          const { start, end } = event.batch?.[0] ?? event, [low, high] = ampdoctor.health.extent();
          ampdoctor.health.zoom(...[start, end].map((share) => low + (share / 100) * (high - low)));
        });
        pointed(canvas);
        settings.started?.(made, canvas);
      },
    });

    /** Where the drawing begins and how wide it is; beside it may be room for words. */
    function sides() {
      const room = width - (settings.side?.(width) ?? 0), { left, right } = margins(room);
      return { left, across: room - left - right };
    }
    const pixel = (at) => { const { left, across } = sides(); return left + ((at - view.from) / (view.to - view.from)) * across; };
    const value = (x) => { const { left, across } = sides(); return view.from + ((x - left) / across) * (view.to - view.from); };
    const placeAt = (x) => (inside(x) ? value(x) : null);
    const inside = (x) => { const { left, across } = sides(); return x >= left && x <= left + across; };

    function pointed(canvas) {
      let began = null;
      const at = (event) => event.clientX - canvas.getBoundingClientRect().left;
      canvas.addEventListener("pointermove", (event) => {
        const x = at(event);
        if (began !== null) {
          if (Math.abs(x - began) >= 4 && choice.hidden) canvas.setPointerCapture(event.pointerId);  // sooner, a click would be lost
          choice.hidden = Math.abs(x - began) < 4;
          choice.style.left = `${Math.min(x, began)}px`;
          choice.style.width = `${Math.abs(x - began)}px`;
        }
        if (event.screenX !== rests[0] || event.screenY !== rests[1]) readSoon(placeAt(x));
      });
      canvas.addEventListener("pointerleave", () => { if (began === null) readSoon(null); });
      canvas.addEventListener("pointerdown", (event) => {
        if (event.pointerType !== "mouse" || event.button !== 0 || !inside(at(event))) return;
        began = at(event);
      });
      canvas.addEventListener("pointerup", (event) => {
        if (began === null) return;
        const x = at(event);
        choice.hidden = true;
        if (Math.abs(x - began) >= 4) ampdoctor.health.zoom(value(Math.min(x, began)), value(Math.max(x, began)));
        began = null;
      });
      canvas.addEventListener("dblclick", () => ampdoctor.health.reset());
    }

    /** Stand where the place that is read lies; a chart that has not been drawn yet does so when it is. */
    function mark() {
      cross.hidden = width === 0 || view.at === null || view.at < view.from || view.at > view.to;
      if (!cross.hidden) cross.style.left = `${pixel(view.at)}px`;
    }
    ampdoctor.health.listen("at", mark);
    let waiting = 0;
    ampdoctor.health.listen("window", () => {
      mark();
      if (instance === null) return;
      instance.dispatchAction({ type: "dataZoom", startValue: view.from, endValue: view.to }, { silent: true });
      cancelAnimationFrame(waiting);
      waiting = requestAnimationFrame(() => instance.setOption(settings.again(width), { lazyUpdate: true }));
    });
    ampdoctor.health.listen("look", () => chart.update());
    return Object.assign(chart, { placeAt });
  }

  /** Where the mouse was last: a page that scrolls beneath it is no wish to read there. */
  let rests = [NaN, NaN];
  for (const moved of ["pointermove", "pointerdown"]) window.addEventListener(moved, ({ screenX, screenY }) => { rests = [screenX, screenY]; });

  let frame = 0;
  /** A mouse moves more often than a screen is drawn. */
  function readSoon(at) {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => ampdoctor.health.passBy(at));
  }

  function zooms(wheel) {
    const range = { startValue: view.from, endValue: view.to, filterMode: "none", xAxisIndex: 0 };
    return [{ type: "inside", ...range, zoomOnMouseWheel: wheel, moveOnMouseMove: false, moveOnMouseWheel: false, preventDefaultMouseMove: false }];
  }

  function xAxis(more = {}) {
    const [low, high] = ampdoctor.health.extent();
    return ampdoctor.chart.axis({ type: "value", min: low, max: high, splitLine: { show: false }, axisLine: { onZero: false, lineStyle: { color: ampdoctor.color("line") } }, splitNumber: ampdoctor.narrow() ? 3 : 8,
      axisLabel: { formatter: ampdoctor.health.counted, hideOverlap: true, fontSize: 11, showMinLabel: true, alignMinLabel: "left", alignMaxLabel: "right" }, ...more });
  }

  /** The lowest and highest value of a panel between two places, and the least that is above zero. */
  function reach(lane, start = view.from, end = view.to) {
    let low = Infinity, high = -Infinity, least = Infinity;
    for (const run of shown()) for (const name of Object.keys(lane.curves)) {
      const curve = curveOf(run, name), ends = places(run);
      if (!curve || !ends.length) continue;
      const from = Math.max(ampdoctor.health.firstAt(ends, start) - 1, 0), to = ampdoctor.health.firstAt(ends, end);
      for (let span = from; span <= to; span += 1) {
        if (curve.low[span] < low) low = curve.low[span];
        if (curve.high[span] > high) high = curve.high[span];
        if (curve.low[span] > 0 && curve.low[span] < least) least = curve.low[span];
      }
    }
    return { low, high, least };
  }

  /** Where 0 stands on a logarithmic axis: on a line below all else in the run; null where nothing is 0. */
  function floorOf(lane) {
    const { low, high, least } = reach(lane, ...ampdoctor.health.extent());
    return low === 0 && high > 0 && !lane.linear ? least / Math.max((high / least) ** 0.25, 4) : null;
  }

  /** The panel's own axis for what the window holds, where at its top marks stand, and where 0 does if that is a line. */
  function scaleOf(lane) {
    const found = reach(lane), below = floorOf(lane), lifted = (value) => (value === 0 && below !== null ? below : value);
    const log = !lane.linear && !lane.powers && found.low >= 0 && found.high / found.least > WIDE_RANGE;
    const floor = below !== null && found.low === 0 && (log || lane.powers) ? height(lane, below) : null;
    const low = height(lane, log || lane.powers ? lifted(found.low) : found.low), high = height(lane, lane.powers ? lifted(found.high) : found.high);
    if (!(low <= high) || !Number.isFinite(high - low)) return { min: 0, max: 1, top: 0.95, log: false, floor: null };
    if (log) {
      const room = Math.max(Math.log2(high / low), 1);
      return { min: floor ?? low / 2 ** (0.08 * room), max: high * 2 ** (0.14 * room), top: high * 2 ** (0.07 * room), log, floor };
    }
    const bottom = lane.zero ? Math.min(low, 0) : low, room = high - bottom || (lane.powers ? 2 : Math.abs(high)) || 1;
    return { min: floor ?? bottom - 0.06 * room, max: high + 0.14 * room, top: high + 0.07 * room, log: false, floor };
  }

  /** Draw the panels that the logs have; `wanted` names some of them. */
  function start(host, wanted = null) {
    const numbers = element("dl", { class: "pairs numbers" });
    for (const one of LANES) {
      const known = runs.filter((run) => Object.keys(one.curves).some((name) => curveOf(run, name)));
      if (!known.length || (wanted && !wanted.includes(one.id))) continue;
      const number = inANumber(one, known);
      if (number === null) panel(host, one, wanted ? 190 : 132);
      else numbers.append(element("dt", {}, one.title), element("dd", {}, number));
    }
    if (numbers.children.length) host.append(numbers);
  }

  /** What a panel would show, in words: where nothing changes, or there are too few points; else null. */
  function inANumber(spec, known) {
    const said = [];
    for (const run of known) for (const [name, word] of Object.entries(spec.curves)) {
      const curve = curveOf(run, name);
      if (!curve) continue;
      const at = [...run.axis.last.keys()].filter((span) => !Number.isNaN(curve.middle[span]) || curve.nonfinite?.[span] > 0);
      if (at.length === 0) continue;
      const values = at.map((span) => (Number.isNaN(curve.middle[span]) ? "not finite" : spec.show(curve.middle[span])));
      const low = Math.min(...at.map((span) => curve.low[span])), high = Math.max(...at.map((span) => curve.high[span]));
      const marked = curve.nonfinite || (spec.skips && run.axis.skipped?.some((many) => many > 0));
      if (at.length >= LEAST && (low !== high || marked)) return null;
      const text = at.length >= LEAST ? `${values[0]} throughout` : at.map((span, index) => `${values[index]} at step ${run.axis.last[span].toLocaleString("en")}`).join(", ");
      said.push([runs.length > 1 ? run.letter : "", word, text].filter(Boolean).join(": "));
    }
    return said.join("; ");
  }

  function panel(host, spec, tall) {
    const { readout, drawing } = lane(host, spec.id);
    const parts = () => shown().flatMap((run) => Object.keys(spec.curves).map((name, role) => ({ run, name, role, curve: curveOf(run, name) })))
      .filter(({ curve, run }) => curve && places(run).length);
    const chart = onAxis(drawing, {
      label: `${spec.title} over ${ampdoctor.health.AXES[view.axis][2].toLowerCase()}`,
      title: titled(spec.title, spec.about),
      height: () => tall,
      option: (width) => ({ ...again(width), xAxis: xAxis(), grid: { ...margins(width), top: 8, bottom: 22, outerBoundsMode: "none" },
        tooltip: { show: false }, series: series(scaleOf(spec)) }),
      again,
      columns: [
        ...(runs.length > 1 ? [{ label: "run", value: (row) => row.part.run.letter }] : []),
        { label: "from step", kind: "number", value: (row) => row.part.run.axis.first[row.span], show: (row) => row.part.run.axis.first[row.span].toLocaleString("en") },
        { label: "to step", kind: "number", value: (row) => row.part.run.axis.last[row.span], show: (row) => row.part.run.axis.last[row.span].toLocaleString("en") },
        ...(Object.keys(spec.curves).length > 1 ? [{ label: "of", value: (row) => spec.curves[row.part.name] }] : []),
        ...["low", "middle", "high"].map((key) => ({ label: { low: "lowest", middle: "median", high: "highest" }[key], kind: "number",
          value: (row) => row.part.curve[key][row.span], show: (row) => said(row.part.curve[key][row.span]) })),
        { label: "not finite", kind: "number", value: (row) => row.part.curve.nonfinite?.[row.span] ?? 0 },
      ],
      rows: () => parts().flatMap((part) => Array.from(part.run.axis.last, (_, span) => ({ part, span })))
        .filter(({ part, span }) => part.curve.middle[span] === part.curve.middle[span] || part.curve.nonfinite?.[span]),
    });

    const said = (value) => (Number.isNaN(value) ? "-" : spec.show(value));

    /** What depends on the window alone: the own axis, and the marks at its ends. */
    function again() {
      const scale = scaleOf(spec);
      return {
        yAxis: ampdoctor.chart.axis({ type: scale.log ? "log" : "value", min: scale.min, max: scale.max, splitNumber: 3, ...(spec.powers ? { minInterval: 1 } : {}),
          axisLabel: { hideOverlap: true, fontSize: 11, showMinLabel: scale.floor !== null, showMaxLabel: false,
            formatter: (value) => (scale.floor !== null && Math.abs(value - scale.floor) < 1e-9 * Math.max(Math.abs(value), 1e-30) ? "0" : spec.show(spec.powers ? 2 ** value : value)) } }),
        series: floorOf(spec) === null ? marks(scale) : series(scale),  // where 0 stands depends on the axis
      };
    }

    function marks(scale) {
      const dots = (id, y, symbol, symbolSize, wanted) => ({ id, type: "scatter", symbol, symbolSize, z: 6, silent: true,
        data: parts().filter(({ role }) => role === 0).flatMap(({ run, curve }) => chosen(run, (span) => wanted(run, curve)?.[span] > 0)
          .map((x) => ({ value: [x, y], itemStyle: { opacity: 1, color: ampdoctor.color(runs.length > 1 ? run.color : "overflow") } }))) });
      const line = spec.zero ? 0 : scale.floor;
      return [{ id: "zero", type: "line", symbol: "none", silent: true, data: line === null ? [] : ampdoctor.health.extent().map((x) => [x, line]),
        color: ampdoctor.color(spec.zero ? "overflow" : "muted"), lineStyle: { width: 1, type: "dotted" } },
        dots("nonfinite", scale.top, "triangle", 8, (_, curve) => curve.nonfinite),
        ...(spec.skips ? [dots("skips", scale.min, "rect", [2, 10], (run) => run.axis.skipped)] : [])];
    }

    const chosen = (run, wanted) => { const ends = places(run), found = []; for (let span = 0; span < ends.length; span += 1) if (wanted(span)) found.push(ends[span]); return found; };

    function series(scale) {
      const several = Object.keys(spec.curves).length > 1;
      return [
        ...parts().filter(({ role }) => role === 0).map(band),
        ...parts().map(({ run, name, role, curve }) => {
          const points = drawn(run, curve, scale);
          const alone = runs.length === 1 && several;
          return { id: `${run.index} ${name}`, type: "line", data: points, silent: true, z: 4 - role, step: spec.held ? "start" : false,
            color: ampdoctor.color(alone ? `series-${role + 1}` : run.color), showSymbol: points.length < FEW, symbolSize: 4,
            lineStyle: { width: ROLES[role].width, opacity: alone ? 1 : ROLES[role].opacity, type: alone ? ["solid", "dashed", "dotted"][role] : run.dash } };
        }),
        ...marks(scale),
      ];
    }

    /** Medians with a gap where nothing was finite; spans that the log says nothing of are passed over. */
    function drawn(run, curve, { log, floor }) {
      const ends = places(run), points = [];
      for (let span = 0; span < ends.length; span += 1) {
        const value = floor !== null && curve.middle[span] === 0 ? floor : height(spec, curve.middle[span]);
        if (Number.isFinite(value) && !(log && value <= 0)) points.push([ends[span], value]);
        else if (curve.nonfinite?.[span] > 0) points.push([ends[span], null]);
      }
      return points;
    }

    /** All spans' extremes as one outline: a shape a span would be thousands. */
    function band({ run, name, curve }) {
      const ends = places(run), known = [];
      for (let span = 0; span < ends.length; span += 1) if (curve.low[span] < curve.high[span] || curve.low[span] === curve.high[span]) known.push(span);
      const fill = ampdoctor.color(runs.length === 1 ? "series-1" : run.color);
      return { id: `band ${run.index} ${name}`, type: "custom", silent: true, clip: true, z: 1, data: [[ends[0], 0]], encode: { x: 0, y: 1 },
        renderItem: (_, api) => {
          const { log, min } = scaleOf(spec);
          const y = (value) => api.coord([view.from, log ? Math.max(value, min) : Math.max(height(spec, value), min)])[1];
          const x = (span) => api.coord([ends[span], min])[0];
          const points = [...known.map((span) => [x(span), y(curve.high[span])]), ...known.reverse().map((span) => [x(span), y(curve.low[span])])];
          known.reverse();
          return { type: "polygon", shape: { points }, style: { fill, opacity: 0.18 } };
        } };
    }

    function read() {
      const one = (run) => {
        const span = view.at === null ? run.axis.last.length - 1 : ampdoctor.health.spanAt(run, view.at);
        const values = Object.entries(spec.curves).map(([name, word]) => {
          const curve = curveOf(run, name);
          if (!curve || span < 0) return null;
          const value = curve.middle[span], bad = curve.nonfinite?.[span] > 0;
          const text = Number.isNaN(value) ? (bad ? "not finite" : "-") : spec.show(value) + (bad ? ", some not finite" : "");
          return word ? `${word}: ${text}` : text;
        }).filter((text) => text !== null);
        if (spec.skips && run.axis.skipped?.[span] > 0) values.push(`${run.axis.skipped[span]} skipped`);
        return values.length ? values.join("; ") : "-";
      };
      const known = shown().filter((run) => Object.keys(spec.curves).some((name) => curveOf(run, name)));
      readout.replaceChildren(...known.flatMap((run) => [
        element("dt", {}, ...(runs.length > 1 ? [ampdoctor.health.swatch(run), ` ${run.letter}`] : [view.at === null ? "at the end" : "here"])),
        element("dd", {}, one(run))]));
    }

    const keys = Object.entries(spec.curves).map(([name, word], role) => [`series-${role + 1} line ${["", "dashed", "dotted"][role]}`, word, name])
      .filter(([, word, name]) => word && runs.some((run) => curveOf(run, name)));
    chart.legend.append(...ampdoctor.chart.legend([
      ...(runs.length === 1 && keys.length > 1 ? keys : []),
      ...(parts().some(({ curve }) => curve.nonfinite) ? [[`${runs.length > 1 ? "muted" : "overflow"} wedge`, "not finite"]] : []),
      ...(spec.skips && runs.some((run) => run.axis.skipped?.some((many) => many > 0)) ? [[`${runs.length > 1 ? "muted" : "overflow"} tick`, "skipped"]] : []),
    ]));
    ampdoctor.health.listen("at", read);
    ampdoctor.health.listen("look", read);
    read();
  }

  return { start, lane, titled, inHalf, onAxis, xAxis, margins };
})();
