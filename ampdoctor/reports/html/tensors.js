"use strict";
/* The tensors of a checkpoint: by role, sorted and searched, their ranges drawn against fp16's and bf16's window. */

(() => {
  const { data, element, drawing, real, number, percent, byWords } = ampdoctor;
  const WIDTH = 140, HEIGHT = 16;
  const FP16 = { least: -24, normal: -14, most: Math.log2(65504) };
  const BF16 = { least: -133, most: 128 };

  const named = (tensor) => {
    const name = tensor.group ? `${tensor.group}.${tensor.name}` : tensor.name;
    return tensor.role === "moment" || tensor.entry === "step" ? `${name}: ${tensor.entry}` : name;
  };
  const shape = (tensor) => `[${tensor.shape.join(", ")}]`;
  const log = (value) => { const known = real(value); return known > 0 && Number.isFinite(known) ? Math.log2(known) : null; };

  /** What the bars' axis reaches over: all values, and fp16's window. */
  function reach(tensors) {
    let low = FP16.least, high = FP16.most;
    for (const tensor of tensors) {
      low = Math.min(low, log(tensor.amin) ?? low);
      high = Math.max(high, log(tensor.amax) ?? high);
    }
    return [Math.floor(low) - 2, Math.ceil(high) + 2];
  }

  /** A bar from the smallest to the largest magnitude; behind it fp16's window, below it bf16's. */
  function bar(tensor, [low, high]) {
    const x = (exponent) => ((Math.min(Math.max(exponent, low), high) - low) / (high - low)) * WIDTH;
    const band = (kind, from, to, y, height) =>
      drawing("rect", { class: kind, x: x(from), y, width: Math.max(x(to) - x(from), 2), height });
    const least = log(tensor.amin), most = log(tensor.amax);
    const beyond = most !== null && most > FP16.most;
    const parts = [
      band("window", FP16.normal, FP16.most, 0, HEIGHT - 3),
      band("window faint", FP16.least, FP16.normal, 0, HEIGHT - 3),
      band("window wide", BF16.least, BF16.most, HEIGHT - 2, 2),
    ];
    if (least !== null && most !== null) parts.push(band(beyond ? "range beyond" : "range", least, most, 4, HEIGHT - 11));
    const text = `${number(tensor.amin)} to ${number(tensor.amax)}`;
    return drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "bar", preserveAspectRatio: "none", role: "img", "aria-label": text }, ...parts);
  }

  const column = (label, key, kind = "number") => ({
    label, kind, value: (row) => real(row[key]), show: (row) => number(row[key]) });
  const nonfinite = (label, key) => ({ ...column(label, key),
    show: (row) => (row[key] ? element("span", { class: "badge error" }, number(row[key])) : "0") });
  const share = (label, of) => ({ label, kind: "number", value: of, show: (row) => percent(of(row)) });
  const text = (label, value, kind) => ({ label, kind, value });
  const roles = (rows) => ({
    label: "Role", all: "all roles", values: [...new Set(rows.map((row) => row.role))], of: (row) => row.role });
  const lost = (row, figure) => row.fp16?.[figure] ?? 0;
  /** Moments and counters stay fp32: what fp16 would make of them is no harm. */
  const stays = (row) => row.role === "moment" || row.entry === "step";
  /** The higher, the worse. */
  const harms = [
    (row) => row.nan + row.inf, (row) => stays(row) ? 0 : lost(row, "overflowed"), (row) => row.at_max ?? 0,
    (row) => stays(row) ? 0 : lost(row, "flushed"),
  ];
  const worst = (a, b) => harms.reduce((found, harm) => found || harm(b) - harm(a), 0);
  const byName = (a, b) => byWords(named(a), named(b));
  const ORDERS = [["worst first", worst], ["by name", byName], ["as in the checkpoint", () => 0]];
  const search = (row) => `${named(row)} ${row.dtype} ${row.file ?? ""} ${row.module ?? ""}`;

  function start(host) {
    const tensors = data.tensors;
    const ends = reach(tensors);
    host.append(element("p", { class: "legend" }, ...ampdoctor.chart.legend([
      ["range", "smallest to largest magnitude"], ["beyond", "beyond fp16"], ["window", "fp16, normal"],
      ["faint", "fp16, subnormal"], ["wide", "bf16"]])));
    ampdoctor.table(host, {
      caption: "Tensors of the checkpoint", rows: tensors, noun: "tensor", search, orders: ORDERS,
      filter: roles(tensors),
      columns: [
        text("name", named, "name"), text("role", (row) => row.role), text("dtype", (row) => row.dtype),
        text("shape", shape, "shape"),
        { label: "range", kind: "span", value: (row) => (log(row.amax) ?? -Infinity) - (log(row.amin) ?? 0), show: (row) => bar(row, ends) },
        column("largest", "amax"), column("smallest", "amin"), nonfinite("NaN", "nan"), nonfinite("Inf", "inf"),
        column("at limit", "at_max"), share("zeros", (row) => (row.counted ? row.zeros / row.counted : null)),
        share("fp16 flushed", (row) => row.fp16?.flushed ?? null),
        share("fp16 over", (row) => row.fp16?.overflowed ?? null),
        share("bf16 flushed", (row) => row.bf16?.flushed ?? null),
      ],
    });
  }

  function startStructure(host) {
    const tensors = data.structure.tensors;
    ampdoctor.table(host, {
      caption: "What lies in the checkpoint", rows: tensors, noun: "tensor", search, filter: roles(tensors),
      columns: [
        text("name", named, "name"), text("role", (row) => row.role), text("dtype", (row) => row.dtype),
        text("shape", shape), column("bytes", "bytes"), text("file", (row) => row.file, "name"),
      ],
    });
  }

  function startChange(host) {
    const tensors = data.change.tensors;
    ampdoctor.table(host, {
      caption: "What became of each tensor", rows: tensors, noun: "tensor", search, filter: roles(tensors),
      columns: [
        text("name", named, "name"), text("role", (row) => row.role),
        text("dtype", (row) => (row.old_dtype === row.dtype ? row.dtype : `${row.old_dtype} → ${row.dtype}`)),
        column("relative change", "relative_change"), share("unchanged", (row) => row.unchanged),
        column("largest before", "old_amax"), column("largest now", "amax"), column("NaN, Inf now", "nonfinite"),
      ],
    });
  }

  Object.assign(ampdoctor, { tensors: { start }, structure: { start: startStructure }, change: { start: startChange } });
})();
