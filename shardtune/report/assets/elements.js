// How is text put on the page? As text nodes only: nothing that a run has written is ever read as HTML.
"use strict";
window.shardtune = {};
(() => {
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else made.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat(Infinity)) {
      if (child !== null && child !== undefined && child !== false) made.append(child);
    }
    return made;
  }

  function cell(content, column, wide) {
    const given = typeof content === "object" && content !== null ? content : { text: String(content ?? "") };
    const tone = given.tone || "";
    const classes = [column.number ? "number" : "", wide ? "wide" : "", column.name === "time" && !column.number ? "time" : ""];
    if (tone.startsWith("state ")) return element("td", {}, element("span", { class: `badge ${tone.slice(6)}` }, given.text));
    if (tone) classes.push(`tone-${tone}`);
    return element("td", { class: classes.filter(Boolean).join(" ") || null }, given.text);
  }

  function table(spec, label) {
    const head = element("tr", {}, spec.columns.map((c) => element("th", { class: c.number ? "number" : null, scope: "col" }, c.name)));
    const compact = spec.columns.length <= 5 && spec.rows.every((row) => row.every((c) => String(c?.text ?? c).length <= 60));
    const rows = spec.rows.map((row) =>
      element("tr", {}, row.map((content, i) => {
        const text = typeof content === "object" && content !== null ? content.text : content;
        return cell(content, spec.columns[i], !spec.columns[i].number && String(text).length > 60);
      })));
    return [
      !rows.length ? null : element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
        element("table", { class: compact ? "compact" : null }, element("thead", {}, head), element("tbody", {}, rows))),
      spec.note ? element("p", { class: "note" }, spec.note) : null,
    ];
  }

  // Replaces what a place holds if its data changed; what was opened or focused in it stays so.
  const shown = new WeakMap();
  function refresh(place, data, build) {
    const key = JSON.stringify(data ?? null);
    if (shown.get(place) === key) return;
    shown.set(place, key);
    const opened = new Set([...place.querySelectorAll("details[open][data-key]")].map((d) => d.dataset.key));
    const closed = new Set([...place.querySelectorAll("details:not([open])[data-key]")].map((d) => d.dataset.key));
    const focused = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    place.replaceChildren(...[build()].flat(Infinity).filter(Boolean));
    for (const found of place.querySelectorAll("details[data-key]")) {
      if (opened.has(found.dataset.key)) found.open = true;
      if (closed.has(found.dataset.key)) found.open = false;
    }
    if (focused) place.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  // Light or dark as the system says, until the reader chooses; the choice is kept where the browser allows it.
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("shardtune-theme"); } catch { /* a page opened from a file may not store */ }
  const listeners = [];
  function theme() { return chosen ?? (system.matches ? "dark" : "light"); }
  function applyTheme() {
    document.documentElement.dataset.theme = theme();
    for (const listener of listeners) listener();
  }
  function themeButton() {
    const button = element("button", { id: "theme", title: "Light or dark" });
    const label = () => { button.textContent = theme() === "dark" ? "Light" : "Dark"; };
    button.addEventListener("click", () => {
      chosen = theme() === "dark" ? "light" : "dark";
      try { localStorage.setItem("shardtune-theme", chosen); } catch { /* kept for this page alone */ }
      applyTheme();
    });
    listeners.push(label);
    label();
    return button;
  }
  system.addEventListener("change", applyTheme);
  applyTheme();

  function header(crumb) {
    const live = element("span", { class: "live", id: "live", role: "status" });
    const brand = document.documentElement.dataset.mode === "dashboard"
      ? element("a", { class: "brand", href: "/" }, "shardtune") : element("span", { class: "brand" }, "shardtune");
    return element("header", { class: "bar" },
      element("div", { class: "inner" }, brand, element("span", { class: "crumb" }, crumb), live, themeButton()),
      element("nav", { class: "sections", "aria-label": "On this page" }));
  }

  Object.assign(window.shardtune, { element, table, refresh, header, onTheme: (f) => listeners.push(f) });
})();
