// A box above long tables: rows stay that have all the words typed; tables and headings without rows go.
(function () {
  "use strict";
  const MANY_ROWS = 25;

  function build(article) {
    const tables = Array.from(article.querySelectorAll("table")).filter((table) => table.tBodies.length);
    const rows = tables.flatMap((table) => Array.from(table.tBodies[0].rows));
    if (rows.length < MANY_ROWS) return;
    const words = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

    const box = document.createElement("div");
    box.className = "table-filter";
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "Filter the tables of this page";
    input.setAttribute("aria-label", input.placeholder);
    const count = document.createElement("output");
    box.append(input, count);
    const first = tables[0].closest(".md-typeset__scrollwrap") || tables[0];
    const heading = previousHeading(first) || first;
    heading.before(box);

    function filter() {
      const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        row.hidden = !wanted.every((word) => words.get(row).includes(word));
        shown += row.hidden ? 0 : 1;
      }
      for (const table of tables) {
        const empty = Array.from(table.tBodies[0].rows).every((row) => row.hidden);
        (table.closest(".md-typeset__scrollwrap") || table).hidden = empty;
      }
      for (const each of article.querySelectorAll("h2, h3, h4")) each.hidden = wanted.length > 0 && isEmpty(each);
      count.textContent = wanted.length ? `${shown} of ${rows.length} rows` : `${rows.length} rows`;
    }
    input.addEventListener("input", filter);
    filter();
  }

  function previousHeading(element) {
    for (let each = element.previousElementSibling; each; each = each.previousElementSibling) {
      if (/^H[1-6]$/.test(each.tagName)) return each.tagName === "H1" ? null : each;
    }
    return null;
  }

  // Whether all tables until the next heading of its level are hidden, and there is at least one.
  function isEmpty(heading) {
    let found = 0;
    for (let each = heading.nextElementSibling; each; each = each.nextElementSibling) {
      if (/^H[1-6]$/.test(each.tagName) && each.tagName <= heading.tagName) break;
      const table = each.matches("table, .md-typeset__scrollwrap") ? each : each.querySelector("table");
      if (!table) continue;
      if (!each.hidden && !table.hidden) return false;
      found += 1;
    }
    return found > 0;
  }

  // Material wraps tables when the page is ready, so wait for that.
  window.addEventListener("load", () => {
    const article = document.querySelector("article.md-typeset");
    if (article) build(article);
  });
})();
