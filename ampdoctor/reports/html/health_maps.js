"use strict";
/* Single tensors over the steps: a row a tensor, on the axis of the panels above. A map is one picture that is painted
   anew for each window: as many shapes as it has cells would be 80,000. */

ampdoctor.maps = (() => {
  const { element, number, percent } = ampdoctor;
  const { view, runs, alerts } = ampdoctor.health;
  const MAPS = { norm: ["norm", "log"], amax: ["largest magnitude", "log"], zero_share: ["share of zeros", "share"],
    flushed_share: ["share flushed to zero", "share"], log2_headroom: ["headroom in powers of two", "room"], update_ratio: ["update / parameter", "log"] };
  const ROLES = { gradient: "gradients", update: "updates", parameter: "parameters", activation: "activations",
    activation_gradient: "activations' gradients", optimizer_state: "optimizer state", buffer: "buffers" };
  const SHARES = [0, 1e-4, 1e-3, 1e-2, 0.1, 0.5], SHARE_WORDS = ["none", "to 0.01%", "to 0.1%", "to 1%", "to 10%", "to 50%", "more"];
  const ROOMS = [8, 6, 4, 2, 1, 0], ROOM_WORDS = ["8 or more", "6 to 8", "4 to 6", "2 to 4", "1 to 2", "0 to 1", "overflows"];
  const LEVELS = 7, PAGE = 40, NAME = 11, TOP = 4;

  const show = (kind, value) => (value === Infinity ? "not finite" : Number.isNaN(value) ? "-" : kind === "share" ? percent(value) : number(Number(value.toPrecision(3))));

  /** How the values of a map are coloured: a level for each, and what each level means. */
  function colours(map) {
    const kind = MAPS[map.name][1];
    if (kind === "share") return { level: (value) => SHARES.filter((limit) => value > limit).length, words: SHARE_WORDS };
    if (kind === "room") return { level: (value) => ROOMS.filter((limit) => value < limit).length, words: ROOM_WORDS };
    const known = Array.from(map.values).filter((value) => value > 0 && value < Infinity).sort((a, b) => a - b);
    const low = Math.log10(known[Math.floor(0.01 * known.length)] ?? 1), high = Math.log10(known[Math.floor(0.99 * (known.length - 1))] ?? 1);
    const step = Math.max(high - low, 1e-3) / LEVELS;
    const edge = (level) => number(Number((10 ** (low + level * step)).toPrecision(2)));
    return { level: (value) => Math.min(Math.max(Math.floor((Math.log10(value) - low) / step), 0), LEVELS - 1),
      words: Array.from({ length: LEVELS }, (_, level) => (level === LEVELS - 1 ? `${edge(level)} or more` : level === 0 ? `below ${edge(1)}` : `to ${edge(level + 1)}`)) };
  }

  /** The higher, the more a row's course stands out: its worst for a share or a headroom, its rise for a magnitude. */
  function conspicuous(map, row) {
    const kind = MAPS[map.name][1], width = map.steps.length;
    const values = Array.from(map.values.subarray(row * width, (row + 1) * width)).filter((value) => value === value);
    if (values.includes(Infinity)) return Infinity;
    if (kind === "share") return Math.max(0, ...values);
    if (kind === "room") return -Math.min(Infinity, ...values);
    const logs = values.filter((value) => value > 0).map(Math.log2).sort((a, b) => a - b);
    return logs.length ? logs.at(-1) - logs[logs.length >> 1] : 0;
  }

  /** How far the values of a map's rows lie apart, in powers of two: the mean over its rows. */
  function variation({ map, kind }) {
    const width = map.steps.length, far = map.tensors.map((_, row) => {
      const values = Array.from(map.values.subarray(row * width, (row + 1) * width)).filter(Number.isFinite)
        .map((value) => (kind === "room" ? value : Math.log2(kind === "share" ? Math.max(value, SHARES[1]) : value))).filter(Number.isFinite);
      return values.length ? Math.max(...values) - Math.min(...values) : 0;
    });
    return far.reduce((sum, one) => sum + one, 0) / far.length;
  }

  /** Draw the maps: first the one that shows the worst alert's tensor, else the one that varies most. Returns what shows the map and the row that an alert is about. */
  function start(host) {
    const all = runs.flatMap((run) => run.maps.map((map) => ({ run, map, kind: MAPS[map.name][1] })))
      .filter(({ run, map, kind }) => map.steps.length && map.tensors.length && (kind !== "room" || ampdoctor.lanes.inHalf(run)));
    if (all.length === 0) return () => {};
    const varied = all.map(variation);
    const state = { at: varied.indexOf(Math.max(...varied)), order: "model", page: 0, rows: [], alert: null };
    const now = () => all[state.at];
    host.append(element("h3", {}, "Layer by layer"));
    const title = ({ run, map }) => `${MAPS[map.name][0]} of ${ROLES[map.role] ?? map.role}${runs.length > 1 ? `, ${run.letter} ${run.name}` : ""}`;
    const what = ampdoctor.choice("Show", all.map((one, index) => [index, title(one)]), (index) => { state.at = Number(index); state.page = 0; refresh(); }, state.at);
    const order = ampdoctor.choice("Order", [["model", "as in the model"], ["worst", "worst first"], ["name", "by name"]],
      (value) => { state.order = value; state.page = 0; refresh(); });
    const pages = ampdoctor.pager((by) => { state.page += by; refresh(); });
    const left = element("p", { class: "muted" }), about = element("p", { id: "map-about" }), tip = element("div", { class: "tip", hidden: true });
    host.append(element("div", { class: "tools" }, what, order, ...pages.nodes), about, left);
    const drawn = () => state.rows.slice(PAGE * state.page, PAGE * (state.page + 1));
    const drawing = element("div", { class: "map" });
    host.append(drawing);
    const wide = (width) => width > 860;
    const words = (width) => ampdoctor.chart.names(drawn().map((row) => ({ name: now().map.tensors[row] })), wide(width) ? 520 : 2 * width, NAME);
    const { margins, xAxis, onAxis } = ampdoctor.lanes;
    /** Names stand beside the picture, in the room of the panels' words, or each above its row where there is none. */
    const rowHeight = (width) => (wide(width) ? Math.max(words(width).row, 14) : words(width).row + 16);
    const side = (width) => (wide(width) ? host.querySelector(".map").clientWidth - laneWidth() : 0);
    const laneWidth = () => document.querySelector("#lanes-view .lane-chart")?.clientWidth ?? drawing.clientWidth;

    const chart = onAxis(drawing, {
      label: "Heat map: tensors over the steps",
      height: (width) => 30 + rowHeight(width) * Math.max(1, drawn().length),
      option,
      again: () => ({}),
      side,
      columns: [
        { label: "tensor", kind: "name", value: (cell) => now().map.tensors[cell.row] },
        { label: "step", kind: "number", value: (cell) => now().map.steps[cell.column], show: (cell) => now().map.steps[cell.column].toLocaleString("en") },
        { label: "value", kind: "number", value: (cell) => valueAt(cell.row, cell.column), show: (cell) => show(now().kind, valueAt(cell.row, cell.column)) },
      ],
      rows: () => state.rows.flatMap((row) => Array.from(now().map.steps, (_, column) => ({ row, column }))).filter(({ row, column }) => !Number.isNaN(valueAt(row, column))),
      started: (_, canvas) => {
        canvas.append(tip);
        canvas.addEventListener("pointermove", (event) => tell(event, canvas.getBoundingClientRect()));
        canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
      },
    });
    const valueAt = (row, column) => now().map.values[row * now().map.steps.length + column];

    function tell({ clientX, clientY }, box) {
      const x = clientX - box.left, y = clientY - box.top;
      const row = drawn()[Math.floor((y - TOP) / rowHeight(box.width))], at = chart.placeAt(x), column = at === null ? -1 : columnAt(at);
      tip.hidden = row === undefined || column < 0;
      if (tip.hidden) return;
      tip.replaceChildren(element("div", {}, now().map.tensors[row]),
        element("div", {}, `step ${now().map.steps[column].toLocaleString("en")}: ${show(now().kind, valueAt(row, column))}`));
      tip.style.left = `${Math.max(Math.min(x + 14, box.width - tip.offsetWidth), 0)}px`;
      tip.style.top = `${Math.max(y > box.height / 2 ? y - tip.offsetHeight - 10 : y + 14, 0)}px`;
    }

    const ends = () => now().map.steps.map((step) => ampdoctor.health.place(now().run, step) ?? NaN);
    let placed = [];
    /** The column that holds a place: from its own step to the next one's. */
    function columnAt(at) {
      if (placed.length === 0 || at < placed[0]) return -1;
      const next = ampdoctor.health.firstAt(placed, at);
      return placed[next] > at ? next - 1 : next;
    }

    function refresh() {
      const { map } = now();
      state.rows = map.tensors.map((_, index) => index);
      if (state.order === "name") state.rows.sort((a, b) => ampdoctor.byWords(map.tensors[a], map.tensors[b]));
      if (state.order === "worst") {
        const stands = state.rows.map((row) => conspicuous(map, row));
        state.rows.sort((a, b) => (stands[b] === stands[a] ? a - b : stands[b] - stands[a]));
      }
      state.page = pages.clamp(state.page, Math.ceil(state.rows.length / PAGE));
      left.textContent = map.of > map.tensors.length ? `The ${map.tensors.length.toLocaleString("en")} most conspicuous of ${map.of.toLocaleString("en")} tensors.` : "";
      left.hidden = !left.textContent;
      const marked = markedRow();
      about.hidden = marked < 0;
      if (marked >= 0) {
        about.replaceChildren(`${state.alert.code} at step ${state.alert.step.toLocaleString("en")} is about `,
          element("strong", { class: "name" }, map.tensors[marked]), drawn().includes(marked) ? ", marked here." : ", on another page.");
      }
      placed = ends();
      chart.legend.replaceChildren(...ampdoctor.chart.legend([
        ...colours(map).words.map((text, index) => [`heat-${index}`, text]),
        ...(Array.from(map.values).some((value) => value === Infinity) ? [["overflow", "not finite"]] : [])]));
      chart.update();
    }

    function option(width) {
      const { axis } = ampdoctor.chart;
      placed = ends();
      const text = words(width), height = rowHeight(width), { map } = now();
      const beside = wide(width);
      const label = beside ? { ...text.label, align: "left", margin: 8 }
        : { ...text.label, inside: true, margin: 0, padding: [0, 0, 17, 0], verticalAlign: "middle", formatter: text.label.formatter };
      return {
        grid: { ...margins(width - side(width)), right: margins(width - side(width)).right + side(width), top: TOP, bottom: 26, outerBoundsMode: "none" },
        tooltip: { show: false },
        xAxis: xAxis(),
        yAxis: axis({ type: "category", inverse: true, position: beside ? "right" : "left", data: drawn().map((row) => map.tensors[row]), axisTick: { show: false },
          axisLine: { show: false }, axisLabel: { color: (name) => ampdoctor.color(markedRow() >= 0 && name === map.tensors[markedRow()] ? "error" : "ink"), ...label } }),
        series: [{ type: "custom", silent: true, data: [[ampdoctor.health.extent()[0], 0]], encode: { x: 0, y: 1 }, clip: true, z: 1,
          renderItem: (params) => {
            const { x, y, width: across, height: down } = params.coordSys;
            return { type: "image", style: { image: picture(Math.max(1, Math.round(across)), beside ? height : 10, height), x, y, width: across, height: down } };
          } }],
      };
    }

    /** The cells of the window, a pixel wide at the least: the worst of those that share one. */
    function picture(across, cell, height) {
      const { map } = now(), { level } = colours(map);
      const rows = drawn(), canvas = element("canvas", { width: across, height: Math.max(1, rows.length * height) });
      const pen = canvas.getContext("2d");
      const inks = Array.from({ length: LEVELS }, (_, index) => ampdoctor.color(`heat-${index}`)), bad = ampdoctor.color("overflow");
      const pixel = (at) => Math.round(((at - view.from) / (view.to - view.from)) * across);
      const usual = placed.length > 1 ? (placed.at(-1) - placed[0]) / (placed.length - 1) : (view.to - view.from) / 20;
      rows.forEach((row, index) => {
        const top = index * height + (height - cell) - (cell < height ? 1 : 0);
        for (let column = 0; column < placed.length; column += 1) {
          const end = Math.min(placed[column + 1] ?? placed[column] + usual, placed[column] + 3 * usual);
          if (end < view.from || placed[column] > view.to) continue;
          const value = valueAt(row, column);
          if (Number.isNaN(value)) continue;
          pen.fillStyle = value === Infinity ? bad : inks[level(value)];
          pen.fillRect(pixel(placed[column]), top, Math.max(pixel(end) - pixel(placed[column]), 1), cell - (cell === height ? 1 : 0));
        }
      });
      return canvas;
    }

    /** The row that the alert is about, if this is its map. */
    const markedRow = () => {
      const [run, map, row] = state.alert?.map ?? [];
      return run !== undefined && now().map === runs[run].maps[map] ? row : -1;
    };

    /** Turn to the map and the page on which an alert's row is; where none shows it, all stays as it is. */
    function turnTo(alert) {
      if (!alert?.map) return;
      const [run, map, row] = alert.map, at = all.findIndex((one) => one.map === runs[run].maps[map]);
      if (at < 0) return;
      Object.assign(state, { at, alert });
      what.querySelector("select").value = at;
      refresh();
      state.page = Math.floor(state.rows.indexOf(row) / PAGE);
      refresh();
    }

    refresh();
    const worst = alerts.filter((it) => it.map).sort((a, b) => a.finding - b.finding)[0];
    if (worst) turnTo(worst);
    return turnTo;
  }

  return { start };
})();
