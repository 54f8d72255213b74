"use strict";
/* A table that stays usable with ten thousand rows: sorted and searched as data, drawn a hundred rows at a time. */

ampdoctor.table = (() => {
  const { element, count, byWords } = ampdoctor;
  const CHUNK = 100;
  const MANY = 5;  // columns beyond which the rows become cards on a phone

  /** Order of two cells: numbers by value, what is missing last in either direction, the rest as words. */
  function order(a, b, descending) {
    const missing = (value) => value === null || value === undefined || Number.isNaN(value);
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    const sign = descending ? -1 : 1;
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * byWords(String(a), String(b));
  }

  /** Put a table into `host`.
   *
   *  columns: {label, value(row) to sort by, show(row) -> string or node, kind: "name" | "number" | undefined}
   *  orders: [label, compare(a, b)]: in which the rows stand until a heading is chosen; the first at once.
   *  search: row -> the text that is searched; without it there is no search.
   *  filter: {label, all, values, of(row)}: a choice beside the search.
   *  noun: what a row is.  Returns {rows(list)}: show others. */
  function table(host, { caption, columns, rows, orders, search, filter, noun = "row" }) {
    const state = { compare: orders?.[0][1], column: -1, descending: false, words: [], only: "", shown: [], drawn: 0 };
    const status = element("p", { class: "muted", role: "status" });
    const body = element("tbody");
    const more = element("button", { type: "button", class: "more", click: () => draw() });
    const headings = columns.map((column, index) => {
      const button = element("button", { type: "button", click: () => sort(index) }, column.label);
      return element("th", { scope: "col", class: column.kind, "aria-sort": "none" }, button);
    });
    const scroller = element(
      "div",
      { class: "scroll tall", tabindex: "0", role: "region", "aria-label": caption, scroll: nearEnd },
      element("table", { class: columns.length > MANY ? "data many" : "data" }, element("caption", { class: "hidden" }, caption),
        element("thead", {}, element("tr", {}, ...headings)), body),
    );
    const tools = element("div", { class: "tools" });
    if (search) {
      const input = element("input", { type: "search", autocomplete: "off", spellcheck: "false", input: () => {
        state.words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
        refresh();
      } });
      tools.append(ampdoctor.field("Search", input, { grow: true }));
    }
    if (filter) {
      const options = [["", filter.all], ...filter.values.map((value) => [value, value])];
      tools.append(ampdoctor.choice(filter.label, options, (value) => { state.only = value; refresh(); }));
    }
    let ordered = null;
    if (orders) {
      const choice = ampdoctor.choice("Order", orders.map(([label], index) => [index, label]), (index) => {
        [, state.compare] = orders[index];
        state.column = -1;
        headings.forEach((heading) => heading.setAttribute("aria-sort", "none"));
        refresh();
      });
      ordered = choice.querySelector("select");
      tools.append(choice);
    }
    host.append(tools, status, scroller, more);

    function sort(index) {
      state.descending = state.column === index ? !state.descending : columns[index].kind === "number";
      state.column = index;
      if (ordered) ordered.selectedIndex = -1;
      headings.forEach((heading, at) => heading.setAttribute(
        "aria-sort", at !== index ? "none" : state.descending ? "descending" : "ascending"));
      refresh();
    }

    function refresh() {
      const wanted = (row) =>
        (!state.only || filter.of(row) === state.only) &&
        (!state.words.length || state.words.every((word) => search(row).toLowerCase().includes(word)));
      state.shown = rows.filter(wanted);
      const column = columns[state.column];
      if (state.compare) state.shown.sort(state.compare);
      if (column) state.shown.sort((a, b) => order(column.value(a), column.value(b), state.descending));
      state.drawn = 0;
      body.replaceChildren();
      scroller.scrollTop = 0;
      draw();
      const of = state.shown.length === rows.length ? "" : ` of ${rows.length.toLocaleString("en")}`;
      status.textContent = `${state.shown.length.toLocaleString("en")}${of} ${noun}${rows.length === 1 ? "" : "s"}`;
    }

    function draw(many = CHUNK) {
      const next = state.shown.slice(state.drawn, state.drawn + many);
      body.append(...next.map((row) => element("tr", {}, ...columns.map((column) =>
        element("td", { class: column.kind, "data-label": column.label }, column.show ? column.show(row) : String(column.value(row) ?? "-"))))));
      state.drawn += next.length;
      const left = state.shown.length - state.drawn;
      more.hidden = left === 0;
      more.textContent = `Show ${count(Math.min(left, CHUNK), `more ${noun}`)} of ${left.toLocaleString("en")}`;
    }

    function nearEnd() {
      if (scroller.scrollTop + scroller.clientHeight > scroller.scrollHeight - 400 && !more.hidden) draw();
    }

    window.addEventListener("beforeprint", () => draw(Math.max(0, 1000 - state.drawn)));
    refresh();
    return { rows: (others) => { rows = others; refresh(); } };
  }

  return table;
})();
