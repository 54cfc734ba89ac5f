// Two steps side by side. A step's spans are numbers: ticks since the one before began, its length
// in ticks, the number of its name (see timelines.py).
"use strict";

const TICKS = 100000;
const ROW = 15, GAP = 3, HEAD = 20, FOOT = 24;
const SVG = "http://www.w3.org/2000/svg";
const WORDS = { compute: "computes", wait: "waits", message: "message" };

function element(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function duration(seconds) {
  for (const [size, name] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]]) {
    if (Math.abs(seconds) >= size) return `${Number((seconds / size).toPrecision(3))} ${name}`;
  }
  return seconds ? `${Number((seconds / 1e-9).toPrecision(3))} ns` : "0 s";
}

// All things of a step, in the order in which the keyboard goes through them.
function thingsOf(step) {
  const scale = step.seconds / TICKS;
  return step.workers.flatMap((worker, number) => worker.rows.map((row) => {
    const things = [];
    let begins = 0;
    for (let i = 0; i < row.spans.length; i += 3) {
      begins += row.spans[i];
      things.push({
        worker: worker.name, number, row: row.name, kind: row.kind, name: step.names[row.spans[i + 2]],
        start: begins * scale, length: row.spans[i + 1] * scale,
      });
    }
    return things;
  }));
}

function spoken(thing) {
  return `${thing.worker}, ${thing.row}: ${thing.name}, from ${duration(thing.start)} on, for ${duration(thing.length)}`;
}

function niceStep(least) {
  const size = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((part) => part * size).find((step) => step >= least * 0.999);
}

function shortened(text, width) {
  const most = Math.floor(width / 6.2);
  return text.length <= most ? text : `${text.slice(0, most - 1)}\u2026`;
}

// As wide as the longest row's name, within reason.
function labelWidth(step, width) {
  const longest = Math.max(...step.workers.flatMap((worker) => worker.rows.map((row) => row.name.length)), 4);
  return Math.min(Math.round(longest * 6.2) + 10, Math.round(width * 0.3));
}

function axis(svg, x, seconds, bottom, width, label) {
  const step = niceStep(seconds / Math.max(2, Math.floor((width - label) / 80)));
  for (let i = 0; i * step <= seconds * 1.0001; i += 1) {
    const at = x(i * step);
    element("path", { class: "grid", d: `M${at},0V${bottom}` }, svg);
    const last = at > width - 30;
    element("text", { x: last ? width : at, y: bottom + 14, class: last ? "end" : "middle" }, svg, duration(i * step));
  }
}

function hatch(svg, id) {
  const pattern = element("pattern", { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg);
  element("path", { d: "M0,0V5", style: "stroke: var(--soft); stroke-width: 2.4" }, pattern);
}

function inside(svg, thing, left, width, y) {
  const text = thing.kind === "compute" ? "" : shortened(thing.name, width - 8);
  if (width < 56 || !text) return;
  const kind = thing.kind === "wait" ? "inside on-hatch" : "inside";
  element("text", { x: left + 4, y: y + ROW - 4, class: kind }, svg, text);
}

function draw(side, step, seconds) {
  const width = Math.max(240, Math.round(side.drawing.clientWidth));
  const rows = thingsOf(step);
  const label = labelWidth(step, width);
  const x = (second) => label + (second / seconds) * (width - label - 1);
  const bottom = step.workers.length * HEAD + rows.length * (ROW + GAP);
  const svg = document.createElementNS(SVG, "svg");
  const said = step.workers.map((w) => `${w.name} computes ${duration(w.compute_seconds)} and waits ${duration(w.wait_seconds)}`);
  for (const [key, value] of Object.entries({
    viewBox: `0 0 ${width} ${bottom + FOOT}`, height: bottom + FOOT, tabindex: 0, role: "application",
    "aria-roledescription": "timeline", "aria-label": `${step.name}: ${step.what}. ${said.join("; ")}. Arrow keys go from one thing to the next.`,
  })) svg.setAttribute(key, value);
  hatch(svg, `${side.id}-hatch`);
  axis(svg, x, seconds, bottom, width, label);
  let y = 0, at = 0;
  side.shapes = [];
  step.workers.forEach((worker) => {
    element("text", { x: 0, y: y + 14, class: "who" }, svg, `${worker.name}: computes ${duration(worker.compute_seconds)}, waits ${duration(worker.wait_seconds)}`);
    y += HEAD;
    worker.rows.forEach((row) => {
      element("text", { x: label - 6, y: y + ROW - 4, class: "end" }, svg, shortened(row.name, label - 6));
      element("path", { class: "lane", d: `M${label},${y + ROW + 1}H${width}` }, svg);
      const group = element("g", {}, svg);
      side.shapes.push(rows[at].map((thing) => {
        const left = x(thing.start), wide = Math.max(0.8, x(thing.start + thing.length) - left);
        const shape = element("rect", { x: left.toFixed(1), y, width: wide.toFixed(1), height: ROW, class: thing.kind }, group);
        if (thing.kind === "wait") shape.setAttribute("fill", `url(#${side.id}-hatch)`);
        inside(group, thing, left, wide, y);
        shape.thing = thing;
        return shape;
      }));
      y += ROW + GAP;
      at += 1;
    });
  });
  side.drawing.replaceChildren(svg);
  side.figure.querySelector("figcaption").textContent = step.what;
  choosable(side, svg);
}

function choosable(side, svg) {
  const readout = side.figure.querySelector(".readout");
  let row = 0, place = 0, chosen = null;
  const choose = (shape) => {
    if (chosen) chosen.classList.remove("chosen");
    chosen = shape;
    chosen.classList.add("chosen");
    readout.textContent = spoken(chosen.thing);
  };
  svg.addEventListener("pointerover", (event) => { if (event.target.thing) choose(event.target); });
  svg.addEventListener("pointerdown", (event) => { if (event.target.thing) choose(event.target); });
  svg.addEventListener("keydown", (event) => {
    const full = side.shapes.filter((shapes) => shapes.length);
    if (!full.length) return;
    const ways = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -Infinity], End: [0, Infinity] };
    const way = ways[event.key];
    if (!way) return;
    event.preventDefault();
    if (chosen) {
      const now = chosen.thing.start + chosen.thing.length / 2;
      row = Math.min(full.length - 1, Math.max(0, full.findIndex((shapes) => shapes.includes(chosen)) + way[0]));
      place = way[0] ? nearest(full[row], now) : Math.min(full[row].length - 1, Math.max(0, full[row].indexOf(chosen) + way[1]));
    }
    choose(full[row][place]);
  });
}

function nearest(shapes, second) {
  const away = (shape) => Math.abs(shape.thing.start + shape.thing.length / 2 - second);
  return shapes.reduce((best, shape, i) => (away(shape) < away(shapes[best]) ? i : best), 0);
}

const MOST_LISTED = 1000;

function listed(side, step) {
  const place = side.figure.querySelector(".events");
  const every = thingsOf(step).flat();
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const name of ["worker", "row", "what", "begins", "lasts"]) {
    const heading = document.createElement("th");
    heading.scope = "col";
    heading.textContent = name;
    head.append(heading);
  }
  const body = table.createTBody();
  every.slice(0, MOST_LISTED).forEach((thing) => {
    const row = body.insertRow();
    for (const text of [thing.worker, thing.row, thing.kind === "message" ? thing.name : `${WORDS[thing.kind]}: ${thing.name}`, duration(thing.start), duration(thing.length)]) row.insertCell().textContent = text;
  });
  if (every.length > MOST_LISTED) body.insertRow().insertCell().textContent = `and ${every.length - MOST_LISTED} more`;
  place.replaceChildren(table);
}

function timelines(section) {
  const steps = JSON.parse(document.getElementById(section.dataset.steps).textContent);
  section.hidden = false;
  const same = section.querySelector(".same");
  const sides = [...section.querySelectorAll("figure")].map((figure) => ({
    figure, drawing: figure.querySelector(".drawing"), select: figure.querySelector("select"),
    details: figure.querySelector("details"), id: figure.querySelector("select").id, shapes: [],
  }));
  const stepOf = (side) => steps[Number(side.select.value)];
  const all = () => {
    const longest = Math.max(...sides.map((side) => stepOf(side).seconds));
    sides.forEach((side) => {
      draw(side, stepOf(side), same.checked ? longest : stepOf(side).seconds);
      if (side.details.open) listed(side, stepOf(side));
    });
  };
  same.addEventListener("change", all);
  sides.forEach((side) => {
    side.select.addEventListener("change", all);
    side.details.addEventListener("toggle", () => { if (side.details.open) listed(side, stepOf(side)); });
  });
  all();
  let width = section.clientWidth;
  new ResizeObserver(() => {
    if (section.clientWidth === width) return;
    width = section.clientWidth;
    requestAnimationFrame(all);
  }).observe(section);
}

document.querySelectorAll(".timelines").forEach(timelines);
