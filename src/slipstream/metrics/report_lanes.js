// The timeline (measured bars over predicted ones, a lane per rank) and the grid of delays.

const KIND_NAMES = { F: "forward", B: "backward", I: "backward (input)", W: "backward (weight)", U: "update" };

function laneChart(host, spec) {
  if (!spec.measured.length && !spec.predicted.length) {
    element("p", { class: "empty" }, "No timeline was recorded.", host);
    return;
  }
  const state = { hidden: new Set(), zoom: 1 };
  const bar = element("div", { class: "bar" }, null, host);
  for (const [name, factor] of [["zoom in", 1.6], ["zoom out", 1 / 1.6]]) {
    element("button", { type: "button" }, name, bar).addEventListener("click", () => {
      state.zoom = Math.min(40, Math.max(1, state.zoom * factor));
      draw();
    });
  }
  const box = element("div", { class: "x-scroll", tabindex: 0 }, null, host);
  const both = spec.measured.length && spec.predicted.length;
  const all = [...spec.measured, ...spec.predicted];
  const kinds = Object.keys(KIND_NAMES).filter((kind) => all.some((row) => row[1] === kind));
  const sources = [["measured", "c7"], ["predicted", "c7"]].filter(([name]) => spec[name].length);
  legend(host, [
    ...kinds.map((kind) => ({ key: kind, name: KIND_NAMES[kind], colour: kind, mark: "box" })),
    ...(both ? sources.map(([name, colour]) => ({ key: name, name, colour, mark: name === "predicted" ? "dashed" : "" })) : []),
  ], state, draw);
  const from = all.reduce((least, row) => Math.min(least, row[6]), Infinity);
  const to = all.reduce((most, row) => Math.max(most, row[7]), -Infinity);
  const left = 62, tall = 22, thin = both ? 9 : 0, gap = 12, top = 22;

  function draw() {
    const width = Math.max(320, (box.clientWidth || 600) - 2) * state.zoom;
    const lane = tall + thin + gap, height = top + spec.lanes.length * lane + 6;
    const svg = element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.title });
    const x = (time) => left + ((time - from) / Math.max(to - from, 1e-12)) * (width - left - 10);
    for (const time of ticks(0, to - from, false, Math.max(3, width / 120))) {
      element("line", { x1: x(from + time), x2: x(from + time), y1: top - 6, y2: height, class: "gridline" }, null, svg);
      element("text", { x: x(from + time), y: 11, "text-anchor": "middle" }, seconds(time), svg);
    }
    spec.lanes.forEach((name, index) => {
      element("text", { x: 0, y: top + index * lane + tall / 2 + 4 }, name, svg);
    });
    for (const source of ["predicted", "measured"]) {
      if (state.hidden.has(source)) continue;
      const small = both && source === "predicted";
      for (const row of spec[source]) {
        const [index, kind, , microbatch, group, , start, end] = row;
        if (state.hidden.has(kind)) continue;
        const a = x(start), wide = Math.max(x(end) - a, 0.6), y = top + index * lane + (small ? tall + 2 : 0);
        const bar = element("rect", { x: a, y, width: Math.max(wide - 0.6, 0.5), height: small ? thin - 2 : tall, rx: small ? 1.5 : 3,
          style: `fill:var(--${kind});opacity:${(group % 2 ? 0.68 : 1) * (small ? 0.75 : 1)}` }, null, svg);
        bar.row = [source, row];
        if (!small && microbatch !== null && wide > 15) {
          element("text", { x: a + wide / 2, y: y + tall / 2 + 4, "text-anchor": "middle", class: "lane-text" }, microbatch, svg);
        }
      }
    }
    svg.addEventListener("pointermove", hover);
    svg.addEventListener("pointerdown", hover);
    svg.addEventListener("pointerleave", () => tip.hide());
    box.replaceChildren(svg);
  }

  function hover(event) {
    if (!event.target.row) { tip.hide(); return; }
    const [source, [index, kind, stage, microbatch, group, version, start, end]] = event.target.row;
    const rows = [[null, "stage", String(stage)], [null, "group", String(group)]];
    if (microbatch !== null) rows.push([null, "microbatch", String(microbatch)]);
    if (version !== null) rows.push([null, "weights of version", String(version)]);
    rows.push([null, "from", seconds(start - from)], [null, "took", seconds(end - start)]);
    tip.show(event.clientX, event.clientY, `${KIND_NAMES[kind] || kind}, ${source} (${spec.lanes[index]})`, rows);
  }
  draw();
  redraw.push(draw);
}

function gridChart(host, spec) {
  const box = element("div", { class: "x-scroll", tabindex: 0 }, null, host);
  const values = [...new Set(spec.cells.flat().filter((value) => value !== null))].sort((a, b) => a - b);
  const left = 62, top = 4, tall = 20, foot = 20;

  function draw() {
    const room = (box.clientWidth || 600) - left - 12;
    const wide = Math.max(9, Math.min(30, room / spec.columns.length));
    const width = left + wide * spec.columns.length + 4, height = top + spec.rows.length * tall + foot;
    const svg = element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.title });
    spec.rows.forEach((name, row) => {
      element("text", { x: 0, y: top + row * tall + 14 }, name, svg);
      spec.cells[row].forEach((value, column) => {
        if (value === null) return;
        const cell = element("rect", { x: left + column * wide, y: top + row * tall, width: wide - 1.5, height: tall - 2, rx: 2,
          style: `fill:var(--d${Math.min(Math.max(value, 0), 3)})` }, null, svg);
        cell.row = [name, spec.columns[column], value];
        if (wide >= 12) {
          element("text", { x: left + (column + 0.5) * wide - 0.7, y: top + row * tall + 13, "text-anchor": "middle", class: "cell-text" }, value, svg);
        }
      });
    });
    const every = Math.max(1, Math.ceil(46 / wide));
    spec.columns.forEach((name, column) => {
      if (column % every === 0) element("text", { x: left + column * wide, y: height - 5 }, name, svg);
    });
    const hover = (event) => {
      if (!event.target.row) { tip.hide(); return; }
      const [row, column, value] = event.target.row;
      tip.show(event.clientX, event.clientY, `${row}, ${column}`, [[`d${Math.min(Math.max(value, 0), 3)}`, spec.cell_label, String(value)]]);
    };
    svg.addEventListener("pointermove", hover);
    svg.addEventListener("pointerdown", hover);
    svg.addEventListener("pointerleave", () => tip.hide());
    box.replaceChildren(svg);
  }
  draw();
  redraw.push(draw);
  const key = element("div", { class: "legend" }, null, host);
  for (const value of values) {
    const entry = element("span", { class: "bar" }, null, key);
    element("i", { class: "box", style: `background:var(--d${Math.min(value, 3)})` }, null, entry);
    element("label", {}, `${spec.cell_label} ${value}`, entry);
  }
}
