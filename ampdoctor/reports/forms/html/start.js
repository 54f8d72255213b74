"use strict";
/* Start each view for which the page has a place, and make what is static easier to use. */

(() => {
  const { element, host } = ampdoctor;

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

  for (const block of document.querySelectorAll(".paste")) {
    const button = element("button", { type: "button", class: "copy", click: async () => {
      await navigator.clipboard.writeText(block.querySelector("code").textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    } }, "Copy");
    if (navigator.clipboard) block.append(button);
  }

  for (const scroller of document.querySelectorAll(".scroll:not(.tall)")) {
    if (scroller.scrollWidth > scroller.clientWidth) scroller.setAttribute("tabindex", "0");
  }

  window.addEventListener("beforeprint", () => document.querySelectorAll("article details").forEach((d) => { d.open = true; }));
  document.documentElement.dataset.ready = "true";
})();
