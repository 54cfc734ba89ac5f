// The page's own behaviour: sorted tables, copied commands. Without it all is readable.
"use strict";

function say(words) {
  document.getElementById("said").textContent = words;
}

// A cell's figure where it has one, else its words; null for a dash, which stands last.
function keyOf(row, column) {
  const cell = row.cells[column];
  if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
  const text = cell.textContent.trim();
  return text === "-" || text === "" ? null : text;
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a.localeCompare(b, "en", { numeric: true });
}

function sortBy(table, column, ascending) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [keyOf(row, column), row]);
  const sign = ascending ? 1 : -1;
  rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b)));
  body.append(...rows.map(([, row]) => row));
}

function sortable(table) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const ascending = heading.getAttribute("aria-sort") !== "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      sortBy(table, column, ascending);
      say(`sorted by ${heading.textContent}, ${ascending ? "ascending" : "descending"}`);
    });
  });
}

function copied(button) {
  const text = button.parentElement.querySelector("pre");
  button.hidden = false;
  button.addEventListener("click", () => {
    const selection = window.getSelection();
    selection.selectAllChildren(text);
    if (document.execCommand("copy")) selection.removeAllRanges();
    say("copied");
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
}

document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll("button.copy").forEach(copied);
