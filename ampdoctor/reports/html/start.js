"use strict";
/* Start each view for which the page has a place, and make what is static easier to use. */

(() => {
  const { data, host } = ampdoctor;

  for (const name of ["trend", "proof"]) if (host(`${name}-view`)) ampdoctor.curves[name](host(`${name}-view`));
  for (const name of ["path", "scaler", "tensors", "structure", "change"]) {
    if (host(`${name}-view`)) ampdoctor[name].start(host(`${name}-view`));
  }

  if (host("ranges-view")) {
    const places = { choice: host("ranges-choice"), controls: host("ranges-controls"), view: host("histogram-view") };
    if (ampdoctor.ranges.start(places)) ampdoctor.heatmap.start(host("heatmap-view"));
    else host("ranges-scale").hidden = true;
  }

  if (host("lanes-view")) {
    let turnTo = () => {};
    const open = ampdoctor.alerts.start(host("alerts-view"), (alert) => turnTo(alert));
    ampdoctor.strip.start(host("lanes-view"), open);
    ampdoctor.lanes.start(host("lanes-view"));
    host("lanes-view").append(host("maps-view"));  // so that the flags stay in sight over both
    turnTo = ampdoctor.maps.start(host("maps-view"));
    const { runs } = ampdoctor.health;
    for (const run of runs.length > 1 ? runs : []) {
      host(`run-${run.index}`)?.prepend(ampdoctor.element("span", { class: "run-key" }, run.letter, ampdoctor.health.swatch(run)), " ");
    }
  }

  /** Draw the chart that an element names in data-chart; the element goes where the report has no data for it. */
  const BESIDE = {
    health: (place) => data.health && ampdoctor.lanes.start(place, ["loss", "scale"]),
    path: (place) => data.path && ampdoctor.path.way(place),
    ranges: (place) => data.profile?.sites.length && ampdoctor.heatmap.start(place, true),
  };
  for (const place of document.querySelectorAll("[data-chart]")) {
    BESIDE[place.dataset.chart](place);
    if (!place.children.length) place.remove();
  }
  ampdoctor.chart?.tables(document.querySelector("nav"));
  ampdoctor.copyable();

  for (const scroller of document.querySelectorAll(".scroll:not(.tall)")) {
    if (scroller.scrollWidth > scroller.clientWidth) scroller.setAttribute("tabindex", "0");
  }

  window.addEventListener("beforeprint", () => document.querySelectorAll("article details").forEach((d) => { d.open = true; }));
  document.documentElement.dataset.ready = "true";
})();
