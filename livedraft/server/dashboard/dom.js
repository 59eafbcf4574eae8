// Elements and numbers. Text from the server only ever becomes a text node.

export const $ = (id) => document.getElementById(id);

/** An element with attributes and children; strings are text. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value != null) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Only what has changed is touched, so a selection or a screen reader is not disturbed every second. */
export function say(id, text) {
  const node = typeof id === "string" ? $(id) : id;
  if (node.textContent !== text) node.textContent = text;
}

const shown = new WeakMap();

/** The children of a list, replaced when `key` is another one. */
export function fill(node, key, make) {
  const text = JSON.stringify(key);
  if (shown.get(node) === text) return;
  shown.set(node, text);
  node.replaceChildren(...make());
}

export const percent = (share) => (share == null ? "–" : `${Math.round(100 * share)} %`);
export const figure = (value, digits = 2) => (value == null ? "–" : value.toFixed(digits));
export const whole = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 0.9995) return `${seconds < 0.01 ? (1000 * seconds).toFixed(1) : Math.round(1000 * seconds)} ms`;
  if (seconds < 90) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function bytes(count) {
  if (count == null) return "–";
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) [count, unit] = [count / 1000, unit + 1];
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

export function clock(seconds) {
  const date = new Date(1000 * seconds);
  const isToday = date.toDateString() === new Date().toDateString();
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
  return isToday ? time : `${date.toLocaleDateString([], { day: "numeric", month: "short" })} ${time}`;
}

/** One row of a definition list. */
export const row = (term, value) => [el("dt", {}, term), el("dd", {}, value)];
