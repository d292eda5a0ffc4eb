// Checks a report of `xlaunch report` in a browser and takes screenshots.
//
//   node tests/web/report.mjs REPORT.html EXPECTED.json [DIRECTORY]
//
// EXPECTED.json has the values that the page must show: for each run, in the order of the report, an object of lists
// of [step, value] by key, where a value that is not finite is null. Screenshots are written to DIRECTORY, if given.
// Prints one line per check and exits with 1 if any has failed. See checks.mjs for what it needs.

import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { check, compare, contrast, finish, launch, screenshot } from "./checks.mjs";

const [file, expectedFile, directory] = process.argv.slice(2);
if (!file || !expectedFile) {
  console.error("usage: node tests/web/report.mjs REPORT.html EXPECTED.json [DIRECTORY]");
  process.exit(2);
}
const expected = JSON.parse(readFileSync(expectedFile, "utf8"));
const url = pathToFileURL(resolve(file)).href;

const browser = await launch();
try {
  await main();
} finally {
  await browser.close();
}
finish();

async function main() {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 } });
  const page = await context.newPage();
  const [errors, requests] = [[], []];
  page.on("console", (message) => errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("dialog", (dialog) => { errors.push(`dialog: ${dialog.message()}`); dialog.dismiss(); });
  page.on("request", (request) => { if (request.url() !== url) requests.push(request.url()); });

  await page.goto(url);
  const charts = await page.evaluate(() => JSON.parse(document.getElementById("data").textContent).charts);
  await check("every value is in the page", () => compareData(charts));
  await check("every point is drawn", () => comparePaths(page, charts));
  await check("steps and values are read by keyboard", () => readByKeyboard(page, charts));
  await check("values are shown where the pointer is", () => readByPointer(page, charts));
  await check("final losses are in the summary", () => compareSummary(page));
  await check("scale and smoothing change the curves", () => controls(page));
  await check("texts of runs are not executed", () => page.evaluate(() => window.executed ?? ""));
  for (const scheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: scheme });
    await check(`contrast is sufficient (${scheme})`, () => contrast(page));
    await screenshot(page, directory, `report-${scheme}`);
  }
  await page.setViewportSize({ width: 375, height: 800 });
  await check("the page fits a phone", () => page.evaluate(() => {
    const { scrollWidth, clientWidth } = document.documentElement;
    return scrollWidth <= clientWidth ? "" : `${scrollWidth} > ${clientWidth}`;
  }));
  await screenshot(page, directory, "report-phone");
  await check("the console is empty", () => errors.join("; "));
  await check("nothing is loaded", () => requests.join("; "));
}

/** The values of a curve, as a list of [step, value]. */
function expectedPoints(curve) {
  return expected[curve.run][curve.key] ?? [];
}

function isNear(shown, wanted) {
  return shown === wanted || Math.abs(shown - wanted) <= 1e-6 * Math.abs(wanted);
}

function compareData(charts) {
  const problems = [];
  const curves = charts.flatMap((chart) => chart.curves);
  compare(problems, "number of curves", curves.length, expected.flatMap((run) => Object.keys(run)).length);
  for (const curve of curves) {
    const wanted = expectedPoints(curve);
    compare(problems, `steps of ${curve.key}`, String(curve.steps), String(wanted.map(([step]) => step)));
    const differs = curve.values.findIndex((value, index) => !isNear(value, wanted[index]?.[1]));
    if (differs >= 0) problems.push(`${curve.key} is ${curve.values[differs]} at step ${curve.steps[differs]}`);
  }
  return problems.join("; ");
}

async function comparePaths(page, charts) {
  const problems = [];
  for (const chart of charts) {
    const paths = await page.locator(`#chart-${chart.id} svg.chart path.curve`).evaluateAll((paths) =>
      paths.map((path) => (path.getAttribute("d") ?? "").split(/[ML]/).length - 1));
    const wanted = chart.curves.map((curve) => expectedPoints(curve).filter(([, value]) => value !== null).length);
    compare(problems, `points of ${chart.id}`, String(paths), String(wanted));
  }
  return problems.join("; ");
}

/** What a chart's readout says: the step, and values by run and key. */
async function readout(page, chart) {
  const parts = page.locator(`#chart-${chart.id} .readout > span`);
  const texts = await parts.evaluateAll((all) =>
    all.map((part) => [part.dataset.run, part.dataset.key, part.textContent]));
  const step = Number(texts[0]?.[2].replace("step ", "").replaceAll(",", ""));
  return { step, values: texts.slice(1).map(([run, key, text]) => ({ run: Number(run), key, text })) };
}

/** Compares a readout with the value of the nearest step of each curve. */
function compareReadout(problems, { step, values }, chart) {
  compare(problems, `values of ${chart.id}`, values.length, chart.curves.length);
  for (const { run, key, text } of values) {
    const points = expectedPoints({ run, key });
    const distance = Math.min(...points.map(([at]) => Math.abs(at - step)));
    const wanted = points.filter(([at]) => Math.abs(at - step) === distance).map(([, value]) => value);
    const shown = text.match(/(-?[0-9.]+(e[-+]?[0-9]+)?)( \(step [0-9,]+\))?$/);
    const isShown = wanted.some((value) =>
      value === null ? text.includes("not finite") : shown && isNear(Number(shown[1]), value));
    if (!isShown) problems.push(`${key} of run ${run} at step ${step} is shown as ${text} instead of ${wanted}`);
  }
}

async function readByKeyboard(page, charts) {
  const problems = [];
  for (const chart of charts) {
    await page.locator(`#chart-${chart.id} svg.chart`).focus();
    for (const key of ["Home", "ArrowRight", "ArrowRight", "ArrowRight", "End", "ArrowLeft"]) {
      await page.keyboard.press(key);
      compareReadout(problems, await readout(page, chart), chart);
    }
    await page.keyboard.press("End");
    const { step } = await readout(page, chart);
    compare(problems, `last step of ${chart.id}`, step, Math.max(...chart.curves.flatMap((curve) => curve.steps)));
  }
  return problems.join("; ");
}

async function readByPointer(page, charts) {
  const problems = [];
  for (const chart of charts) {
    const svg = page.locator(`#chart-${chart.id} svg.chart`);
    await svg.scrollIntoViewIfNeeded();
    const box = await svg.boundingBox();
    for (const part of [0.15, 0.4, 0.8]) {
      await page.mouse.move(box.x + part * box.width, box.y + box.height / 2);
      compareReadout(problems, await readout(page, chart), chart);
    }
  }
  return problems.join("; ");
}

async function compareSummary(page) {
  const rows = await page.locator("#summary tr").evaluateAll((rows) => Object.fromEntries(rows.map((row) => {
    const [name, ...values] = [...row.cells].map((cell) => cell.textContent);
    return [name, values];
  })));
  const problems = [];
  expected.forEach((run, index) => {
    const last = run["train/loss"].at(-1);
    compare(problems, `steps of run ${index}`, rows.steps?.[index], String(last[0]));
    compare(problems, `loss of run ${index}`, rows["final loss"]?.[index], last[1].toFixed(4));
  });
  return problems.join("; ");
}

async function controls(page) {
  const curve = () => page.locator("#chart-loss path.curve").first().getAttribute("d");
  const before = await curve();
  await page.locator("#log-loss").check();
  if ((await curve()) === before) return "the scale stays linear";
  await page.locator("#log-loss").uncheck();
  if ((await curve()) !== before) return "the scale stays logarithmic";
  await page.locator("#smoothing").fill("0.9");
  const raw = await page.locator("#chart-loss path.raw").count();
  const smooth = await page.locator("#chart-loss path.curve:not(.raw)").first().getAttribute("d");
  await page.locator("#smoothing").fill("0");
  if (!raw) return "the values themselves are not shown below the smoothed curve";
  return smooth === before ? "the curve is not smoothed" : "";
}
