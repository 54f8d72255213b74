"use strict";
/* The alerts in a list, and what lies behind one: its finding as the page has it below, in a dialog over the charts, so
   that nobody loses the place that they look at. */

ampdoctor.alerts = (() => {
  const { element } = ampdoctor;
  const { runs, alerts } = ampdoctor.health;
  const AROUND = 0.04;  // of the whole run, on either side of an alert that is looked at

  /** shown(alert): called when one is to be shown on the charts. */
  function start(host, shown) {
    if (alerts.length === 0) { host.append(element("p", {}, element("span", { class: "badge ok" }, "no alerts"))); return () => {}; }
    const { dialog, open } = window_(shown);
    host.append(element("h3", {}, "Alerts"));
    ampdoctor.table(host, {
      caption: "Alerts in the order of their steps", rows: alerts, noun: "alert",
      search: alerts.length > 12 ? (row) => `${row.code} ${row.name} ${row.message} ${row.place}` : undefined,
      columns: [
        { label: "step", kind: "number", value: (row) => row.step, show: (row) => element("button", { type: "button", class: "link",
          "aria-label": `Step ${row.step.toLocaleString("en")}: open ${row.code} ${row.name}`, click: () => open(row) }, row.step.toLocaleString("en")) },
        ...(runs.length > 1 ? [{ label: "run", value: (row) => runs[row.run].letter }] : []),
        { label: "level", value: (row) => row.severity, show: (row) => element("span", { class: `badge ${row.severity}` }, row.severity) },
        { label: "what", kind: "message", value: (row) => `${row.code} ${row.name}`, show: (row) => element("span", {}, element("strong", {}, `${row.code} ${row.name}`), ` ${row.message}`) },
      ],
    });
    document.body.append(dialog);
    return open;
  }

  function window_(shown) {
    const place = element("div", {}), title = element("p", { class: "muted", id: "alert-title" });
    let now = null;
    const button = (text, click) => element("button", { type: "button", click }, text);
    const turn = (by) => open(alerts[alerts.indexOf(now) + by]);
    const back = button("Previous alert", () => turn(-1)), on = button("Next alert", () => turn(1));
    const show = button("Show on the charts", () => {
      const run = runs[now.run], [low, high] = ampdoctor.health.extent(), at = ampdoctor.health.place(run, now.step);
      dialog.close();
      if (at === null) return;
      ampdoctor.health.zoom(at - AROUND * (high - low), at + AROUND * (high - low));
      ampdoctor.health.readAt(at);
      shown(now);
      ampdoctor.host("lanes-view").scrollIntoView();
    });
    const close = button("Close", () => dialog.close());
    const dialog = element("dialog", { class: "alert", "aria-labelledby": "alert-title" },
      element("div", { class: "tools" }, title, back, on, show, close), place);
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

    function open(alert) {
      now = alert;
      const at = alerts.indexOf(alert);
      title.textContent = `Alert ${at + 1} of ${alerts.length}, step ${alert.step.toLocaleString("en")}` + (runs.length > 1 ? ` of ${runs[alert.run].letter} ${runs[alert.run].name}` : "");
      back.disabled = at === 0;
      on.disabled = at === alerts.length - 1;
      const finding = document.getElementById(`finding-${alert.finding}`).cloneNode(true);
      finding.removeAttribute("id");
      place.replaceChildren(finding);
      ampdoctor.copyable(place);
      if (!dialog.open) dialog.showModal();
      dialog.scrollTop = 0;
    }
    return { dialog, open };
  }

  return { start };
})();
