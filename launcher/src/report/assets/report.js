// Draws the curves of the report: one figure per chart, with axes, a readout of the values at a step, a logarithmic
// scale and smoothing. The data is in the page; nothing is loaded.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 640, HEIGHT = 280, LEFT = 62, RIGHT = 14, TOP = 12, BOTTOM = 40;
/** Maximum number of rows of a curve in the table. */
const ROWS = 20;

const data = JSON.parse(document.getElementById("data").textContent);
const section = document.getElementById("curves");
const smoothing = make("input", { type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01, value: 0 });

start();

function start() {
  section.append(make("h2", {}, "Curves"));
  if (!data.charts.length) {
    section.append(make("p", {}, "There are no values yet."));
    return;
  }
  const legend = make("ul", { class: "legend" });
  data.runs.forEach((label, run) => legend.append(make("li", {}, swatch(run), ` ${label}`)));
  const shown = make("output", { for: "smoothing" }, "0.00");
  const controls = make("div", { class: "controls" }, legend, make("label", {}, "Smoothing ", smoothing, " ", shown));
  const grid = make("div", { class: "charts" });
  const figures = data.charts.map(figure);
  figures.forEach((one) => grid.append(one.element));
  section.append(controls, grid);
  smoothing.addEventListener("input", () => {
    shown.textContent = Number(smoothing.value).toFixed(2);
    figures.forEach((one) => one.draw());
  });
  figures.forEach((one) => one.draw());
}

/** Returns a chart: its element, and a function that draws it with the current settings of the controls. */
function figure(chart) {
  const log = make("input", { type: "checkbox", id: `log-${chart.id}` });
  const svg = draw("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": `${chart.title} by step` });
  const readout = make("div", { class: "readout", role: "status" });
  const title = make("figcaption", {}, chart.title, make("span", { class: "unit" }, chart.unit), make("label", {}, log, " log scale"));
  const element = make("figure", { id: `chart-${chart.id}` }, title, svg, readout, table(chart));
  const steps = [...new Set(chart.curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  let scale = null, at = null;
  const show = (step) => {
    at = step;
    svg.querySelectorAll(".cursor, .at").forEach((old) => old.remove());
    readout.replaceChildren();
    if (step === null || !scale) return;
    const x = scale.x.of(step);
    svg.append(draw("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    readout.append(make("span", {}, `step ${step.toLocaleString("en")}`));
    for (const curve of chart.curves) {
      const index = nearest(curve.steps, step);
      const value = curve.values[index], own = curve.steps[index];
      const name = chart.curves.some((other) => other.key !== curve.key) ? `${curve.key} ` : "";
      const where = own === step ? "" : ` (step ${own.toLocaleString("en")})`;
      readout.append(make("span", { "data-run": curve.run, "data-key": curve.key }, swatch(curve.run), ` ${name}${precise(value)}${where}`));
      if (scale.y.shows(value)) svg.append(draw("circle", { class: `dot at c${curve.run}`, cx: scale.x.of(own), cy: scale.y.of(value), r: 4 }));
    }
  };
  const redraw = () => {
    scale = paint(svg, chart, log.checked, Number(smoothing.value));
    show(at);
  };
  log.addEventListener("change", redraw);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const step = scale?.x.back(((event.clientX - box.left) / box.width) * WIDTH);
    if (step !== undefined) show(steps[nearest(steps, step)]);
  });
  svg.addEventListener("pointerleave", () => show(null));
  svg.addEventListener("keydown", (event) => {
    const index = at === null ? -1 : nearest(steps, at);
    const next = { ArrowRight: index + 1, ArrowLeft: Math.max(index, 1) - 1, Home: 0, End: steps.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    show(steps[Math.min(next, steps.length - 1)]);
  });
  return { element, draw: redraw };
}

/** Draws axes and curves. Returns the scales; null if there is nothing to show. */
function paint(svg, chart, log, smooth) {
  const curves = chart.curves.map((curve) => ({ ...curve, smooth: curve.marks || !smooth ? null : smoothed(curve.values, smooth) }));
  const shows = (value) => Number.isFinite(value) && (!log || value > 0);
  const values = curves.flatMap((curve) => curve.values).filter(shows);
  const steps = curves.flatMap((curve) => curve.steps);
  if (!values.length) {
    svg.replaceChildren(text(WIDTH / 2, HEIGHT / 2, "middle", "no values that can be shown"));
    return null;
  }
  const x = linear(extent(steps), LEFT, WIDTH - RIGHT);
  const y = { ...(log ? logarithmic : linear)(extent(values), HEIGHT - BOTTOM, TOP), shows };
  const out = [];
  for (const tick of y.ticks(5)) {
    out.push(draw("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y.of(tick), y2: y.of(tick) }));
    out.push(text(LEFT - 6, y.of(tick) + 4, "end", brief(tick)));
  }
  for (const tick of x.ticks(6).filter(Number.isInteger)) {
    out.push(draw("line", { class: "grid", x1: x.of(tick), x2: x.of(tick), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
    out.push(text(x.of(tick), HEIGHT - BOTTOM + 17, "middle", brief(tick)));
  }
  out.push(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "middle", "step"));
  for (const curve of curves) {
    const raw = { class: `curve c${curve.run}${curve.smooth ? " raw" : ""}`, "data-run": curve.run, "data-key": curve.key };
    out.push(draw("path", { ...raw, d: path(curve.steps, curve.values, x, y) }));
    if (curve.smooth) out.push(draw("path", { class: `curve c${curve.run}`, d: path(curve.steps, curve.smooth, x, y) }));
    // A single value is not visible as a line, and values of evaluations are few, so both get marks.
    const single = curve.values.filter(shows).length === 1;
    if (!curve.marks && !single) continue;
    curve.steps.forEach((step, index) => {
      const value = curve.values[index];
      if (shows(value)) out.push(draw("circle", { class: `dot c${curve.run}`, cx: x.of(step), cy: y.of(value), r: 2.5 }));
    });
  }
  svg.replaceChildren(...out);
  return { x, y };
}

function path(steps, values, x, y) {
  let out = "", pen = "M";
  steps.forEach((step, index) => {
    if (!y.shows(values[index])) { pen = "M"; return; }
    out += `${pen}${x.of(step).toFixed(1)} ${y.of(values[index]).toFixed(1)}`;
    pen = "L";
  });
  return out;
}

/** Returns the exponential moving average, corrected for the bias at the beginning. Gaps remain gaps. */
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function extent(values) {
  return [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
}

function linear([low, high], from, to) {
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const of = (value) => from + ((value - low) / (high - low)) * (to - from);
  const back = (position) => low + ((position - from) / (to - from)) * (high - low);
  return { of, back, ticks: (count) => ticks(low, high, count) };
}

function logarithmic([low, high], from, to) {
  const inner = linear([Math.log10(low), Math.log10(high)], from, to);
  const of = (value) => inner.of(Math.log10(value));
  const decades = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const digit of [1, 2, 5]) decades.push(digit * 10 ** power);
  }
  const inside = decades.filter((tick) => tick >= low && tick <= high);
  const thin = (count) => inside.filter((tick, index) => inside.length <= 2 * count || index % Math.ceil(inside.length / count) === 0);
  return { of, back: inner.back, ticks: (count) => (inside.length < 2 ? ticks(low, high, count) : thin(count)) };
}

/** Returns about `count` round numbers between two numbers. */
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const out = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) out.push(Number((n * step).toPrecision(12)));
  return out;
}

/** Returns the index of the nearest number in an ascending list. */
function nearest(numbers, wanted) {
  let low = 0, high = numbers.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - numbers[low - 1] <= numbers[low] - wanted ? low - 1 : low;
}

/** Formats a number for an axis: `812`, `46.1K`, `3e-4`. */
function brief(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "K"]]) {
    if (size >= unit) return `${Number((value / unit).toPrecision(3))}${letter}`;
  }
  return size > 0 && size < 1e-3 ? value.toExponential().replace("e+", "e") : String(Number(value.toPrecision(4)));
}

function precise(value) {
  return Number.isFinite(value) ? String(Number(value.toPrecision(7))) : "not finite";
}

function table(chart) {
  const body = make("tbody");
  for (const curve of chart.curves) {
    const every = Math.max(1, Math.ceil(curve.steps.length / ROWS));
    curve.steps.forEach((step, index) => {
      if ((curve.steps.length - 1 - index) % every) return;
      const cells = [data.runs[curve.run], curve.key, String(step), precise(curve.values[index])];
      body.append(make("tr", {}, ...cells.map((cell) => make("td", {}, cell))));
    });
  }
  const head = make("tr", {}, ...["run", "value", "step", chart.title].map((name) => make("th", { scope: "col" }, name)));
  return make("details", {}, make("summary", {}, "As a table"), make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), body)));
}

function swatch(run) {
  return draw("svg", { class: `swatch c${run}`, viewBox: "0 0 28 8", "aria-hidden": "true" }, draw("path", { d: "M0 4H28" }));
}

function text(x, y, anchor, words) {
  return draw("text", { x, y, "text-anchor": anchor }, words);
}

function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
