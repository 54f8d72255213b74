"use strict";
/* What every view needs: the report's data, elements made of text, numbers in words, colours of the style sheet.

   Names in the data come from files that others wrote. They reach the page as text nodes only: nothing here or in any
   view ever makes HTML from a string. */

const ampdoctor = (() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);

  /** An element with attributes; strings among the children become text. A function as attribute is a listener. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") made.addEventListener(name, value);
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  /** The same for SVG. */
  function drawing(tag, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  /** The report writes what is not finite as a string. */
  const real = (value) => (value === null || value === undefined ? null : Number(value));

  function number(value) {
    const known = real(value);
    if (known === null) return "-";
    if (!Number.isFinite(known)) return Number.isNaN(known) ? "NaN" : known > 0 ? "Inf" : "-Inf";
    if (Number.isInteger(known) && Math.abs(known) < 1e6) return String(known);
    const kept = Number(known.toPrecision(4));
    return Math.abs(kept) < 1e-3 || Math.abs(kept) >= 1e6 ? kept.toExponential().replace("e+", "e") : String(kept);
  }

  /** A share that tells a small number from none. */
  function percent(share) {
    if (share === null || share === undefined) return "-";
    if (share > 0 && share < 1e-4) return "<0.01%";
    return `${(100 * share).toFixed(2)}%`;
  }

  function power(value) {
    const exponent = Math.log2(value);
    return Number.isInteger(exponent) ? `2^${exponent}` : number(value);
  }

  const count = (many, noun) => `${many.toLocaleString("en")} ${noun}${many === 1 ? "" : "s"}`;

  /** The order of two texts by their words and numbers: block 2 before block 10. One collator: to make one for each two
   *  takes ten times as long as to compare them. */
  const byWords = new Intl.Collator("en", { numeric: true }).compare;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  const narrow = () => window.innerWidth < 640;

  /** The place that the page keeps for a view, without the sentence for those who have no JavaScript. */
  const host = (id) => document.getElementById(id);

  let controls = 0;

  /** A control below its label; `beside` stands next to the label. */
  function field(label, control, { grow = false, beside = null } = {}) {
    control.id ||= `control-${(controls += 1)}`;
    const name = element("label", { for: control.id }, label);
    return element("div", { class: grow ? "field grow" : "field" }, beside ? element("span", {}, name, " ", beside) : name, control);
  }

  /** A labelled choice of [value, label]; `now` is the value that it opens on, else the first. */
  function choice(label, options, changed, now = options[0][0]) {
    const entries = options.map(([value, text]) => element("option", { value, selected: String(value) === String(now) }, text));
    const select = element("select", { change: () => changed(select.value) }, ...entries);
    return field(label, select);
  }

  function checkbox(label, checked, changed) {
    const box = element("input", { type: "checkbox", checked, change: () => changed(box.checked) });
    return element("label", { class: "field check" }, box, label);
  }

  /** Buttons that turn the pages of a long chart: {nodes, clamp(page, last)}, which gives the page that there is and says it. */
  function pager(turned) {
    const said = element("span", { role: "status" });
    const button = (text, by) => element("button", { type: "button", click: () => turned(by) }, text);
    const back = button("Previous layers", -1), on = button("Next layers", 1);
    return { nodes: [back, said, on], clamp: (wanted, many) => {
      const last = Math.max(many - 1, 0), page = Math.min(wanted, last);
      [back.disabled, on.disabled] = [page === 0, page === last];
      back.hidden = on.hidden = said.hidden = last === 0;
      said.textContent = `page ${page + 1} of ${last + 1}`;
      return page;
    } };
  }

  /** The answer for what the first finding is about: overflow, underflow, the scaler or the data; undefined where no
   *  answer is for it. */
  function about(answers) {
    const said = [data.about?.cause, data.about?.name].flatMap((text) => (text ?? "").split(/[_-]/));
    return answers[said.map((word) => (word === "scale" ? "scaler" : word)).find((word) => word in answers)];
  }

  /** Give lines to paste their button. */
  function copyable() {
    if (!navigator.clipboard) return;
    for (const block of document.querySelectorAll(".paste")) {
      const button = element("button", { type: "button", class: "copy", click: async () => {
        await navigator.clipboard.writeText(block.querySelector("code").textContent);
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 2000);
      } }, "Copy");
      block.append(button);
    }
  }

  return { data, element, drawing, real, number, percent, power, count, byWords, color, narrow, host, field, choice, checkbox, pager, copyable, about };
})();
