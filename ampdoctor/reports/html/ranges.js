"use strict";
/* The ranges of a profile: what is looked at (kind of tensor, format, loss scale), and the histogram of one place. */

ampdoctor.ranges = (() => {
  const { data, element, percent, power, number, count, histogram, byWords } = ampdoctor;
  const KINDS = {
    activation_grad: "activation gradients",
    weight_grad: "weight gradients",
    activation: "activations",
    weight: "weights",
  };
  const FORMATS = ["fp16", "bf16", "e4m3fn", "e5m2"];
  const REACH = [-10, 32];  // log2 of the loss scales at which a profile keeps its curves
  const state = { kind: "", half: true, format: "fp16", scale: 1, site: null };
  const listeners = [];
  let sites = [];

  const scaled = (kind) => kind.endsWith("_grad");

  /** Histograms are as the backward delivered the gradients: a scale that the loss carried by hand is divided out. */
  function handMade(site, read) {
    if (!scaled(site.kind) || !site.amax) return 1;
    const ratio = read.amax / Number(site.amax);
    const nearest = 2 ** Math.round(Math.log2(ratio));
    return Math.abs(ratio / nearest - 1) < 1e-5 ? nearest : ratio;  // the report rounds to six digits
  }

  function load() {
    sites = data.profile.sites.map((site) => {
      const read = histogram.read(site.histogram);
      return { ...site, read, base: handMade(site, read), label: `${site.name || "model"}${site.input ? ".input" : ""}` };
    });
    sites.sort((a, b) => byWords(a.label, b.label));
  }

  /** What the values are multiplied by at a loss scale; activations and weights are not scaled. */
  const factor = (site, scale) => (scaled(site.kind) ? scale / site.base : 1);
  const at = (site, format, scale) => histogram.figures(site.read, data.formats[format], factor(site, scale));
  const chosen = () => sites.filter((site) => site.kind === state.kind && (site.half || !state.half));
  const scale = () => state.scale;
  const usable = (value) => value > 0 && value < Infinity;

  function set(change) {
    Object.assign(state, change);
    if (!chosen().includes(state.site)) state.site = worst();
    listeners.forEach((listener) => listener());
  }

  /** Where most is lost at the scale that is chosen. */
  function worst() {
    const lost = (site) => { const f = at(site, state.format, scale()); return f.flushed + f.overflowed; };
    return chosen().reduce((most, site) => (most === null || lost(site) > lost(most) ? site : most), null);
  }

  /** `choice` is the place for what is looked at, `controls` for the format and the scale, `view` for a histogram. */
  function start({ choice, controls, view }) {
    load();
    if (sites.length === 0) {
      choice.append(element("p", { class: "muted" }, "This report has no histograms."));
      return false;
    }
    const run = Number(data.profile.loss_scale);
    const fits = ampdoctor.real(data.profile.recommended_scale);
    const named = meant();
    state.kind = named?.kind ?? Object.keys(KINDS).find((kind) => sites.some((site) => site.kind === kind));
    state.scale = usable(run) ? run : 1;
    state.half = named ? Boolean(named.half) : sites.some((site) => site.kind === state.kind && site.half);
    state.site = named ?? worst();
    choice.append(tensors());
    controls.append(fields(run, fits));
    draw(view);
    return true;
  }

  /** The place that the first finding is about, where it was measured; of its tensors the first kind. */
  function meant() {
    const { module, tensor } = data.about ?? {};
    const places = sites.filter((site) => (tensor ? site.name === tensor : Boolean(module) && site.module === module));
    return Object.keys(KINDS).map((kind) => places.find((site) => site.kind === kind)).find(Boolean);
  }

  function tensors() {
    const kinds = Object.entries(KINDS).filter(([kind]) => sites.some((site) => site.kind === kind));
    return element("div", { class: "tools" }, ampdoctor.choice("Tensors", kinds, (value) => set({ kind: value }), state.kind),
      ampdoctor.checkbox("only what is half precision", state.half, (half) => set({ half })));
  }

  function fields(run, fits) {
    const format = ampdoctor.choice("Format", FORMATS.map((name) => [name, name]), (value) => set({ format: value }));
    const output = element("output", { for: "loss-scale" });
    const named = [["run", run], ["fits", fits]].filter(([, value]) => usable(value));
    const reach = [...REACH, ...named.map(([, value]) => Math.log2(value))];  // a collapsed scale lies far below
    const slider = element("input", {
      type: "range", id: "loss-scale", step: 1,
      min: Math.floor(Math.min(...reach)), max: Math.ceil(Math.max(...reach)), value: Math.round(Math.log2(scale())),
      input: () => set({ scale: 2 ** Number(slider.value) }),
    });
    const jumps = named.map(([text, value]) => element("button", { type: "button", click: () => {
      slider.value = Math.round(Math.log2(value));
      set({ scale: value });  // itself, also between two powers of two
    } }, `${text} ${power(value)}`));
    const shares = element("p", { class: "shares", role: "status" });
    listeners.push(() => {
      const exact = power(scale()), plain = number(scale());
      const said = !scaled(state.kind) ? "does not act on these" : exact === plain ? plain : `${exact} = ${plain}`;
      output.textContent = said;
      slider.setAttribute("aria-valuetext", said);
      slider.disabled = !scaled(state.kind);
      shares.textContent = together();
    });
    const panel = element("div", { class: "controls" },
      element("div", { class: "tools" }, format,
        ampdoctor.field("Loss scale", slider, { grow: true, beside: output }), ...jumps),
      shares);
    listeners.at(-1)();
    return panel;
  }

  /** All tensors of the kind as one. */
  function together() {
    const all = chosen();
    if (all.length === 0) return "No such tensor was measured.";
    const merged = histogram.merge(all.map((site) => site.read));
    const f = histogram.figures(merged, data.formats[state.format], factor(all[0], scale()));
    const over = all.filter((site) => at(site, state.format, scale()).overflowed > 0).length;
    return `${KINDS[state.kind]} in ${state.format}: flushed ${percent(f.flushed)}, subnormal ${percent(f.subnormal)}, ` +
      `overflowing ${percent(f.overflowed)}; ${over} of ${count(all.length, "tensor")} overflow`;
  }

  const REGIONS = [
    ["flushed", "flushed to zero"], ["subnormal", "subnormal: fewer bits"],
    ["normal", "normal"], ["overflow", "overflow"],
  ];

  /** The format's window on log2 of the unscaled magnitude: where flushed, subnormal and normal end. */
  function borders(site) {
    const format = data.formats[state.format];
    const shift = Math.log2(factor(site, scale()));
    return [format.flush_at, format.min_normal, format.overflow_at].map((limit) => Math.log2(limit) - shift);
  }

  function draw(view) {
    const site = element("select", { change: () => set({ site: chosen()[Number(site.value)] }) });
    const heading = element("p", { class: "muted", role: "status" });
    view.append(element("div", { class: "tools" }, ampdoctor.field("Layer", site, { grow: true })), heading);
    const chart = ampdoctor.chart(view, {
      label: "Values of the layer by exponent, with the format's window",
      height: () => (ampdoctor.narrow() ? 260 : 320),
      option: bars,
      columns: [
        { label: "from (excluded)", kind: "number", value: ([e]) => e, show: ([e]) => `2^${e}` },
        { label: "to", kind: "number", value: ([e]) => e, show: ([e]) => `2^${e + 1}` },
        { label: "values", kind: "number", value: ([, many]) => many, show: ([, many]) => many.toLocaleString("en") },
        { label: "becomes", value: ([e]) => region(e), show: ([e]) => region(e) },
      ],
      rows: () => (state.site ? histogram.binades(state.site.read) : []),
    });
    chart.legend.append(...ampdoctor.chart.legend(REGIONS));
    let listed = "";
    const refresh = () => {
      const all = chosen();
      const key = `${state.kind} ${state.half}`;
      if (key !== listed) {
        listed = key;
        site.replaceChildren(...all.map((one, index) => element("option", { value: index }, one.label)));
      }
      site.value = String(all.indexOf(state.site));
      heading.textContent = state.site ? figures(state.site) : "";
      chart.update();
    };
    listeners.push(refresh);
    refresh();
  }

  function figures(site) {
    const f = at(site, state.format, scale());
    return `${site.label}: flushed ${percent(f.flushed)}, subnormal ${percent(f.subnormal)}, overflowing ` +
      `${percent(f.overflowed)}, headroom 2^${f.headroom.toFixed(2)}; ${count(site.read.total, "nonzero value")}, ` +
      `${number(site.read.amin)} to ${number(site.read.amax)}`;
  }

  /** By the middle of the binade: borders are whole exponents at scales that are powers of two, but for max. */
  function region(exponent) {
    const [flush, normal, overflow] = borders(state.site);
    const middle = exponent + 0.5;
    return middle < flush ? "flushed" : middle < normal ? "subnormal" : middle < overflow ? "normal" : "overflow";
  }

  function bars() {
    if (!state.site) return {};
    const { axis, tooltip } = ampdoctor.chart;
    const counts = histogram.binades(state.site.read);
    const limits = borders(state.site);
    const low = Math.floor(Math.min(counts[0][0], Math.max(limits[0], -150)) - 2);
    const high = Math.ceil(Math.max(counts.at(-1)[0] + 1, Math.min(limits[2], 129)) + 2);
    const edges = [low, ...limits.map((limit) => Math.min(Math.max(limit, low), high)), high];
    return {
      grid: { left: 8, right: 16, top: 12, bottom: 34, containLabel: true },
      tooltip: tooltip(({ value }) => [
        `2^${value[0]} to 2^${value[0] + 1} before scaling`, `${count(value[1], "value")}: ${region(value[0])}`]),
      xAxis: axis({
        type: "value", min: low, max: high, minInterval: 1, splitLine: { show: false },
        name: "magnitude before scaling", nameLocation: "middle", nameGap: 26,
        axisLabel: { formatter: (value) => `2^${value}`, hideOverlap: true },
      }),
      yAxis: axis({ type: "log", min: 0.5, axisLabel: { formatter: (value) => (value < 1 ? "" : short10(value)) } }),
      series: [{
        type: "custom",
        data: counts,
        encode: { x: 0, y: 1 },
        renderItem: (_, api) => {
          const [left, top] = api.coord([api.value(0), api.value(1)]);
          const [right, bottom] = api.coord([api.value(0) + 1, 0.5]);
          const shape = { x: left + 0.5, y: top, width: Math.max(right - left - 1, 1), height: bottom - top };
          return { type: "rect", shape, style: { fill: ampdoctor.color(region(api.value(0))) } };
        },
        markArea: {
          silent: true,
          data: REGIONS.map(([name], index) => [
            { xAxis: edges[index], itemStyle: { color: ampdoctor.color(name), opacity: 0.14 } },
            { xAxis: edges[index + 1] },
          ]),
        },
      }],
    };
  }

  const short10 = (value) => (value >= 1e6 ? `${value / 1e6}M` : value >= 1e3 ? `${value / 1e3}k` : String(value));

  return { start, state, set, at, chosen, scale, scaled, KINDS, listen: (listener) => listeners.push(listener) };
})();
