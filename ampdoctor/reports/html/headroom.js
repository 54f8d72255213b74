"use strict";
/* Binades between each layer's largest magnitude and the format's limit, at the loss scale that is chosen. */

ampdoctor.headroom = (() => {
  const { element, percent, count } = ampdoctor;
  const SHOWN = 32;

  function start(host) {
    const { state, at, scale, chosen } = ampdoctor.ranges;
    const sentence = element("p", { role: "status" });
    host.append(sentence);
    let rows = [];
    const room = (width) => ampdoctor.chart.names(rows.slice(0, SHOWN).map(({ site }) => ({ name: site.label })), width, 12);
    const chart = ampdoctor.chart(host, {
      label: "Headroom by layer in powers of two; below zero the layer overflows",
      height: (width) => 50 + room(width).row * Math.max(1, Math.min(rows.length, SHOWN)),
      option,
      columns: [
        { label: "layer", kind: "name", value: (row) => row.site.label },
        { label: "headroom", kind: "number", value: (row) => row.headroom, show: (row) => row.headroom.toFixed(2) },
        { label: "overflowing", kind: "number", value: (row) => row.overflowed, show: (row) => percent(row.overflowed) },
      ],
      rows: () => rows,
      clicked: ({ dataIndex }) => ampdoctor.ranges.set({ site: rows[dataIndex].site }),
    });

    function refresh() {
      rows = chosen().map((site) => ({ site, ...at(site, state.format, scale()) }));
      rows.sort((a, b) => a.headroom - b.headroom);
      const below = rows.filter((row) => row.headroom < 0).length;
      sentence.textContent = rows.length === 0 ? "No such tensor was measured." :
        `${below} of ${count(rows.length, "tensor")} reach beyond ${state.format}` +
        (rows.length > SHOWN ? `; the ${SHOWN} with the least room are drawn.` : ".");
      chart.legend.replaceChildren(...ampdoctor.chart.legend([
        ...(below < rows.length ? [["room", "fits"]] : []), ...(below ? [["overflow", "overflows"]] : [])]));
      chart.update();
    }

    function option(width) {
      const { axis, tooltip } = ampdoctor.chart;
      const drawn = rows.slice(0, SHOWN);
      const { label, width: left } = room(width);
      return {
        grid: { left: left + 12, right: 44, top: 4, bottom: 30, outerBoundsMode: "none" },
        tooltip: tooltip(({ dataIndex }) => [
          drawn[dataIndex].site.label, `${drawn[dataIndex].headroom.toFixed(2)} powers of two of headroom`]),
        xAxis: axis({ type: "value", name: "", axisLabel: { hideOverlap: true } }),
        yAxis: axis({
          type: "category", inverse: true, data: drawn.map((row) => row.site.label), axisTick: { show: false },
          axisLabel: { color: ampdoctor.color("ink"), ...label },
        }),
        series: [{
          type: "bar",
          barCategoryGap: "25%",
          label: { show: true, position: "right", fontSize: 11, color: ampdoctor.color("muted"),
            formatter: ({ value }) => Number(value).toFixed(1) },
          data: drawn.map((row) => ({
            value: row.headroom,
            itemStyle: { color: ampdoctor.color(row.headroom < 0 ? "overflow" : "room") },
          })),
        }],
      };
    }

    ampdoctor.ranges.listen(refresh);
    refresh();
  }

  return { start };
})();
