// How are curves drawn? Every chart shares one x axis; only those in sight are drawn, the others when they come into it.
"use strict";
(() => {
  const { element, onTheme } = window.shardtune;
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const EVENTS = {
    restart: ["--soft", "triangle-right"], checkpoint: ["--c0", "diamond"], notice: ["--c7", "circle-open"],
    warning: ["--c4", "triangle-up"], guard: ["--c1", "square"], failure: ["--bad", "x"],
  };
  const cards = new Map();
  const state = { ranges: { step: null, time: null }, last: { step: 1, time: 1 }, stepTitle: "optimizer step", hidden: new Set(), chips: new Set(), log: new Set(), marks: [], axis: "step", axes: [], smoothing: 0, printing: false };
  const AXES = {
    step: { label: "steps", title: "optimizer step", tick: ",~r", hover: "step %{x:,.0f}" },
    tokens: { label: "tokens", title: "tokens, all ranks", tick: "~s", hover: "%{x:.4s} tokens" },
    hours: { label: "hours", title: "hours since the first event", tick: "~r", hover: "%{x:.2f} hours" },
    seconds: { label: "seconds", title: "seconds since the first event", tick: "~r", hover: "%{x:.1f} seconds" },
    minutes: { label: "minutes", title: "minutes since the first event", tick: "~r", hover: "%{x:.2f} minutes" },
  };

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = (index) => css(`--c${index % 8}`);
  // Plotly reads a few tags and entities in texts: a run's name must stay a name.
  const literal = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const visible = (chart) => chart.series.filter((s) => !state.hidden.has(s.name));
  // Charts over steps (or what was chosen instead) share one axis, charts of the machine over time another.
  const over = (chart) => (!chart || chart.over === "step" ? state.axis : chart.over);
  const family = (chart) => (!chart || chart.over === "step" ? "step" : "time");
  const range = (chart) => state.ranges[family(chart)] ?? [-0.012 * state.last[family(chart)], 1.012 * state.last[family(chart)]];
  const axisTitle = (chart) => (over(chart) === "step" ? state.stepTitle : AXES[over(chart)].title);
  const seriesColor = (chart, s) => (chart.stacked && s.name === "other" ? color(7) : color(s.color));

  // Where a series lies on the axis that was chosen; between the steps a run has told, in a straight line.
  const placed = new WeakMap();
  function xOf(s) {
    const map = state.axes[s.color];
    if (state.axis === "step" || !map) return s.x;
    if (!map[state.axis]) return s.x.map(() => null); // a script has no tokens
    const known = placed.get(s);
    if (known?.axis === state.axis) return known.x;
    const [from, to] = [map.step, map[state.axis]];
    let i = 1;
    const x = s.x.map((step) => {
      while (i < from.length - 1 && from[i] < step) i += 1;
      const share = from.length > 1 ? (step - from[i - 1]) / (from[i] - from[i - 1]) : 0;
      return to.length > 1 ? to[i - 1] + share * (to[i] - to[i - 1]) : 0;
    });
    placed.set(s, { axis: state.axis, x });
    return x;
  }

  // An exponential moving average, corrected for its start (as TensorBoard's); a gap begins it anew.
  function smoothed(values, weight) {
    let mean = 0, seen = 0;
    return values.map((value) => {
      if (value === null || !Number.isFinite(value)) { mean = seen = 0; return null; }
      mean = weight * mean + (1 - weight) * value;
      seen += 1;
      return mean / (1 - weight ** seen);
    });
  }

  const isSmoothed = (chart, s) => state.smoothing > 0 && chart.can_smooth && s.look === "line" && s.x.length > 2;

  // The raw curve stays, lightly, under the smoothed one.
  function traces(chart, s) {
    const raw = trace(chart, s);
    if (!isSmoothed(chart, s)) return [raw];
    return [{ ...raw, opacity: 0.25, line: { ...raw.line, width: 1 }, hoverinfo: "skip", hovertemplate: null },
      { ...raw, y: smoothed(s.y, state.smoothing), line: { ...raw.line, width: 2 } }];
  }

  function trace(chart, s) {
    const line = { color: seriesColor(chart, s), width: 1.6, dash: DASHES[Math.floor(s.color / 8) % 4] };
    const made = {
      type: "scatter", mode: "lines", name: literal(s.name), x: xOf(s), y: s.y, line, connectgaps: false,
      hovertemplate: `%{y:${chart.format}}${chart.suffix}<extra>${literal(s.name)}</extra>`,
    };
    if (s.rank !== null) made.opacity = 0.85;
    if (s.look === "points") Object.assign(made, { mode: "lines+markers", marker: { size: 6, color: line.color } });
    if (s.look === "faint") Object.assign(made, { opacity: 0.5, hoverinfo: "skip", hovertemplate: null, line: { ...line, dash: "dot", width: 1.2 } });
    if (s.look === "band") Object.assign(made, { opacity: 0.4, line: { ...line, width: 1 } });
    if (s.x.length === 1) made.mode = "markers";
    if (chart.stacked) Object.assign(made, { stackgroup: "all", line: { ...line, width: 0.5 } });
    return made;
  }

  function extraTraces(chart) {
    const found = [];
    if (chart.stars.length) {
      found.push({
        type: "scatter", mode: "markers", x: chart.stars.map((s) => s[0]), y: chart.stars.map((s) => s[1]),
        marker: { symbol: "star", size: 13, color: css("--good"), line: { color: css("--card"), width: 1 } },
        text: chart.stars.map((s) => literal(s[2])), hovertemplate: "%{text}<extra></extra>",
      });
    }
    if (chart.broken.length) {
      found.push({
        type: "scatter", mode: "markers", yaxis: "y2", x: chart.broken.map((b) => b[0]), y: chart.broken.map(() => 0.95),
        marker: { symbol: "x", size: 9, color: css("--bad") }, text: chart.broken.map((b) => literal(b[1])),
        hovertemplate: "%{text}<extra></extra>",
      });
    }
    return found;
  }

  // The y axis fits what is in sight, so that a stretch that was zoomed into fills its chart.
  function yRange(chart) {
    const [begin, end] = range(chart);
    const log = state.log.has(chart.id);
    let low = Infinity, high = -Infinity;
    const take = (value) => {
      if (value === null || !Number.isFinite(value) || (log && value <= 0)) return;
      low = Math.min(low, value); high = Math.max(high, value);
    };
    const drawn = visible(chart).filter((s) => s.look !== "faint"); // what was undone may leave the picture
    if (chart.stacked && drawn.length) {
      drawn[0].x.forEach((x, i) => { if (x >= begin && x <= end) take(drawn.reduce((sum, s) => sum + (s.y[i] ?? 0), 0)); });
    } else {
      for (const s of drawn) xOf(s).forEach((x, i) => { if (x >= begin && x <= end) take(s.y[i]); });
    }
    if (low > high) return null;
    if (log) [low, high] = [Math.log10(low), Math.log10(high)];
    const from_zero = chart.from_zero && !log && low >= 0;
    const pad = (high - (from_zero ? 0 : low)) * 0.07 || Math.abs(high) * 0.1 || 1;
    return [from_zero ? 0 : low - pad, high + pad];
  }

  function eventLines() {
    const lines = [];
    for (const group of state.marks) {
      if (!["restart", "guard", "failure"].includes(group.kind) || group.points.length > 60) continue;
      for (const point of group.points) {
        lines.push({ type: "line", x0: point.x, x1: point.x, y0: 0, y1: 1, yref: "paper", layer: "below",
          line: { color: css(EVENTS[group.kind][0]), width: 1, dash: "dot" } });
      }
    }
    return lines;
  }

  // A step is a whole number, so there is no tick between two of them.
  const ticks = (chart) => (over(chart) === "step" && range(chart)[1] - range(chart)[0] < 8 ? { dtick: 1 } : {});

  function axes() {
    return { gridcolor: css("--line"), linecolor: css("--strong-line"), zeroline: false, tickfont: { color: css("--soft"), size: 11.5 },
      automargin: false };
  }

  const titled = (text, standoff) => ({ title: { text: literal(text), standoff, font: { color: css("--soft"), size: 11.5 } } });

  function frame() {
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: "zoom", hovermode: "x unified", hoverdistance: -1,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--text") },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--strong-line"), font: { color: css("--text"), size: 12 }, namelength: 40 },
    };
  }

  function layoutOf(chart) {
    const y = yRange(chart);
    const log = state.log.has(chart.id);
    return {
      ...frame(), margin: { l: 68, r: 14, t: 8, b: 42 },
      xaxis: { ...axes(), ...ticks(chart), ...titled(axisTitle(chart), 6), range: range(chart), showgrid: false, hoverformat: ",.0f", tickformat: AXES[over(chart)].tick,
        unifiedhovertitle: { text: AXES[over(chart)].hover },
        spikecolor: css("--soft"), spikethickness: 1, spikedash: "dot" },
      yaxis: { ...axes(), ...titled(chart.axis, 8), fixedrange: true, exponentformat: "e", type: log ? "log" : "linear", ...(y ? { range: y } : {}), nticks: 6,
        ...(log ? { dtick: y && y[1] - y[0] < 1.3 ? "D2" : 1 } : {}), ...(chart.suffix.trim() === "tok/s" ? { tickformat: "~s" } : {}),
        ...(chart.format.endsWith("e") ? { tickformat: ".1~e" } : {}) },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: ["Learning", "Metrics"].includes(chart.group) ? eventLines() : [],
    };
  }

  // On paper nothing resizes: a chart is drawn as wide as its place there.
  const paper = (card) => (state.printing ? { width: card.plot.clientWidth, autosize: false } : {});
  const config = { displayModeBar: false, doubleClick: false, showTips: false };

  function drawChart(card) {
    const chart = card.chart;
    const drawn = [...visible(chart).flatMap((s) => traces(chart, s)), ...extraTraces(chart)];
    return Plotly.react(card.plot, drawn, { ...layoutOf(chart), ...paper(card) }, config);
  }

  function drawTimeline(card) {
    const rows = state.marks;
    const traces = rows.map((group, i) => ({
      type: "scatter", mode: "markers", x: group.points.map((p) => p.x), y: group.points.map(() => i),
      text: group.points.map((p) => literal(p.text)), hovertemplate: "%{text}<extra></extra>", hoverlabel: { align: "left" },
      marker: { size: 9, symbol: EVENTS[group.kind][1], color: css(EVENTS[group.kind][0]), line: { width: group.kind === "notice" ? 1 : 0 } },
    }));
    const layout = {
      ...frame(), ...paper(card), hovermode: "closest", hoverdistance: 20, margin: { l: 90, r: 14, t: 4, b: 40 },
      xaxis: { ...axes(), ...ticks(), ...titled(state.stepTitle, 6), range: range(), showgrid: false, tickformat: ",~r" },
      yaxis: { ...axes(), fixedrange: true, range: [rows.length - 0.5, -0.5], tickvals: rows.map((_, i) => i), ticktext: rows.map((g) => g.name) },
    };
    return Plotly.react(card.plot, traces, layout, config);
  }

  function draw(card) {
    if (!card.inSight) { card.dirty = true; return; }
    card.dirty = false;
    card.draw(card);
    if (!card.listening) {
      card.listening = true;
      card.plot.on("plotly_relayout", (change) => {
        if (change["xaxis.range[0]"] !== undefined) setRange([change["xaxis.range[0]"], change["xaxis.range[1]"]], card.chart);
      });
      card.plot.on("plotly_doubleclick", () => { setRange(null, card.chart); return false; });
    }
  }

  let waiting = null;
  function redraw() {
    if (waiting !== null) return;
    waiting = requestAnimationFrame(() => { waiting = null; for (const card of cards.values()) draw(card); });
  }

  function rangeText([begin, end], axis) {
    const say = (x) => x.toLocaleString("en", { maximumFractionDigits: axis === "hours" || axis === "minutes" ? 2 : 0 });
    return `${AXES[axis].label} ${say(Math.max(0, begin))} – ${say(end)}`;
  }

  // The buttons are for the charts over steps; where a script has none, for those over time.
  const leading = () => state.charts.find((c) => c.over === "step") ?? state.charts[0];

  function setRange(wanted, chart = leading()) {
    const axis = over(chart), full = state.last[family(chart)];
    if (wanted) {
      const least = axis === "hours" || axis === "minutes" ? full / 10000 : 1;
      const width = Math.max(least, Math.min(wanted[1] - wanted[0], full));
      const begin = Math.max(0, Math.min(wanted[0], full - width));
      wanted = width >= full ? null : [begin, begin + width];
    }
    state.ranges[family(chart)] = wanted;
    showRange();
    redraw();
  }

  function showRange() {
    const chart = leading(), wanted = state.ranges[family(chart)];
    document.querySelectorAll("[data-range]").forEach((e) => { e.textContent = wanted ? rangeText(wanted, over(chart)) : `all ${AXES[over(chart)].label}`; });
  }

  function zoom(factor, shift) {
    const [begin, end] = range(leading());
    const middle = (begin + end) / 2 + shift * (end - begin);
    const half = ((end - begin) * factor) / 2;
    setRange([middle - half, middle + half]);
  }

  const sight = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const card = [...cards.values()].find((c) => c.place === entry.target);
      if (!card) continue;
      card.inSight = entry.isIntersecting;
      if (card.inSight && card.dirty) draw(card);
    }
  }, { rootMargin: "800px" });

  // A card can change its width without the window doing so: when a chart beside it appears.
  const sizes = new ResizeObserver((entries) => {
    for (const entry of entries) {
      if (entry.target.querySelector(".main-svg")) Plotly.Plots.resize(entry.target);
    }
  });

  function register(key, place, plot, drawing) {
    const card = { place, plot, draw: drawing, inSight: false, dirty: true, listening: false, chart: null };
    cards.set(key, card);
    sight.observe(place);
    sizes.observe(plot);
    return card;
  }

  function legendOf(chart) {
    const named = chart.series.filter((s) => !state.chips.has(s.name) && s.look !== "faint");
    if (named.length < 2) return null;
    return named.map((s) => {
      const swatch = element("i", { class: chart.stacked ? "swatch box" : "swatch" });
      swatch.style.background = `var(--c${(chart.stacked && s.name === "other" ? 7 : s.color) % 8})`;
      if (s.look === "band") swatch.style.opacity = "0.4";
      return element("span", {}, swatch, s.name);
    });
  }

  function cardFor(chart) {
    const title = element("h3", {}, chart.title);
    const legend = element("div", { class: "legend" });
    const latest = element("span", { class: "latest" });
    const top = element("div", { class: "top" }, title, legend, latest);
    if (chart.can_log) {
      const button = element("button", { class: "small", "aria-pressed": "false", title: "Logarithmic axis", "data-log": chart.id }, "log");
      button.addEventListener("click", () => {
        const on = !state.log.has(chart.id);
        on ? state.log.add(chart.id) : state.log.delete(chart.id);
        button.setAttribute("aria-pressed", String(on));
        redraw();
      });
      top.append(button);
    }
    top.append(element("button", { class: "small", title: `Download ${chart.title} as CSV`, "data-csv": chart.id,
      onclick: () => download(`${chart.id}.csv`, [cards.get(chart.id).chart]) }, "CSV"));
    const plot = element("div", { class: "plot", role: "img", "aria-label": `${chart.title}. ${chart.about}` });
    const note = element("p", { class: "note" });
    const place = element("section", { class: "card figure", id: `chart-${chart.id}` }, top, plot, note);
    const card = register(chart.id, place, plot, drawChart);
    return Object.assign(card, { legend, latest, note });
  }

  // Long form: one point a line, so that curves of other steps need no empty cells.
  function csvOf(charts) {
    const cell = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
    const lines = charts.flatMap((chart) => chart.series.flatMap((s) =>
      s.x.map((x, i) => [chart.title, s.name, x, s.y[i] ?? "", chart.suffix.trim()].map(cell).join(","))));
    const counted = new Set(charts.map((chart) => chart.over));
    return [`chart,curve,${counted.size === 1 ? charts[0].over : "x"},value,unit`, ...lines].join("\n") + "\n";
  }

  function download(name, charts) {
    const address = URL.createObjectURL(new Blob([csvOf(charts)], { type: "text/csv" }));
    element("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  function smoothingSlider() {
    const shown = element("output", {}, "off");
    const slider = element("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: "0", "aria-label": "Smoothing",
      title: "Exponential moving average of losses and rates", "data-smoothing": true });
    slider.addEventListener("input", () => {
      state.smoothing = Number(slider.value);
      shown.textContent = state.smoothing ? state.smoothing.toFixed(2) : "off";
      redraw();
    });
    return element("label", { class: "smoothing note" }, "smoothing", slider, shown);
  }

  function measure() {
    const ends = (of) => state.charts.filter((c) => family(c) === of).flatMap((c) => c.series.map((s) => (of === "step" ? xOf(s) : s.x).at(-1) ?? 0));
    state.last.step = Math.max(state.axis === "hours" ? 0.001 : 1, ...ends("step"), ...state.marks.flatMap((g) => g.points.map((p) => p.x)));
    state.last.time = Math.max(0.001, ...ends("time"));
  }

  function axisButtons(names) {
    const buttons = names.map((axis) => [axis, AXES[axis]]).map(([axis, { label }]) => {
      const button = element("button", { class: "small", "aria-pressed": String(axis === state.axis), "data-axis": axis }, label);
      button.addEventListener("click", () => {
        state.axis = axis;
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
        measure();
        setRange(null);
      });
      return button;
    });
    return element("span", { class: "choice", role: "group", "aria-label": "What the charts run over" }, buttons);
  }

  // Charts that stay keep their place and their element; only groups that are new are added.
  function show(place, charts, marks, axes) {
    state.marks = marks ?? [];
    state.axes = axes ?? [];
    state.charts = charts;
    measure();
    showRange();
    for (const chart of charts) {
      const card = cards.get(chart.id) ?? cardFor(chart);
      card.chart = chart;
      const names = JSON.stringify(chart.series.map((s) => s.name));
      if (card.names !== names) card.legend.replaceChildren(...(legendOf(chart) ?? []));
      card.names = names;
      card.latest.textContent = chart.latest;
      card.note.textContent = [chart.about, chart.note].filter(Boolean).join(" ");
      if (!card.place.isConnected) insert(groupOf(place, chart.group), card.place, charts.map((c) => `chart-${c.id}`));
    }
    redraw();
  }

  // In the order of the charts, also when one comes later than those behind it (the first evaluation, say).
  function insert(grid, card, order) {
    const behind = [...grid.children].find((other) => order.indexOf(other.id) > order.indexOf(card.id));
    grid.insertBefore(card, behind ?? null);
  }

  function groupOf(place, name) {
    const id = `group-${name.toLowerCase()}`;
    let found = place.querySelector(`#${id} > .grid`);
    if (!found) {
      found = element("div", { class: "grid" });
      place.append(element("div", { id }, element("h2", {}, name), found));
    }
    return found;
  }

  function timeline(place) {
    if (!state.marks.length) { return; }
    let card = cards.get("timeline");
    if (!card) {
      const plot = element("div", { class: "plot", role: "img", "aria-label": "What happened at which step" });
      const section = element("section", { class: "card figure timeline", id: "chart-timeline" }, element("h3", {}, "Timeline"), plot);
      place.append(section);
      card = register("timeline", section, plot, drawTimeline);
    }
    card.plot.style.height = `${48 + 24 * state.marks.length}px`;
    draw(card);
  }

  // Curves that many charts share (ranks, or runs) have one switch for all of them.
  function tools(names, axes) {
    state.chips = new Set(names);
    const chips = names.map((name, i) => {
      const swatch = element("i", { class: "swatch" });
      swatch.style.background = `var(--c${i % 8})`;
      const chip = element("button", { class: "chip", "aria-pressed": "true", "data-key": `chip-${name}` }, swatch, name);
      chip.addEventListener("click", () => {
        const hide = !state.hidden.has(name);
        hide ? state.hidden.add(name) : state.hidden.delete(name);
        chip.setAttribute("aria-pressed", String(!hide));
        redraw();
      });
      return chip;
    });
    const button = (label, title, act) => element("button", { class: "small", title, "aria-label": title, onclick: act }, label);
    return element("div", { class: "tools", role: "toolbar", "aria-label": "All charts" }, chips, element("span", { class: "gap" }),
      smoothingSlider(), axes ? axisButtons(axes) : null,
      element("span", { class: "note", "data-range": true, role: "status" }, "all steps"),
      button("←", "Earlier steps", () => zoom(1, -0.5)), button("→", "Later steps", () => zoom(1, 0.5)),
      button("+", "Zoom in", () => zoom(0.5, 0)), button("−", "Zoom out", () => zoom(2, 0)),
      button("All", "Show all steps", () => { state.ranges.time = null; setRange(null); }),
      button("CSV", "Download all curves as CSV", () => download("curves.csv", state.charts)));
  }

  onTheme(redraw);
  // Every chart is drawn, in the colours and the width of paper; the screen gets its own back.
  let screenTheme = null;
  window.addEventListener("beforeprint", () => {
    const root = document.documentElement;
    screenTheme ??= root.dataset.theme;
    Object.assign(root.dataset, { theme: "light", printing: "" });
    state.printing = true;
    for (const card of cards.values()) { card.inSight = true; draw(card); }
  });
  window.addEventListener("afterprint", () => {
    document.documentElement.dataset.theme = screenTheme;
    delete document.documentElement.dataset.printing;
    state.printing = false;
    screenTheme = null;
    redraw();
  });
  Object.assign(window.shardtune, { showCharts: show, showTimeline: timeline, chartTools: tools, chartState: state });
})();
