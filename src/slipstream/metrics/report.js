// Line charts of a report page: axes, bands, hover, legend, zoom. Text reaches the page by textContent only.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const FOCUS_AFTER = 0.05;  // a focused chart chooses its height by what comes after this share of the run

function element(tag, attributes = {}, text = null, parent = null) {
  const svg = ["svg", "g", "path", "line", "rect", "circle", "text", "clipPath", "title"].includes(tag);
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return trim((value / (limit === 1e4 ? 1e3 : limit)).toPrecision(4)) + unit;
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return trim(value.toPrecision(5));
}

function trim(text) { return text.includes(".") ? text.replace(/\.?0+$/, "") : text; }

function seconds(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1) return trim(value.toPrecision(4)) + " s";
  return size >= 1e-3 ? trim((value * 1e3).toPrecision(4)) + " ms" : trim((value * 1e6).toPrecision(3)) + " µs";
}

function ticks(low, high, log, count) {
  if (log) {
    const found = [];
    const decades = Math.log10(high / low);
    const steps = decades > count ? [1] : decades > 2 ? [1, 3] : decades > 0.7 ? [1, 2, 5] : null;
    if (!steps) return ticks(low, high, false, count);
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const step of steps) {
        const value = step * 10 ** power;
        if (value >= low && value <= high) found.push(value);
      }
    }
    return found;
  }
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || 10 * power;
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) {
    found.push(Number((index * step).toPrecision(12)));
  }
  return found;
}

const tip = {
  node: null,
  show(x, y, title, rows) {
    if (!this.node) this.node = element("div", { id: "tip" }, null, document.body);
    this.node.replaceChildren();
    element("b", {}, title, this.node);
    for (const [colour, name, value] of rows) {
      const row = element("div", {}, null, this.node);
      if (colour) element("i", { style: `background:var(--${colour})` }, null, row);
      element("span", {}, name, row);
      element("span", {}, value, row);
    }
    this.node.style.display = "block";
    const box = this.node.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth ? x - box.width - 14 : x + 14;
    this.node.style.left = `${Math.max(4, left)}px`;
    this.node.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - box.height - 4))}px`;
  },
  hide() { if (this.node) this.node.style.display = "none"; },
};

function toggle(parent, name, pressed, onChange) {
  const button = element("button", { type: "button", "aria-pressed": pressed }, name, parent);
  button.addEventListener("click", () => {
    const next = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", next);
    onChange(next);
  });
  return button;
}

function smoothed(values, strength) {
  if (!strength) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    mean = strength * mean + (1 - strength) * value;
    weight = strength * weight + (1 - strength);
    return mean / weight;
  });
}

function legend(host, entries, state, draw) {
  const box = element("div", { class: "legend" }, null, host);
  for (const { key, name, colour, mark } of entries) {
    const button = toggle(box, "", true, (on) => {
      if (on) state.hidden.delete(key); else state.hidden.add(key);
      draw();
    });
    element("i", { class: mark, style: `background-color:var(--${colour})` }, null, button);
    element("span", {}, name, button);
  }
}

function lineChart(host, spec) {
  const series = spec.series.filter((line) => line.x.length);
  if (!series.length) { element("p", { class: "empty" }, "Nothing was recorded.", host); return; }
  const state = { hidden: new Set(), logX: spec.log_x, logY: spec.log_y, smooth: 0, zoom: null, focus: spec.focus };
  series.forEach((line, index) => { line.colour = `c${(line.colour === null ? index : line.colour) % 8}`; });
  const long = Math.max(...series.map((line) => line.x.length)) > 2;
  if (long) {
    const bar = element("div", { class: "bar" }, null, host);
    toggle(bar, "log x", state.logX, (on) => { state.logX = on; state.zoom = null; draw(); });
    toggle(bar, "log y", state.logY, (on) => { state.logY = on; draw(); });
    if (spec.focus) toggle(bar, "whole range", false, (on) => { state.focus = !on; draw(); });
    if (spec.smooth) {
      const label = element("label", {}, "smooth", bar);
      const slider = element("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 }, null, label);
      slider.addEventListener("input", () => { state.smooth = Number(slider.value); draw(); });
    }
  }
  const svg = element("svg", { role: "img", "aria-label": spec.title }, null, host);
  if (series.length > 1) {
    legend(host, series.map((line, index) => ({
      key: index, name: line.name, colour: line.colour, mark: line.markers ? "dot" : line.dashed ? "dashed" : "",
    })), state, draw);
  }
  const height = 260, top = 10, bottom = 34, left = 56, right = 12;
  let width = 0, scale = null, visible = [];

  function bounds() {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    const begin = FOCUS_AFTER * Math.max(...visible.map((line) => line.x[line.x.length - 1]));
    for (const line of visible) {
      for (let i = 0; i < line.x.length; i++) {
        const x = line.x[i];
        if ((state.logX && x <= 0) || (state.zoom && (x < state.zoom[0] || x > state.zoom[1]))) continue;
        x0 = Math.min(x0, x); x1 = Math.max(x1, x);
        if (state.focus && !state.zoom && x < begin) continue;
        for (const y of [line.drawn[i], line.band ? line.low[i] : null, line.band ? line.high[i] : null]) {
          if (y === null || (state.logY && y <= 0)) continue;
          y0 = Math.min(y0, y); y1 = Math.max(y1, y);
        }
      }
    }
    if (!(x0 <= x1)) [x0, x1] = [1, 2];
    if (!(y0 <= y1)) [y0, y1] = [1, 2];
    if (spec.from_zero && !state.logY) y0 = Math.min(0, y0);
    if (x0 === x1) { x0 -= state.logX ? x0 / 2 : 0.5; x1 += 0.5; }
    const room = y1 === y0 ? Math.abs(y0) * 0.1 || 0.5 : (y1 - y0) * 0.06;
    if (state.logY) { y0 /= 1.06; y1 *= 1.06; } else { y1 += room; if (!(spec.from_zero && y0 === 0)) y0 -= room; }
    return [x0, x1, y0, y1];
  }

  function path(line, values) {
    let text = "", pen = "M";
    for (let i = 0; i < line.x.length; i++) {
      if (values[i] === null || (state.logX && line.x[i] <= 0) || (state.logY && values[i] <= 0)) { pen = "M"; continue; }
      text += `${pen}${scale.x(line.x[i]).toFixed(1)},${scale.y(values[i]).toFixed(1)}`;
      pen = "L";
    }
    return text;
  }

  function band(line) {
    const floor = (value) => (state.logY ? Math.max(value, scale.y1 * 1e-12) : value);
    const points = line.x.map((x, i) => [x, i]).filter(([x]) => !state.logX || x > 0);
    const upper = points.map(([x, i]) => `${scale.x(x).toFixed(1)},${scale.y(floor(line.high[i])).toFixed(1)}`);
    const lower = points.map(([x, i]) => `${scale.x(x).toFixed(1)},${scale.y(floor(line.low[i])).toFixed(1)}`);
    return `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
  }

  function draw() {
    width = Math.max(240, svg.clientWidth || host.clientWidth - 30);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.replaceChildren();
    visible = series.filter((_, index) => !state.hidden.has(index));
    for (const line of visible) {
      line.drawn = spec.smooth && !line.markers ? smoothed(line.y, state.smooth) : line.y;
      line.band = line.low && line.high && !(spec.smooth && state.smooth > 0.5);
    }
    const [x0, x1, y0, y1] = bounds();
    const along = (value, a, b, log) => (log ? Math.log(value / a) / Math.log(b / a) : (value - a) / (b - a));
    scale = {
      x0, x1, y0, y1,
      x: (value) => left + along(value, x0, x1, state.logX) * (width - left - right),
      y: (value) => height - bottom - along(value, y0, y1, state.logY) * (height - top - bottom),
    };
    for (const value of ticks(y0, y1, state.logY, 5)) {
      const y = scale.y(value);
      element("line", { x1: left, x2: width - right, y1: y, y2: y, class: "gridline" }, null, svg);
      element("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, number(value), svg);
    }
    for (const value of ticks(x0, x1, state.logX, Math.max(3, width / 110))) {
      element("text", { x: scale.x(value), y: height - bottom + 16, "text-anchor": "middle" }, number(value), svg);
    }
    element("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "axis" }, null, svg);
    element("text", { x: width - right, y: height - 3, "text-anchor": "end" }, spec.x_label, svg);
    if (spec.y_label) element("text", { x: left, y: height - 3 }, `↑ ${spec.y_label}`, svg);
    const clip = `clip-${host.dataset.chart}`;
    const area = element("clipPath", { id: clip }, null, svg);
    element("rect", { x: left - 2, y: top - 4, width: width - left - right + 4, height: height - top - bottom + 6 }, null, area);
    const plot = element("g", { "clip-path": `url(#${clip})` }, null, svg);
    for (const line of visible) {
      const colour = `var(--${line.colour})`;
      if (line.markers) {
        line.x.forEach((x, i) => {
          if ((state.logX && x <= 0) || (state.logY && line.y[i] <= 0)) return;
          element("circle", { cx: scale.x(x), cy: scale.y(line.y[i]), r: 3.2, style: `fill:${colour}` }, null, plot);
        });
        continue;
      }
      if (line.band) element("path", { d: band(line), style: `fill:${colour};opacity:.18` }, null, plot);
      element("path", { d: path(line, line.drawn), fill: "none", "stroke-width": 1.8, "stroke-linejoin": "round",
        style: `stroke:${colour}`, ...(line.dashed ? { "stroke-dasharray": "6 4" } : {}) }, null, plot);
      if (line.x.length === 1) {
        element("circle", { cx: scale.x(line.x[0]), cy: scale.y(line.drawn[0]), r: 3.5, style: `fill:${colour}` }, null, plot);
      }
    }
    element("line", { y1: top, y2: height - bottom, x1: -9, x2: -9, class: "cross" }, null, svg);
  }

  function valueAt(event) {
    const part = (event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right);
    const { x0, x1 } = scale;
    return state.logX ? x0 * (x1 / x0) ** part : x0 + part * (x1 - x0);
  }

  function nearest(line, x) {
    let low = 0, high = line.x.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (line.x[middle] < x) low = middle; else high = middle; }
    return Math.abs(line.x[low] - x) <= Math.abs(line.x[high] - x) ? low : high;
  }

  let dragFrom = null;
  function hover(event) {
    const x = valueAt(event);
    const rows = [];
    let at = null;
    for (const line of visible) {
      const index = nearest(line, x);
      if (line.markers && Math.abs(scale.x(line.x[index]) - scale.x(x)) > 12) continue;
      if (at === null || Math.abs(line.x[index] - x) < Math.abs(at - x)) at = line.x[index];
      const range = line.band && line.low[index] !== line.high[index]
        ? ` (${number(line.low[index])} … ${number(line.high[index])})` : "";
      rows.push([line.colour, line.name, number(line.drawn[index]) + range]);
    }
    if (at === null) { tip.hide(); return; }
    const cross = svg.querySelector(".cross");
    cross.setAttribute("x1", scale.x(at)); cross.setAttribute("x2", scale.x(at));
    tip.show(event.clientX, event.clientY, `${spec.x_label} ${number(at)}`, rows);
  }
  svg.addEventListener("pointermove", hover);
  svg.addEventListener("pointerleave", () => { tip.hide(); dragFrom = null; const cross = svg.querySelector(".cross");
    if (cross) { cross.setAttribute("x1", -9); cross.setAttribute("x2", -9); } });
  svg.addEventListener("pointerdown", (event) => { hover(event); if (event.pointerType === "mouse") dragFrom = event; });
  svg.addEventListener("pointerup", (event) => {
    if (dragFrom && Math.abs(event.clientX - dragFrom.clientX) > 12) {
      state.zoom = [valueAt(dragFrom), valueAt(event)].sort((a, b) => a - b);
      draw();
    }
    dragFrom = null;
  });
  svg.addEventListener("dblclick", () => { state.zoom = null; draw(); });
  draw();
  redraw.push(draw);
}

const redraw = [];

function start() {
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const kinds = { lines: lineChart, lanes: laneChart, grid: gridChart };
  for (const host of document.querySelectorAll("figure[data-chart]")) {
    const spec = specs[Number(host.dataset.chart)];
    kinds[spec.kind](host, spec);
  }
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw.forEach((draw) => draw()); } });
  addEventListener("scroll", () => tip.hide(), { passive: true });
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
}
