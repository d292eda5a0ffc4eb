// Checks the daemon's web page in a browser and takes screenshots.
//
//   node tests/web/page.mjs http://127.0.0.1:9470 JOB [DIRECTORY]
//
// JOB is the number of a job that the page lists. Screenshots are written to DIRECTORY, if given. Needs
// playwright-core, in the node_modules of $XLAUNCH_TEST_BROWSER or of the current directory, and Chromium: $CHROMIUM or
// /usr/bin/chromium. Prints one line per check and exits with 1 if any has failed.

import { check, compare, contrast, finish, launch, screenshot, until, TIMEOUT_MS } from "./checks.mjs";

const [url, job, directory] = process.argv.slice(2);
if (!url || !/^[0-9]+$/.test(job ?? "")) {
  console.error("usage: node tests/web/page.mjs URL JOB [DIRECTORY]");
  process.exit(2);
}

/** As in page.js: how often the page polls. */
const POLL_INTERVAL_MS = 2000;
const PHONE = { width: 375, height: 800 };
const DESKTOP = { width: 1280, height: 900 };

const browser = await launch();
try {
  await main();
} finally {
  await browser.close();
}
finish();

async function main() {
  const context = await browser.newContext({ viewport: DESKTOP, reducedMotion: "reduce" });
  const page = await context.newPage();
  const errors = [];
  const replies = new Map();
  page.on("console", (message) => { if (["error", "warning"].includes(message.type())) errors.push(message.text()); });
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("dialog", (dialog) => { errors.push(`dialog: ${dialog.message()}`); dialog.dismiss(); });
  page.on("response", async (response) => {
    const path = new URL(response.url()).pathname;
    if (path.startsWith("/api/") && response.ok()) replies.set(path, await response.json().catch(() => null));
  });

  await page.goto(url);
  await page.locator("#jobs tbody a").first().waitFor();
  await check("the list agrees with the API", () => compareList(page, replies.get("/api/v1/node")));
  await check("the job can be opened by keyboard", () => openByKeyboard(page));
  await check("the job agrees with the API", () => compareJob(page, replies));
  await check("updates keep the focus", () => focusIsKept(page));
  for (const scheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: scheme });
    await check(`contrast is sufficient (${scheme})`, () => contrast(page));
    await screenshot(page, directory, `desktop-${scheme}`);
  }
  await page.setViewportSize(PHONE);
  await check("the job fits a phone", () => fitsWidth(page));
  await screenshot(page, directory, "phone-job");
  await page.goto(`${url}/#`);
  await page.locator("#jobs tbody a").first().waitFor();
  await check("the list fits a phone", () => fitsWidth(page));
  await screenshot(page, directory, "phone-list");
  await page.setViewportSize(DESKTOP);
  await check("an unknown job is reported", async () => {
    await page.evaluate(() => { location.hash = "#job=999999999"; });
    const isReported = async () => (await page.locator("#job-reason").textContent()).includes("999999999");
    await until(isReported, "its number is not shown");
  });
  // The browser logs the 404 reply for the unknown job.
  const unexpected = errors.filter((text) => !/status of 404/.test(text));
  await check("the console has no errors", () => unexpected.length && unexpected.join("; "));
  await check("a hidden tab sends no requests", () => hiddenTab(page));
  await check("an unreachable daemon is reported until it is back", () => unreachableDaemon(page));
}

/** Rows of a table, each an object with the texts of its cells by column. */
function rows(page, id) {
  return page.locator(`#${id} tbody tr[data-key]:not([data-key=""])`).evaluateAll((rows) =>
    rows.map((row) => Object.fromEntries([...row.cells].map((cell) => [cell.dataset.label, cell.textContent]))));
}

async function compareList(page, reply) {
  if (!reply) return "the page has not queried the API";
  const [jobs, gpus] = [await rows(page, "jobs"), await rows(page, "gpus")];
  const problems = [];
  compare(problems, "host", await page.locator("#host").textContent(), reply.node.host);
  compare(problems, "jobs", jobs.length, reply.jobs.length);
  compare(problems, "gpus", gpus.length, reply.node.gpus.length);
  jobs.forEach((row, index) => {
    const want = reply.jobs[index];
    compare(problems, "id", row.job, String(want.id));
    compare(problems, `name of ${want.id}`, row.name, want.name || "–");
    compare(problems, `state of ${want.id}`, row.state, want.state);
    compare(problems, `reason of ${want.id}`, row.reason, want.reason.slice(0, 1000) || "–");
    compare(problems, `user of ${want.id}`, row.user, want.user || String(want.uid));
    const step = want.step === null ? "–" : `${want.step} of ${want.total_steps}`;
    compare(problems, `step of ${want.id}`, row.step, step);
    near(problems, `loss of ${want.id}`, row.loss, want.loss, 1e-4);
    near(problems, `speed of ${want.id}`, row["tok/s"], want.tokens_per_second, 0.006 * want.tokens_per_second + 0.5);
  });
  gpus.forEach((row, index) => {
    const want = reply.node.gpus[index];
    compare(problems, "index", row.GPU, String(want.index));
    compare(problems, `state of GPU ${want.index}`, row.state, want.state);
    compare(problems, `reason of GPU ${want.index}`, row.reason, want.reason || "–");
    compare(problems, `job of GPU ${want.index}`, row.job.split(" ")[0], want.job === null ? "–" : String(want.job));
  });
  return problems.join("; ");
}

async function compareJob(page, replies) {
  const want = replies.get(`/api/v1/jobs/${job}`);
  if (!want) return "the page has not queried the API";
  const problems = [];
  compare(problems, "title", await page.locator("#job-title").textContent(), `Job ${want.id}: ${want.name}`);
  compare(problems, "reason", await page.locator("#job-reason").textContent(), want.reason);
  const facts = await page.locator("#job-facts > div").evaluateAll((all) =>
    Object.fromEntries(all.map((fact) => [fact.firstChild.textContent, fact.lastChild.textContent])));
  compare(problems, "state", facts.state, want.state);
  compare(problems, "command", facts.command ?? "", want.command_line);
  compare(problems, "directory", facts.directory ?? "", want.work_dir);
  if (want.report) compare(problems, "report", await page.locator("#report").textContent(), want.report);
  const ranks = await rows(page, "ranks");
  const wanted = want.status?.ranks ?? [];
  compare(problems, "ranks", ranks.length, wanted.length);
  ranks.forEach((row, index) => {
    compare(problems, `state of rank ${index}`, row.state, wanted[index].state);
    compare(problems, `pid of rank ${index}`, row.pid, String(wanted[index].pid || "–"));
    compare(problems, `hint of rank ${index}`, row.hint, wanted[index].exit || wanted[index].hint || "–");
    near(problems, `CPU of rank ${index}`, row.CPU, wanted[index].cpu_percent, 0.51);
  });
  const restarts = await rows(page, "restarts");
  const failures = (want.status?.past_restarts ?? []).toReversed();
  compare(problems, "restarts", restarts.length, failures.length);
  restarts.forEach((row, index) => {
    compare(problems, "attempt", row.attempt, String(failures[index].attempt));
    compare(problems, "rank that failed", row.rank, String(failures[index].rank ?? "–"));
    compare(problems, "cause", row.cause, failures[index].cause);
  });
  const finite = want.history.filter((point) => typeof point.loss === "number");
  if (finite.length) {
    compare(problems, "points of the curve", await page.locator("#loss .curve").evaluate((path) =>
      path.getAttribute("d").split(/[ML]/).length - 1), finite.length);
    const last = await page.locator("#loss tbody tr").last().locator("td").allTextContents();
    compare(problems, "last step in the table", last[0], String(want.history.at(-1).step));
    near(problems, "last loss in the table", last[1], want.history.at(-1).loss, 1e-4);
  }
  const log = replies.get(`/api/v1/jobs/${job}/logs`);
  if (log?.lines.length) {
    const text = await page.locator("#log").textContent();
    // The page removes escape sequences and progress bars: then only the number of lines is compared.
    const isFiltered = log.lines.some((line) => /[\u001b\r]/.test(line));
    if (isFiltered) compare(problems, "lines of the log", text.split("\n").length, log.lines.length);
    else compare(problems, "log", text, log.lines.join("\n"));
  }
  return problems.join("; ");
}

/** Compares a number that is shown rounded, possibly with a unit prefix. */
function near(problems, what, shown, expected, tolerance) {
  if (expected === null || typeof expected === "string") return compare(problems, what, shown, expected ?? "–");
  const unit = { K: 1e3, M: 1e6, G: 1e9, T: 1e12 }[shown.at(-1)] ?? 1;
  if (!(Math.abs(parseFloat(shown) * unit - expected) <= tolerance)) compare(problems, what, shown, expected);
}

async function openByKeyboard(page) {
  await page.evaluate(() => { location.hash = ""; document.activeElement?.blur(); window.scrollTo(0, 0); });
  for (let key = 0; key < 500; key++) {
    await page.keyboard.press("Tab");
    const [href, outline] = await page.evaluate(() => {
      const at = document.activeElement;
      return [at.getAttribute("href"), getComputedStyle(at).outlineStyle];
    });
    if (href !== `#job=${job}`) continue;
    if (outline === "none") return "the focus is not visible";
    await page.keyboard.press("Enter");
    await page.locator("#job").waitFor({ state: "visible" });
    await until(() => page.evaluate(() => document.activeElement.id === "job-title"), "the focus is not on the job");
    return "";
  }
  return "the link cannot be reached with Tab";
}

async function focusIsKept(page) {
  const link = page.locator(`#jobs a[href="#job=${job}"]`);
  await link.focus();
  await page.waitForResponse(/api\/v1\/node/);
  await page.waitForResponse(/api\/v1\/node/);
  await page.evaluate(() => new Promise(requestAnimationFrame));
  return (await link.evaluate((link) => link === document.activeElement)) ? "" : "the focus is lost";
}

/** Whether the page needs no horizontal scrolling. */
async function fitsWidth(page) {
  await page.waitForResponse(/api\/v1\/node/);
  return page.evaluate(() => {
    const { scrollWidth, clientWidth } = document.documentElement;
    if (scrollWidth <= clientWidth) return "";
    const isWide = (e) => e.getBoundingClientRect().right > clientWidth + 1 && e.checkVisibility();
    const wide = [...document.querySelectorAll("body *")].filter(isWide).slice(0, 5);
    return `${scrollWidth} > ${clientWidth}: ${wide.map((e) => `${e.tagName}#${e.id}.${e.className}`)}`;
  });
}

async function hiddenTab(page) {
  const setHidden = (value) => page.evaluate((value) => {
    Object.defineProperty(document, "hidden", { configurable: true, get: () => value });
    document.dispatchEvent(new Event("visibilitychange"));
  }, value);
  await setHidden(true);
  await page.waitForTimeout(500);
  let requests = 0;
  const count = () => requests++;
  page.on("request", count);
  await page.waitForTimeout(2 * POLL_INTERVAL_MS);
  const whileHidden = requests;
  await setHidden(false);
  await until(() => requests > whileHidden, "no requests when it is shown again");
  page.off("request", count);
  return whileHidden ? `${whileHidden} requests` : "";
}

async function unreachableDaemon(page) {
  const banner = page.locator("#unreachable");
  await page.route("**/api/**", (route) => route.abort());
  await banner.waitFor({ state: "visible", timeout: TIMEOUT_MS });
  await page.unroute("**/api/**");
  await banner.waitFor({ state: "hidden", timeout: TIMEOUT_MS });
}
