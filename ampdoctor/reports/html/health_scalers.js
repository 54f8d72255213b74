"use strict";
/* A scaler's history. */

ampdoctor.scalers = (() => {
  const { element, power, count, number } = ampdoctor;
  const { runs } = ampdoctor.health;

  function start(host) {
    const all = runs.flatMap((run) => run.scalers.map((scaler) => ({ run, scaler })));
    if (all.length === 0) return;
    host.append(element("h3", {}, "Loss scaling"));
    for (const { run, scaler } of all) one(host, run, scaler);
  }

  const settings = (known) => `init_scale ${power(known.init_scale)}, growth_factor ${number(known.growth_factor)}, ` +
    `backoff_factor ${number(known.backoff_factor)}, growth_interval ${number(known.growth_interval)}`;

  function one(host, run, scaler) {
    const named = [runs.length > 1 ? `${run.letter} ${run.name}` : "", scaler.scaler].filter(Boolean).join(", ");
    if (named) host.append(element("h4", {}, named));
    const pairs = [
      ["as it was", `${count(scaler.path.skipped, "step")} skipped; the scale grew ${count(scaler.growths, "time")} and fell ${count(scaler.backoffs, "time")}` +
        (scaler.growth_tracker === null ? "" : `; growth tracker ${scaler.growth_tracker}` + (scaler.arguments ? ` of ${number(scaler.arguments.growth_interval)}` : "") + " at the end")],
      scaler.arguments && ["its settings", settings(scaler.arguments)],
    ].filter(Boolean);
    host.append(element("dl", { class: "pairs" }, ...pairs.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)])));
    const place = element("div", {});
    host.append(place);
    ampdoctor.scaler.paths(place, {
      label: `Loss scale over the steps${named ? ` of ${named}` : ""}`,
      paths: [["as it was", "series-2", "dashed", scaler.path]],
      end: Math.max(run.last_step, ...scaler.path.points.map(([step]) => step)),
    });
  }

  return { start };
})();
