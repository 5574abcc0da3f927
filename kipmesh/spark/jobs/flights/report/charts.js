"use strict";
// Small pieces that the sections draw with: SVG elements, scales, axes, one tooltip. No library, nothing loaded.

const NS = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function node(tag, attributes = {}, parent = null, text = null) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function html(tag, attributes = {}, parent = null, text = null) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const percent = (share, digits = 1) => (share === null ? "–" : `${(100 * share).toFixed(digits)}%`);
const minutes = (value) => (value === null || value === undefined ? "–" : `${tenth.format(value).replace("-", "−")} min`);
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

function dayName(day, withYear = false) {
  const [year, month, date] = day.split("-").map(Number);
  return `${date} ${MONTHS[month - 1]}${withYear ? ` ${year}` : ""}`;
}

const scale = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);

function ticks(high, count) {
  const raw = high / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
  return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, index) => index * step);
}

/** Draws now and again whenever the width of `host` changes. */
function drawn(host, draw) {
  let last = 0;
  const again = () => {
    const width = host.clientWidth;
    if (width === 0 || width === last) return;
    last = width;
    host.replaceChildren();
    draw(host, width);
  };
  again();
  new ResizeObserver(again).observe(host);
  return () => { last = 0; again(); };
}

function canvas(host, width, height, label) {
  return node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label }, host);
}

/** Month names under the days, fewer where there is no room; years where there are several. */
function dayAxis(svg, days, x, top, bottom) {
  const starts = days.flatMap((day, index) => (day.endsWith("-01") || index === 0 ? [index] : []));
  const room = x(days.length) - x(0);
  const every = Math.max(1, Math.ceil((starts.length * 34) / room));
  const step = [1, 2, 3, 6, 12].find((candidate) => candidate >= every) ?? every;
  starts.forEach((index, position) => {
    if (position % step) return;
    const [year, month] = days[index].split("-");
    node("line", { class: "grid", x1: x(index), x2: x(index), y1: top, y2: bottom }, svg);
    const name = step >= 12 || (month === "01" && starts.length > 13) ? year : MONTHS[month - 1];
    node("text", { x: x(index) + 3, y: bottom + 15 }, svg, name);
  });
}

function linePath(values, x, y) {
  let path = "", open = false;
  values.forEach((value, index) => {
    if (value === null) { open = false; return; }
    path += `${open ? "L" : "M"}${x(index).toFixed(1)},${y(value).toFixed(1)}`;
    open = true;
  });
  return path;
}

function bandPath(low, high, x, y) {
  const kept = low.map((value, index) => index).filter((index) => low[index] !== null && high[index] !== null);
  if (!kept.length) return "";
  const up = kept.map((index) => `${x(index).toFixed(1)},${y(high[index]).toFixed(1)}`);
  const down = kept.reverse().map((index) => `${x(index).toFixed(1)},${y(low[index]).toFixed(1)}`);
  return `M${up.join("L")}L${down.join("L")}Z`;
}

/** A tooltip: a bold first line and lines below it. Text only, so that data cannot become markup. */
function showTip(event, title, lines) {
  const tip = byId("tip");
  tip.replaceChildren();
  html("b", {}, tip, title);
  tip.append(`\n${lines.join("\n")}`);
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = event.clientX + 16 + width > window.innerWidth ? event.clientX - width - 12 : event.clientX + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY - height / 2, window.innerHeight - height - 4))}px`;
}

const hideTip = () => { byId("tip").hidden = true; };

function tile(host, name, value, note, kind = "") {
  const made = html("div", { class: "tile" }, host);
  html("div", { class: "name" }, made, name);
  html("div", { class: `value ${kind}` }, made, value);
  html("div", { class: "note" }, made, note);
}
