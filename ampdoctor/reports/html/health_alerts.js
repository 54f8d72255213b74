"use strict";
/* The alerts in the order of their steps: a list that drives the charts. One that is chosen, here or as a flag, is shown
   on all of them, with its message and the way to its finding. */

ampdoctor.alerts = (() => {
  const { element } = ampdoctor;
  const { runs, alerts } = ampdoctor.health;
  const AROUND = 0.04;  // of the whole run, on either side of an alert that is looked at

  /** shown(alert): called when one is to be shown on the charts. Returns what chooses one. */
  function start(host, shown) {
    if (alerts.length === 0) { host.append(element("p", {}, element("span", { class: "badge ok" }, "no alerts"))); return () => {}; }
    const step = (alert) => `${runs.length > 1 ? `${runs[alert.run].letter} ` : ""}step ${alert.step.toLocaleString("en")}`;
    const said = element("p", { class: "chosen-alert", role: "status", hidden: true });
    const buttons = alerts.map((alert) => element("button", { type: "button", "aria-pressed": "false", click: () => choose(alert) },
      element("span", { class: `badge ${alert.severity}` }, alert.severity), ` ${step(alert)} `, element("strong", {}, alert.name), alert.place ? ` ${alert.place}` : ""));
    host.append(element("h3", {}, ampdoctor.count(alerts.length, "alert")),
      element("ol", { class: "alerts", "aria-label": "Alerts in the order of their steps" }, ...buttons.map((button) => element("li", {}, button))), said);

    function choose(alert) {
      const run = runs[alert.run], [low, high] = ampdoctor.health.extent(), at = ampdoctor.health.place(run, alert.step);
      buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(alerts[index] === alert)));
      const finding = element("a", { href: `#finding-${alert.finding}` }, `${alert.code}: the finding`);  // a browser opens what it is folded into
      said.replaceChildren(`${alert.message} `, finding);
      said.hidden = false;
      if (at === null) return;
      ampdoctor.health.zoom(at - AROUND * (high - low), at + AROUND * (high - low));
      ampdoctor.health.readAt(at);
      shown(alert);
    }
    return choose;
  }

  return { start };
})();
