// How does a page stay up to date? It asks with a cursor and gets an answer only if something changed.
"use strict";
(() => {
  const { element, begin, runPage, comparePage, refresh } = window.shardtune;
  const EVERY = 2000;

  function say(text, kind) {
    const place = document.getElementById("live");
    if (place) { place.textContent = text; place.className = `live ${kind}`; }
  }

  // The next question waits for the answer to the last, and ten times as long as it took.
  async function follow(address, show, gone) {
    let cursor = null;
    for (;;) {
      const began = performance.now();
      if (!document.hidden || cursor === null) {
        try {
          const separator = address.includes("?") ? "&" : "?";
          const answer = await fetch(cursor === null ? address : `${address}${separator}cursor=${encodeURIComponent(cursor)}`);
          if (answer.status === 401) say("the token is no longer valid", "off");
          else if (!answer.ok) say(`the dashboard returned status ${answer.status}`, "off");
          else {
            const view = await answer.json();
            if (view.gone) { gone(); say("this run no longer exists", "off"); }
            else {
              if (!view.unchanged) show(view);
              cursor = view.cursor;
              say("live", "on");
            }
          }
        } catch { say("no response from the dashboard, retrying", "off"); }
      }
      await new Promise((resolve) => setTimeout(resolve, Math.max(EVERY, 10 * (performance.now() - began))));
    }
  }

  function followView(address, make, what) {
    let update = null;
    const page = begin(what);
    page.main.append(element("p", { class: "empty" }, "Loading …"));
    follow(address, (view) => { update ??= make(view); update(view); }, () => {
      if (update) return;
      page.main.replaceChildren(element("p", { class: "empty" }, "There is no such run. ", element("a", { href: "/" }, "All runs")));
    });
  }

  const COLUMNS = ["run", "status", "model or script", "processes", "steps", "loss", "eval loss or metric", "tok/s, all ranks", "started", "last event"];
  const NUMBERS = new Set(["processes", "steps", "loss", "eval loss or metric", "tok/s, all ranks"]);
  const list = { runs: [], sort: ["started", -1], text: "", chosen: new Set() };

  function key(run, column) {
    if (column === "run") return run.name;
    return column === "status" ? run.status : run.cells[column][1];
  }

  function ordered() {
    const [column, direction] = list.sort;
    const wanted = list.text.toLowerCase();
    const fits = (run) => !wanted || [run.name, run.status, run.cells["model or script"][0]].some((t) => t.toLowerCase().includes(wanted));
    return list.runs.filter(fits).sort((a, b) => {
      const [x, y] = [key(a, column), key(b, column)];
      if (x === y) return a.name < b.name ? 1 : -1;
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return (x < y ? -1 : 1) * direction;
    });
  }

  function line(run, changed) {
    const box = element("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, "data-key": `box-${run.name}` });
    box.checked = list.chosen.has(run.name);
    box.addEventListener("change", () => { box.checked ? list.chosen.add(run.name) : list.chosen.delete(run.name); changed(); });
    const cells = COLUMNS.slice(2).map((column) => {
      const td = element("td", { class: [NUMBERS.has(column) ? "number" : "", column === "model or script" ? "model" : ""].join(" ").trim() || null }, run.cells[column][0]);
      if (column === "steps" && run.progress !== null) {
        const bar = element("div");
        bar.style.width = `${100 * run.progress}%`;
        td.append(element("span", { class: "progress" }, bar));
      }
      return td;
    });
    return element("tr", { "data-run": run.name }, element("td", {}, box),
      element("td", {}, element("a", { href: `/runs/${encodeURIComponent(run.name)}`, "data-key": `run-${run.name}` }, run.name)),
      element("td", {}, element("span", { class: `badge ${run.status}`, title: run.why || null }, run.status)), cells);
  }

  function heads(again) {
    return COLUMNS.map((column) => {
      const [sorted, direction] = list.sort;
      const button = element("button", { "data-key": `sort-${column}` }, column);
      button.addEventListener("click", () => {
        list.sort = [column, sorted === column ? -direction : NUMBERS.has(column) || column === "started" ? -1 : 1];
        again();
      });
      const order = sorted === column ? (direction > 0 ? "ascending" : "descending") : null;
      return element("th", { scope: "col", class: NUMBERS.has(column) ? "number" : null, "aria-sort": order }, button);
    });
  }

  function listPage() {
    const page = begin("All runs");
    const lead = element("p", { class: "lead" });
    const search = element("input", { type: "search", placeholder: "Filter by name, status, model", "aria-label": "Filter" });
    const compare = element("button", { disabled: true }, "Compare");
    const counts = element("span", { class: "note", role: "status" });
    const place = element("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Runs" });
    page.main.append(element("h1", {}, "Runs"), lead, element("div", { class: "runs-tools" }, search, compare, counts), place);
    const chosen = () => {
      compare.disabled = list.chosen.size < 2;
      compare.textContent = list.chosen.size > 1 ? `Compare ${list.chosen.size} runs` : "Compare";
    };
    const draw = () => {
      const rows = ordered();
      counts.textContent = rows.length === list.runs.length ? `${rows.length} ${rows.length === 1 ? "run" : "runs"}` : `${rows.length} of ${list.runs.length} runs`;
      refresh(place, [rows, list.sort, [...list.chosen]], () => (rows.length
        ? element("table", { class: "runs" }, element("thead", {}, element("tr", {}, element("th", {}), heads(draw))),
          element("tbody", {}, rows.map((run) => line(run, chosen))))
        : element("p", { class: "empty" }, list.runs.length ? "No run matches." : "No runs yet: start one with `shardtune train` or `shardtune run`.")));
      chosen();
    };
    search.addEventListener("input", () => { list.text = search.value; draw(); });
    compare.addEventListener("click", () => {
      location.href = `/compare?${[...list.chosen].map((name) => `run=${encodeURIComponent(name)}`).join("&")}`;
    });
    follow("/api/runs", (view) => {
      list.runs = view.runs;
      lead.textContent = view.root;
      const there = new Set(view.runs.map((run) => run.name));
      list.chosen = new Set([...list.chosen].filter((name) => there.has(name)));
      draw();
    }, () => {});
  }

  document.addEventListener("DOMContentLoaded", () => {
    const path = location.pathname;
    if (path.startsWith("/runs/")) followView(`/api${path}`, runPage, decodeURIComponent(path.slice(6)));
    else if (path === "/compare") followView(`/api/compare${location.search}`, comparePage, "Comparison");
    else listPage();
  });
})();
