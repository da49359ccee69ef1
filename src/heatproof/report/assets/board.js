/* heatproof: a click on a heading sorts the table by its column; another one reverses it. */
"use strict";
for (const table of document.querySelectorAll("table")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button"), text = (row) => row.cells[column].textContent;
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const rows = [...table.tBodies[0].rows], back = head.getAttribute("aria-sort") === "ascending";
      rows.sort((a, b) => (back ? -1 : 1) * text(a).localeCompare(text(b), "en", { numeric: true }));
      table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", back ? "descending" : "ascending");
      table.tBodies[0].append(...rows);
    });
  });
}
