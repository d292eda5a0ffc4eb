// Polls the daemon's API and shows the replies. Texts of users are inserted as text, never as HTML.

import { draw } from "./chart.js";

const POLL_INTERVAL_MS = 2000;
const REQUEST_TIMEOUT_MS = 10000;
const LOG_LINES = 200;

const part = (id) => document.getElementById(id);
/** Number of the newest poll. Replies to an older one are dropped. */
let newest = 0;
let timer;
let statesBefore;
let lastReplyMs;

// ---- polling ----

async function get(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS) });
  const value = await response.json().catch(() => ({}));
  if (response.ok) return value;
  throw Object.assign(new Error(value.error ?? `HTTP status ${response.status}`), { replied: true });
}

/** Polls once and schedules the next poll. Cancels the previous poll. */
async function poll() {
  clearTimeout(timer);
  const number = ++newest;
  try {
    const node = await get("/api/v1/node");
    if (number !== newest) return;
    lastReplyMs = Date.now();
    part("unreachable").hidden = true;
    showNode(node);
    await pollJob(node, number);
  } catch (error) {
    if (number === newest) showUnreachable(error);
  }
  if (number === newest && !document.hidden) timer = setTimeout(poll, POLL_INTERVAL_MS);
}

/** The job in the URL's fragment. */
function chosen() {
  const found = /^#job=([0-9]+)$/.exec(location.hash);
  return found && Number(found[1]);
}

async function pollJob(node, number) {
  const id = chosen();
  part("job").hidden = id === null;
  if (id === null) return;
  let job;
  try {
    job = await get(`/api/v1/jobs/${id}`);
  } catch (error) {
    if (!error.replied) throw error;
    if (number === newest) showNoJob(id, error.message);
    return;
  }
  if (number !== newest) return;
  showJob(job, node.node.gpus);
  await pollLog(job, number);
}

async function pollLog(job, number) {
  const [rank, stream] = [part("log-rank").value || "0", part("log-stream").value];
  let text;
  try {
    const { lines } = await get(`/api/v1/jobs/${job.id}/logs?rank=${rank}&stream=${stream}&lines=${LOG_LINES}`);
    text = lines.map(plain).join("\n") || "No output yet.";
  } catch (error) {
    if (!error.replied) throw error;
    text = `No log: ${error.message}`;
  }
  if (number !== newest) return;
  const log = part("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 30;
  put(log, text);
  if (follows) log.scrollTop = log.scrollHeight;
}

/** A line as a terminal shows it: escape sequences removed, and only the last state of a progress bar. */
function plain(line) {
  const text = line.replace(/\u001b\[[0-9;?]*[ -/]*[@-~]/g, "");
  return text.replace(/\r+$/, "").split("\r").at(-1);
}

// ---- the node ----

function showNode({ unix_ms, node, jobs, jobs_left_out }) {
  document.title = `${node.host}: ${node.jobs_running} running, ${node.jobs_queued} queued`;
  put(part("host"), node.host);
  facts(part("facts"), {
    "version": node.version,
    "uptime": time(unix_ms / 1000 - node.started_unix_seconds),
    "cores": node.cores,
    "running": node.jobs_running,
    "queued": node.jobs_queued,
    "ended": node.jobs_ended,
  });
  banner(part("drained"), node.drained && `Drained, no jobs are started: ${node.drained}`);
  banner(part("problem"), node.gpu_problem && `GPUs cannot be read: ${node.gpu_problem}`);
  const names = new Map(jobs.map((job) => [job.id, job.name]));
  fill(part("gpus"), node.gpus, (gpu) => gpu.uuid, [
    ["GPU", (gpu) => gpu.index, "number"],
    ["name", (gpu) => gpu.name],
    ["state", (gpu) => state(gpu.state)],
    ["job", (gpu) => gpu.job && link(gpu.job, `${gpu.job} ${names.get(gpu.job) ?? ""}`)],
    ["utilization", (gpu) => gpu.busy_percent === null ? null : meter(gpu.busy_percent, 100, percent(gpu.busy_percent))],
    ["memory", (gpu) => gpu.memory_bytes && meter(gpu.memory_used_bytes, gpu.memory_bytes, `${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_bytes)}`)],
    ["power", (gpu) => gpu.power_watts === null ? null : `${Math.round(gpu.power_watts)} W`, "number"],
    ["temperature", (gpu) => gpu.temperature_celsius === null ? null : `${Math.round(gpu.temperature_celsius)} °C`, "number"],
    ["reason", (gpu) => gpu.reason, "wide"],
  ], "No GPUs.");
  fill(part("jobs"), jobs, (job) => job.id, [
    ["job", (job) => link(job.id, String(job.id)), "number"],
    ["name", (job) => clip(job.name), "wide clip"],
    ["user", (job) => job.user || job.uid],
    ["state", (job) => state(job.state)],
    ["reason", (job) => clip(job.reason), "wide clip"],
    ["step", (job) => job.step === null ? null : `${job.step} of ${job.total_steps}`, "number"],
    ["loss", (job) => job.loss === null ? null : loss(job.loss), "number"],
    ["tok/s", (job) => job.tokens_per_second === null ? null : count(job.tokens_per_second), "number"],
    ["MFU", mfu, "number"],
    ["runtime", (job) => runtime(job, unix_ms), "number"],
  ], "No jobs. Submit one with xlaunch submit.");
  for (const row of part("jobs").tBodies[0].rows) row.classList.toggle("chosen", row.dataset.key === String(chosen()));
  const left = part("left-out");
  left.hidden = !jobs_left_out;
  put(left, `${jobs_left_out} more jobs are not shown.`);
  announceChanges(jobs);
}

/** Announces changes of state since the last poll to screen readers. */
function announceChanges(jobs) {
  const before = statesBefore;
  statesBefore = new Map(jobs.map((job) => [job.id, job.state]));
  if (!before) return;
  const changed = jobs.filter((job) => before.get(job.id) !== job.state);
  if (changed.length) put(part("changes"), changed.slice(0, 5).map((job) => `Job ${job.id} is ${job.state}.`).join(" "));
}

function showUnreachable(error) {
  const age = lastReplyMs ? `; this page is ${time((Date.now() - lastReplyMs) / 1000)} old` : "";
  const why = error.replied ? error.message : "it does not answer";
  banner(part("unreachable"), `The daemon cannot be reached: ${why}${age}.`);
}

// ---- one job ----

function showNoJob(id, why) {
  put(part("job-title"), `Job ${id}`);
  put(part("job-reason"), why);
  for (const each of ["charts", "restarts-part", "report-part", "ranks-part", "log", "log-title"]) part(each).hidden = true;
  facts(part("job-facts"), {});
}

function showJob(job, gpus) {
  const { status } = job;
  const account = status?.accounting;
  for (const each of ["log", "log-title"]) part(each).hidden = false;
  put(part("job-title"), `Job ${job.id}: ${job.name}`);
  put(part("job-reason"), job.reason);
  const stale = job.status_age_seconds > 10 && ["running", "stopping"].includes(job.state);
  facts(part("job-facts"), {
    "state": state(job.state),
    "user": job.user || job.uid,
    "submitted": when(job.submitted_unix_ms),
    "runtime": runtime(job, job.unix_ms),
    "queue position": job.queue_position || null,
    "exit code": job.exit_code,
    "step": job.step === null ? null : `${job.step} of ${job.total_steps}`,
    "loss": job.loss === null ? null : loss(job.loss),
    "tok/s": job.tokens_per_second === null ? null : count(job.tokens_per_second),
    "MFU": mfu(job),
    "useful time": account ? `${account.useful_percent.toFixed(1)} %` : null,
    "time for": account ? spent(account.seconds) : null,
    "hangs": account?.hangs || null,
    "replica mismatches": account?.replica_mismatches || null,
    "last status": stale ? `${time(job.status_age_seconds)} ago` : null,
    "GPUs": gpus.filter((gpu) => job.gpus.includes(gpu.uuid)).map((gpu) => gpu.index).join(", ") || null,
    "directory": job.work_dir,
    "command": job.command_line,
  });
  showCharts(job);
  const restarts = status?.past_restarts ?? [];
  part("restarts-part").hidden = !restarts.length;
  put(part("restarts-title"), `Restarts: ${job.restarts} of at most ${job.max_restarts}`);
  fill(part("restarts"), restarts.toReversed(), (restart) => restart.attempt, [
    ["attempt", (restart) => restart.attempt, "number"],
    ["failed", (restart) => `${time((job.unix_ms - restart.unix_ms) / 1000)} ago`],
    ["rank", (restart) => restart.rank, "number"],
    ["cause", (restart) => restart.cause],
  ]);
  part("report-part").hidden = !job.report;
  put(part("report"), job.report);
  const ranks = status?.ranks ?? [];
  part("ranks-part").hidden = !ranks.length;
  fill(part("ranks"), ranks, (rank) => rank.rank, [
    ["rank", (rank) => rank.rank, "number"],
    ["state", (rank) => state(rank.state)],
    ["pid", (rank) => rank.pid || null, "number"],
    ["device", (rank) => device(rank.device_uuid, gpus)],
    ["CPU", (rank) => rank.cpu_percent === null ? null : percent(rank.cpu_percent), "number"],
    ["memory", (rank) => rank.memory_bytes === null ? null : bytes(rank.memory_bytes), "number"],
    ["GPU", (rank) => rank.gpu_percent === null ? null : percent(rank.gpu_percent), "number"],
    ["GPU memory", (rank) => rank.gpu_memory_bytes === null ? null : bytes(rank.gpu_memory_bytes), "number"],
    ["last output", (rank) => rank.seconds_since_output === null ? null : `${time(rank.seconds_since_output)} ago`, "number"],
    ["hint", (rank) => hint(rank.exit || rank.hint), "wide"],
  ], "");
  options(part("log-rank"), ranks.length ? ranks.map((rank) => rank.rank) : [0]);
}

// Model FLOPs utilisation of the last step; null on devices whose peak rate is not known.
function mfu(job) {
  return job.mfu === null ? null : `${(100 * job.mfu).toFixed(1)} %`;
}

// How the time of a job was spent, without kinds that took no time.
function spent(seconds) {
  const used = Object.entries(seconds).filter(([, value]) => value >= 0.05);
  return used.map(([kind, value]) => `${kind} ${time(value)}`).join(", ") || null;
}

function showCharts({ kind, history }) {
  part("charts").hidden = kind !== "trainer";
  if (kind !== "trainer") return;
  draw(part("loss"), "Loss", history.map((point) => [point.step, value(point.loss)]), loss);
  draw(part("speed"), "Tokens per second", history.map((point) => [point.step, value(point.tokens_per_second)]), count);
}

// ---- updates of the page, which touch only elements that have changed ----

function put(element, text) {
  const wanted = String(text ?? "");
  if (element.textContent !== wanted) element.textContent = wanted;
}

function banner(element, text) {
  element.hidden = !text;
  put(element, text);
}

/** Shows entries as a list; null and empty values are left out. */
function facts(list, entries) {
  const shown = Object.entries(entries).filter(([, value]) => value !== null && value !== undefined && value !== "");
  while (list.children.length > shown.length) list.lastChild.remove();
  shown.forEach(([name, value], index) => {
    const entry = list.children[index] ?? list.appendChild(element("div", element("dt"), element("dd")));
    put(entry.firstChild, name);
    show(entry.lastChild, value);
  });
}

/** Fills a table. A row with the same key keeps its element, and so the focus. */
function fill(table, items, key, columns, empty) {
  const body = table.tBodies[0];
  const head = table.tHead.rows[0];
  if (!head.cells.length) {
    for (const [name] of columns) head.append(attributes(element("th", name), { role: "columnheader", scope: "col" }));
  }
  const rows = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const wanted = items.map((item) => {
    const name = String(key(item));
    const row = rows.get(name) ?? makeRow(name, columns);
    columns.forEach(([, content], index) => {
      const value = content(item);
      row.cells[index].classList.toggle("nothing", value === null || value === undefined || value === "");
      show(row.cells[index], value || value === 0 ? value : "–");
    });
    return row;
  });
  if (!wanted.length) wanted.push(rows.get("") ?? emptyRow(columns.length, empty));
  for (const row of body.rows) if (!wanted.includes(row)) row.remove();
  wanted.forEach((row, index) => { if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null); });
}

function makeRow(name, columns) {
  const row = attributes(element("tr"), { role: "row", "data-key": name });
  columns.forEach(([label, , kind], index) => {
    const cell = index ? attributes(element("td"), { role: "cell" }) : attributes(element("th"), { role: "rowheader", scope: "row" });
    if (kind) cell.className = kind;
    cell.dataset.label = label;
    row.append(cell);
  });
  return row;
}

function emptyRow(columns, text) {
  const cell = attributes(element("td", text), { role: "cell", colspan: columns, class: "empty" });
  return attributes(element("tr", cell), { role: "row", "data-key": "" });
}

/** Shows a text or an element. An equal element is kept. */
function show(parent, value) {
  if (!(value instanceof Element)) return put(parent, value);
  const old = parent.firstElementChild;
  if (parent.childNodes.length === 1 && old?.isEqualNode(value)) return;
  if (old?.tagName === "A" && value.tagName === "A" && old.getAttribute("href") === value.getAttribute("href")) return put(old, value.textContent);
  parent.replaceChildren(value);
}

function options(select, values) {
  const texts = values.map(String);
  if ([...select.options].map((option) => option.value).join() === texts.join()) return;
  const before = select.value;
  select.replaceChildren(...texts.map((text) => element("option", text)));
  if (texts.includes(before)) select.value = before;
}

function element(name, ...children) {
  const out = document.createElement(name);
  out.append(...children);
  return out;
}

function attributes(out, values) {
  for (const [name, value] of Object.entries(values)) out.setAttribute(name, value);
  return out;
}

const state = (name) => attributes(element("span", name), { class: "state", "data-state": name });
const link = (id, text) => attributes(element("a", text), { href: `#job=${id}` });
const hint = (text) => text && attributes(element("span", text), { class: "hint" });
const clip = (text) => text && attributes(element("span", text.slice(0, 1000)), { title: text.slice(0, 1000) });

function meter(now, most, text) {
  const bar = attributes(element("meter"), { min: 0, max: most, value: now, "aria-hidden": "true" });
  return attributes(element("span", bar, ` ${text}`), { class: "number" });
}

// ---- values as text ----

/** NaN and infinities are strings in JSON. */
const value = (number) => Number(number);
const loss = (number) => Number.isFinite(value(number)) ? value(number).toFixed(4).replace(/(\.\d\d)00$/, "$1") : String(number);
const percent = (number) => `${Math.round(number)}%`;
const when = (unix_ms) => unix_ms && new Date(unix_ms).toLocaleString();

function scaled(number, base, units) {
  let unit = 0;
  while (Math.abs(number) >= base && unit < units.length - 1) { number /= base; unit++; }
  return `${unit && Math.abs(number) < 100 ? Number(number.toPrecision(3)) : Math.round(number)}${units[unit]}`;
}

function count(number) {
  return Number.isFinite(value(number)) ? scaled(value(number), 1000, ["", "K", "M", "G", "T"]) : String(number);
}

function bytes(number) {
  return scaled(number, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
}

function runtime(job, now) {
  return job.started_unix_ms && time(Math.max(0, (job.ended_unix_ms ?? now) - job.started_unix_ms) / 1000);
}

function time(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two(Math.floor(whole / 60) % 60)}m`;
  return `${Math.floor(whole / 86400)}d${two(Math.floor(whole / 3600) % 24)}h`;
}

function device(uuid, gpus) {
  const gpu = gpus.find((gpu) => gpu.uuid === uuid);
  return gpu ? `GPU ${gpu.index}` : uuid;
}

// ---- events ----

document.addEventListener("visibilitychange", () => { clearTimeout(timer); if (!document.hidden) poll(); });
window.addEventListener("hashchange", async () => {
  for (const id of ["loss", "speed"]) part(id).replaceChildren();
  put(part("log"), "");
  part("log-rank").replaceChildren();
  await poll();
  if (chosen() !== null) part("job-title").focus();
});
for (const id of ["log-rank", "log-stream"]) part(id).addEventListener("change", poll);
poll();
