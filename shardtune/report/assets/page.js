// What does the page of a run, or of a comparison, consist of? The same for a report and for the dashboard.
"use strict";
(() => {
  const { element, table, refresh, header, showCharts, showTimeline, chartTools, chartState } = window.shardtune;

  function begin(title) {
    document.title = title;
    const main = element("main");
    const top = header(title);
    document.body.replaceChildren(top, main);
    return { main, nav: top.querySelector("nav") };
  }

  function section(page, id, title) {
    const body = element("div");
    const made = element("section", { id, "aria-label": title }, title ? element("h2", {}, title) : null, body);
    page.main.append(made);
    if (title) page.nav.append(element("a", { href: `#${id}` }, title));
    return { made, body, link: page.nav.lastElementChild };
  }

  function fill(part, data, build, quiet) {
    const empty = !data || (Array.isArray(data) && !data.length);
    const hide = empty && !quiet;
    part.made.hidden = hide;
    if (part.link) part.link.hidden = hide;
    refresh(part.body, data, () => (empty ? element("p", { class: "quiet" }, quiet ?? "") : build(data)));
  }

  const card = (...inside) => element("div", { class: "card" }, ...inside);

  function summary(view) {
    const tiles = view.tiles.map((tile) =>
      element("div", { class: "tile" }, element("div", { class: "name" }, tile.name),
        element("div", { class: "value" }, tile.value), element("div", { class: "more" }, tile.note)));
    const bar = element("div");
    bar.style.width = `${100 * (view.progress ?? 0)}%`;
    return [
      element("div", { class: "head" }, element("h1", {}, view.title), element("span", { class: `badge ${view.status}` }, view.status),
        view.left ? element("span", { class: "note" }, view.left) : null),
      element("p", { class: "lead" }, view.folder),
      view.why ? element("div", { class: `why ${view.status}` }, element("p", {}, view.why),
        view.advice.map((text) => element("p", { class: "advice" }, text))) : null,
      view.status === "running" && view.progress !== null
        ? element("div", { class: "progress", role: "progressbar", "aria-valuenow": String(Math.round(100 * view.progress)) }, bar) : null,
      element("dl", { class: "facts" }, view.facts.map((fact) => [element("dt", {}, fact.name),
        element("dd", { class: fact.name === "Command" ? "mono" : null }, fact.value)])),
      asking(view),
      element("div", { class: "tiles" }, tiles),
    ];
  }

  function copyButton(text) {
    const button = element("button", { class: "small", "data-key": "copy", "aria-label": "Copy the command" }, "Copy");
    button.addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(text); } catch { // not allowed here: it is selected, to be copied by hand
        getSelection().selectAllChildren(button.previousElementSibling);
        return;
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    return button;
  }

  // The dashboard loads no model: it names the command that does, and links to a chat that is being served.
  function asking(view) {
    const { ask, chat } = view;
    if (!ask && !chat) return null;
    return element("p", { class: "ask" }, element("span", { class: "name" }, "Try the model"),
      ask ? [element("code", {}, ask), copyButton(ask)] : null,
      chat?.address ? element("a", { href: chat.address, target: "_blank", rel: "noopener noreferrer", "data-key": "chat" }, chat.text)
        : chat ? element("span", {}, chat.text) : null);
  }

  function notes(list) {
    return element("ul", { class: "notes" }, list.map((text) => element("li", {}, text)));
  }

  const said = (name, text) => (text === undefined ? null
    : element("div", {}, element("div", { class: "name" }, name), element("p", { class: "said", tabindex: "0" }, text)));

  function evaluation(given) {
    const wrong = given.wrong.map((row) => element("article", { class: "sample" }, said(`${row.row} · prompt`, row.prompt),
      element("div", { class: "answers" }, said("base", row.base), said("tuned", row.tuned), said("expected", row.expected))));
    return card(element("h3", {}, given.title), table(given, given.title), !wrong.length ? null
      : element("details", { "data-key": `wrong-${given.title}` }, element("summary", {}, "Rows the tuned model got wrong"), wrong));
  }

  function sample(given) {
    return element("article", { class: "card sample" }, said(`${given.row} · prompt`, given.prompt),
      element("div", { class: "answers" }, said("before training", given.before), said("after training", given.after), said("expected", given.expected)));
  }

  function configSection(given) {
    const own = given.settings.filter((s) => !s.is_default).length;
    const rows = given.settings.map((s) =>
      element("tr", { class: s.is_default ? "is-default" : null }, element("td", { class: "key mono" }, s.name),
        element("td", { class: "mono" }, s.value), element("td", { class: "origin" }, s.origin)));
    return element("details", { class: "card", "data-key": `config-${given.name}`, open: own > 0 },
      element("summary", { "data-key": `config-head-${given.name}` }, given.name,
        element("span", {}, `${own} of ${given.settings.length} not the default`)),
      element("div", { class: "inside" }, element("table", { class: "config" }, element("tbody", {}, rows))));
  }

  function defaultsButton(place) {
    const shown = place.classList.contains("with-defaults");
    const button = element("button", { "data-key": "defaults", "aria-pressed": String(shown) }, "Show defaults too");
    button.addEventListener("click", () => button.setAttribute("aria-pressed", String(place.classList.toggle("with-defaults"))));
    return element("p", { class: "above" }, button);
  }

  function environmentGroup(given, index) {
    const rows = given.pairs.map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", {}, value)));
    return element("details", { class: "card", "data-key": `environment-${given.title}`, open: index < 2 },
      element("summary", { "data-key": `environment-head-${given.title}` }, given.title, element("span", {}, `${rows.length} facts`)),
      element("div", { class: "inside scroll" }, element("table", { class: "pairs" }, element("tbody", {}, rows))));
  }

  const nameSteps = (view) => { chartState.stepTitle = view.is_script ? "step" : "optimizer step"; };
  const titled = (spec) => card(spec.title ? element("h3", {}, spec.title) : null, table(spec, spec.title ?? "table"));

  function runPage(view) {
    const page = begin(view.title);
    const part = {
      summary: section(page, "summary", ""), notes: section(page, "notes", ""), problems: section(page, "problems", "Warnings and failures"),
      log: section(page, "log", "Log"), metrics: section(page, "metrics", "Results"),
      memory: section(page, "out-of-memory", "Out of memory"), charts: section(page, "charts", "Charts"),
      planned: section(page, "planned", "Planned and actual"), ranks: section(page, "ranks", "Ranks"), checkpoints: section(page, "checkpoints", "Checkpoints"),
      evaluations: section(page, "evaluations", "Evaluations"), samples: section(page, "samples", "Samples"), data: section(page, "data", "Data"), adapters: section(page, "adapters", "Adapters"),
      config: section(page, "config", "Config"), environment: section(page, "environment", "Environment"),
    };
    const footer = element("footer");
    page.main.append(footer);
    const tools = element("div"), line = element("div"), figures = element("div");
    part.charts.body.append(tools, line, figures);
    tools.style.display = "contents";
    nameSteps(view);
    const absent = (text) => (view.is_script ? null : text); // a script need not have any
    return (view) => {
      fill(part.summary, [view.facts, view.tiles, view.status, view.why, view.advice, view.left, view.progress, view.ask, view.chat], () => summary(view));
      fill(part.notes, view.notes, notes);
      fill(part.problems, view.problems, (t) => card(table(t, "Warnings and failures")));
      fill(part.log, view.logs, (ends) => ends.map((end) => card(element("h3", {}, `The last lines of ${end.file}`), element("div", { class: "said mono tail", tabindex: "0" }, element("div", {}, end.lines)))));
      fill(part.metrics, view.metrics, (t) => card(table(t, "Metrics")));
      fill(part.memory, view.out_of_memory, (all) => all.map(titled));
      part.charts.made.hidden = part.charts.link.hidden = !view.charts.length && !view.marks.length;
      refresh(tools, view.ranks, () => chartTools(view.ranks.map((rank) => `rank ${rank}`)));
      showCharts(figures, view.charts, view.marks);
      showTimeline(line);
      fill(part.planned, view.planned, (t) => card(table(t, "Planned and actual")));
      fill(part.ranks, view.rank_table, (t) => card(table(t, "Ranks")), absent("No step was profiled."));
      fill(part.checkpoints, view.checkpoints, (t) => card(table(t, "Checkpoints")), absent("No checkpoints."));
      fill(part.evaluations, view.evaluations, (all) => all.map(evaluation));
      fill(part.samples, view.samples, (all) => all.map(sample));
      fill(part.data, view.data, (t) => card(table(t, "Data")));
      fill(part.adapters, view.adapters, (t) => card(table(t, "Adapters")));
      fill(part.config, view.config, (all) => [defaultsButton(part.config.body), ...all.map(configSection)], absent("There is no config.yaml."));
      fill(part.environment, view.environment, (all) => all.map(environmentGroup));
      footer.textContent = view.written;
    };
  }

  function coloured(spec) {
    const made = table(spec, "Results");
    [...made[0].querySelectorAll("td.tone-run")].forEach((td, i) => {
      const swatch = element("i", { class: "swatch" });
      swatch.style.background = `var(--c${i % 8})`;
      td.prepend(swatch);
    });
    return made;
  }

  function comparePage(view) {
    const page = begin(view.title);
    page.main.append(element("h1", {}, view.title));
    const part = {
      notes: section(page, "notes", ""), results: section(page, "results", "Results"),
      differences: section(page, "differences", "Settings that differ"), charts: section(page, "charts", "Charts"),
    };
    const footer = element("footer");
    page.main.append(footer);
    nameSteps(view);
    const figures = element("div");
    part.charts.body.append(chartTools(view.runs, ["step", "tokens", "hours"].filter((axis) => view.axes.some((of) => of[axis]))), figures);
    return (view) => {
      fill(part.notes, view.notes, notes);
      fill(part.results, [view.results, view.metrics], ([of, metrics]) => [card(coloured(of)), metrics ? card(table(metrics, "Metrics")) : null]);
      fill(part.differences, view.differences, (t) => card(table(t, "Settings that differ")), "Fewer than two of these runs have a config.yaml to compare.");
      showCharts(figures, view.charts, [], view.axes);
      footer.textContent = view.written;
    };
  }

  Object.assign(window.shardtune, { begin, runPage, comparePage });

  document.addEventListener("DOMContentLoaded", () => {
    const embedded = document.getElementById("view");
    if (!embedded) return;
    const view = JSON.parse(embedded.textContent);
    (view.kind === "compare" ? comparePage : runPage)(view)(view);
  });
})();
