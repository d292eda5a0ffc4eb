// A curve as SVG, with its values as a table for screen readers.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 560, HEIGHT = 220;
const LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 26;
/** Maximum number of rows in the table. */
const ROWS = 20;

/**
 * Draws `points` ([x, y] each, y may be NaN) into the figure. `show` formats a y as text.
 * Only the figure is changed, and the table stays open or closed.
 */
export function draw(figure, title, points, show) {
  const good = points.filter(([, y]) => Number.isFinite(y));
  if (!figure.firstChild) build(figure, title);
  const [svg, last, table] = [figure.querySelector("svg"), figure.querySelector("figcaption span"), figure.querySelector("tbody")];
  const end = points.at(-1);
  last.textContent = end ? `step ${end[0]}: ${show(end[1])}` : "no steps yet";
  const inside = [...svg.children].slice(0, 2);
  inside[1].textContent = describe(title, good, points.length - good.length, show);
  svg.replaceChildren(...inside, ...(good.length ? marks(good, points, show) : []));
  table.replaceChildren(...sample(points).map(([x, y]) => row("td", [x, show(y)])));
  figure.pointed = (clientX) => {
    const box = svg.getBoundingClientRect();
    const at = scales(good).x.back(((clientX - box.left) / box.width) * WIDTH);
    const near = points.reduce((best, point) => Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best, points[0]);
    if (near) last.textContent = `step ${near[0]}: ${show(near[1])}`;
  };
}

function build(figure, title) {
  const svg = make("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const [name, text] = [make("title"), make("desc")];
  const id = `${figure.id}-chart`;
  name.id = `${id}-title`;
  text.id = `${id}-desc`;
  name.textContent = title;
  svg.setAttribute("aria-labelledby", name.id);
  svg.setAttribute("aria-describedby", text.id);
  svg.append(name, text);
  svg.addEventListener("pointermove", (event) => figure.pointed?.(event.clientX));
  const caption = document.createElement("figcaption");
  caption.append(title, document.createElement("span"));
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = "As a table";
  const table = document.createElement("table");
  table.createCaption().textContent = title;
  table.createTHead().append(row("th", ["step", title]));
  table.createTBody();
  details.append(summary, table);
  figure.append(caption, svg, details);
}

function describe(title, good, others, show) {
  if (!good.length) return "There are no values yet.";
  const values = good.map(([, y]) => y);
  const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  const text = `${title} by step, from ${show(good[0][1])} at step ${good[0][0]} to ${show(good.at(-1)[1])} at step ${good.at(-1)[0]}; ` +
    `lowest ${show(low)}, highest ${show(high)}.`;
  return others ? `${text} ${others} values are not finite.` : text;
}

function scales(good) {
  const xs = good.map(([x]) => x), ys = good.map(([, y]) => y);
  const span = (values, from, to) => {
    let [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    return { low, high, of: (v) => from + ((v - low) / (high - low)) * (to - from), back: (p) => low + ((p - from) / (to - from)) * (high - low) };
  };
  return { x: span(xs, LEFT, WIDTH - RIGHT), y: span(ys, HEIGHT - BOTTOM, TOP) };
}

function marks(good, points, show) {
  const { x, y } = scales(good);
  const out = [];
  for (const tick of ticks(y.low, y.high, 5)) {
    out.push(make("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y.of(tick), y2: y.of(tick) }));
    out.push(label(LEFT - 6, y.of(tick) + 4, "end", show(tick)));
  }
  for (const tick of ticks(x.low, x.high, 6).filter(Number.isInteger)) {
    out.push(label(x.of(tick), HEIGHT - 6, "middle", String(tick)));
  }
  let path = "", pen = "M";
  for (const [px, py] of points) {
    if (!Number.isFinite(py)) { pen = "M"; continue; }
    path += `${pen}${x.of(px).toFixed(1)} ${y.of(py).toFixed(1)}`;
    pen = "L";
  }
  out.push(make("path", { class: "curve", d: path }));
  const [ex, ey] = good.at(-1);
  out.push(make("circle", { class: "point", cx: x.of(ex), cy: y.of(ey), r: 3.5 }));
  return out;
}

/** Returns about `count` round numbers between two numbers. */
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const out = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) out.push(Number((n * step).toPrecision(12)));
  return out;
}

function sample(points) {
  const every = Math.max(1, Math.ceil(points.length / ROWS));
  return points.filter((_, index) => (points.length - 1 - index) % every === 0);
}

function label(x, y, anchor, text) {
  const out = make("text", { x, y, "text-anchor": anchor });
  out.textContent = text;
  return out;
}

function row(kind, texts) {
  const out = document.createElement("tr");
  for (const text of texts) {
    const cell = document.createElement(kind);
    if (kind === "th") cell.scope = "col";
    cell.textContent = text;
    out.append(cell);
  }
  return out;
}

function make(name, attributes = {}) {
  const out = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) out.setAttribute(key, value);
  return out;
}
