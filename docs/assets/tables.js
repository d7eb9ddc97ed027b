// Adds a filter and sortable columns to each table inside an element of the class "searchable".
function prepare(block) {
  const table = block.querySelector("table");
  if (!table || block.dataset.ready) return;
  block.dataset.ready = "yes";
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const bar = document.createElement("div");
  bar.className = "table-filter";
  const input = document.createElement("input");
  input.type = "search";
  input.placeholder = "Filter rows: all words must occur";
  input.setAttribute("aria-label", "Filter the rows of the table");
  const count = document.createElement("span");
  bar.append(input, count);
  block.prepend(bar);

  function filter() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${rows.length} rows`;
  }
  input.addEventListener("input", filter);
  filter();

  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].textContent.trim();
      const number = (text) => (/^[\d.]+e[+-]?\d+$/.test(text) ? Number(text) : NaN);
      rows.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        const difference = number(x) - number(y);
        const order = Number.isNaN(difference) ? x.localeCompare(y) : difference;
        return down ? -order : order;
      });
      body.append(...rows);
    });
  });
}
document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".searchable").forEach(prepare));
