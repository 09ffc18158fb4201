"use strict";
// Comfort only: without it the page says the same.
(() => {
  const table = document.getElementById("verdict-table");
  const lines = [...table.querySelectorAll("tr[data-bad]")];
  if (lines.some((line) => line.dataset.bad === "yes")) {
    const label = document.createElement("label");
    const filter = document.createElement("input");
    filter.type = "checkbox";
    filter.addEventListener("change", () => {
      for (const line of lines) {
        line.hidden = filter.checked && line.dataset.bad === "no";
      }
      for (const body of table.tBodies) {
        const shown = [...body.querySelectorAll("tr[data-bad]")].some((line) => !line.hidden);
        body.hidden = !shown;
      }
    });
    label.append(filter, " only cases that fail");
    label.className = "filter";
    table.parentElement.before(label);
  }
  for (const block of document.querySelectorAll("pre.command")) {
    if (!navigator.clipboard) break; // pages of the file system may have none
    const button = document.createElement("button");
    button.textContent = "copy";
    button.type = "button";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("code").textContent);
      button.textContent = "copied";
    });
    block.append(button);
  }
  addEventListener("beforeprint", () => {
    for (const one of document.querySelectorAll("details")) one.open = true;
  });
})();
