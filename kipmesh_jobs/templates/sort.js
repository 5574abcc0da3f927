// Sorts tables of class sortable by the clicked column; a second click reverses the order.
for (const table of document.querySelectorAll(".sortable table")) {
  for (const head of table.tHead.rows[0].cells) {
    const value = (row) => {
      const text = row.cells[head.cellIndex].textContent;
      const number = parseFloat(text.replace(/,/g, ""));
      return head.cellIndex === 0 ? text : Number.isNaN(number) ? -1e9 : number;
    };
    const sort = () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (up ? 1 : -1));
      table.tBodies[0].append(...rows);
    };
    head.tabIndex = 0;
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); }
    });
  }
}
