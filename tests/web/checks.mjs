// What the checks of web pages share: a browser, and checks that print one line each.
//
// Needs playwright-core, in the node_modules of $XLAUNCH_TEST_BROWSER or of the current directory, and Chromium:
// $CHROMIUM or /usr/bin/chromium.

import { createRequire } from "node:module";
import { join, resolve } from "node:path";

export const TIMEOUT_MS = 30000;

let failed = 0;

export function launch() {
  const modules = resolve(process.env.XLAUNCH_TEST_BROWSER ?? ".", "node_modules");
  const { chromium } = createRequire(modules)("playwright-core");
  return chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
  });
}

/** Ends this program: with 1 if a check has failed. */
export function finish() {
  process.exit(failed ? 1 : 0);
}

/** Repeats a check until it finds no problem: the page may not show the latest reply yet. */
export async function check(name, test) {
  let problem = "";
  try {
    const end = Date.now() + TIMEOUT_MS / 3;
    do {
      problem = await test();
      if (problem) await new Promise((done) => setTimeout(done, 100));
    } while (problem && Date.now() < end);
  } catch (error) {
    problem = String(error);
  }
  if (problem) failed++;
  console.log(problem ? `FAILED  ${name}: ${problem}` : `ok      ${name}`);
}

export async function until(condition, problem) {
  const end = Date.now() + TIMEOUT_MS;
  while (!(await condition())) {
    if (Date.now() > end) throw new Error(problem);
    await new Promise((done) => setTimeout(done, 50));
  }
}

export function compare(problems, what, shown, expected) {
  if (shown === expected) return;
  problems.push(`${what} is shown as ${JSON.stringify(shown)} instead of ${JSON.stringify(expected)}`);
}

/** Contrast ratio of all texts by WCAG 2.2: at least 4.5 for level AA. */
export function contrast(page) {
  return page.evaluate(() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const mix = (...colors) => {
      canvas.clearRect(0, 0, 1, 1);
      for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
      return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (rgb) => {
      const [r, g, b] = rgb.map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const problems = new Set();
    for (const element of document.querySelectorAll("body *")) {
      const text = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
      if (!text || !element.checkVisibility() || element.closest("noscript, svg title, svg desc")) continue;
      const backs = [];
      for (let at = element; at; at = at.parentElement) backs.unshift(getComputedStyle(at).backgroundColor);
      const style = getComputedStyle(element);
      const back = ["white", ...backs];
      const [a, b] = [light(mix(...back)), light(mix(...back, element.closest("svg") ? style.fill : style.color))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const name = `${element.tagName} ${element.className?.baseVal ?? element.className}`;
      if (ratio < 4.5) problems.add(`${name} ${ratio.toFixed(2)}`);
    }
    return [...problems].join("; ");
  });
}

export async function screenshot(page, directory, name) {
  if (!directory) return;
  await page.evaluate(() => window.scrollTo(0, 0));
  await page.screenshot({ path: join(directory, `${name}.png`), fullPage: true });
}
