"use strict";
/* Start each view for which the page has a place, and make what is static easier to use. */

(() => {
  const { host } = ampdoctor;

  for (const [id, start] of [
    ["path-view", ampdoctor.path.start], ["proof-view", ampdoctor.proof.start],
    ["scaler-view", ampdoctor.scaler.start], ["trend-view", ampdoctor.trend.start],
    ["tensors-view", ampdoctor.tensors.start], ["structure-view", ampdoctor.tensors.startStructure],
    ["change-view", ampdoctor.tensors.startChange],
  ]) if (host(id)) start(host(id));

  if (host("ranges-view")) {
    const places = { choice: host("ranges-choice"), controls: host("ranges-controls"), view: host("histogram-view") };
    if (ampdoctor.ranges.start(places)) {
      ampdoctor.heatmap.start(host("heatmap-view"));
      ampdoctor.headroom.start(host("headroom-view"));
    } else host("ranges-scale").hidden = true;
  }

  if (host("lanes-view")) {
    let turnTo = () => {};
    const open = ampdoctor.alerts.start(host("alerts-view"), (alert) => turnTo(alert));
    ampdoctor.strip.start(host("lanes-view"), open);
    ampdoctor.lanes.start(host("lanes-view"));
    host("lanes-view").append(host("maps-view"));  // so that the flags stay in sight over both
    turnTo = ampdoctor.maps.start(host("maps-view"));
    ampdoctor.scalers.start(host("scalers-view"));
    for (const run of ampdoctor.health.runs) {
      host(`run-${run.index}`)?.prepend(ampdoctor.element("span", { class: "run-key" }, run.letter, ampdoctor.health.swatch(run)), " ");
    }
  }

  ampdoctor.copyable(document);

  for (const scroller of document.querySelectorAll(".scroll:not(.tall)")) {
    if (scroller.scrollWidth > scroller.clientWidth) scroller.setAttribute("tabindex", "0");
  }

  window.addEventListener("beforeprint", () => document.querySelectorAll("article details").forEach((d) => { d.open = true; }));
  document.documentElement.dataset.ready = "true";
})();
