// Sorts the table of comparisons by a click on a heading, and shows the rows that have all the words.
(() => {
  const table = document.getElementById("all"), body = table.tBodies[0], rows = [...body.rows];
  const text = rows.map((row) => row.textContent.toLowerCase());
  const filter = document.getElementById("filter"), count = document.getElementById("count");
  filter.closest("p").hidden = false;
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, i) => {
      row.hidden = !words.every((word) => text[i].includes(word));
      shown += !row.hidden;
    });
    count.textContent = words.length ? `${shown} of ${rows.length}` : "";
  });
  const value = (row, column, numeric) => {
    const cell = row.cells[column].textContent.trim();
    return !numeric ? cell : cell === "∞" ? Infinity : cell === "" ? -1 : Number(cell);
  };
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    let up = heading.classList.contains("n");
    button.addEventListener("click", () => {
      const numeric = heading.classList.contains("n");
      const keyed = rows.map((row) => [value(row, column, numeric), row]);
      keyed.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (up ? -1 : 1));
      body.append(...keyed.map(([, row]) => row));
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", up ? "descending" : "ascending");
      up = !up;
    });
  });
})();
