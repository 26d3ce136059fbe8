// How does a conversation go on in the page? Both sides answer the same question, each with its own history.
"use strict";
(() => {
  const { element, header } = window.shardtune;
  const SIDES = ["base", "tuned"];
  const state = { about: null, turns: [], running: null };
  const at = {};

  const number = (input) => (input.value.trim() === "" ? null : Number(input.value));

  function field(label, input, hint) {
    return element("label", { class: "field" }, element("span", {}, label), input, hint ? element("small", {}, hint) : null);
  }

  function settings(about) {
    const given = about.settings;
    const input = (name, attributes) => (at[name] = element("input", { type: "number", id: name, ...attributes }));
    at.system = element("textarea", { id: "system", rows: "2", placeholder: about.default_system || "none" });
    at.system.value = given.system;
    const temperature = input("temperature", { min: "0", max: "10", step: "0.1", value: String(given.temperature) });
    const topP = input("top_p", { min: "0", max: "1", step: "0.05", placeholder: "1", value: given.top_p === null ? null : String(given.top_p) });
    const seed = input("seed", { min: "0", step: "1", placeholder: "random", value: given.seed === null ? null : String(given.seed) });
    const longest = input("max_new_tokens", { min: "1", step: "1", placeholder: String(about.default_new_tokens), value: given.max_new_tokens === null ? null : String(given.max_new_tokens) });
    at.withBase = element("input", { type: "checkbox", id: "with-base", checked: true });
    const draws = () => { const greedy = !(Number(temperature.value) > 0); topP.disabled = seed.disabled = greedy; };
    temperature.addEventListener("input", draws);
    draws();
    return element("details", { class: "card settings", open: window.innerWidth > 900 }, element("summary", {}, "Settings"),
      element("div", { class: "inside" },
        about.takes_system ? field("System prompt", at.system) : element("p", { class: "note" }, "No system prompt: training had no place for one."),
        element("div", { class: "numbers" }, field("Temperature", temperature, "0: the likeliest token"), field("Top-p", topP), field("Seed", seed),
          field("New tokens, at most", longest)),
        element("label", { class: "check" }, at.withBase, "Ask the base model too")));
  }

  function facts(about) {
    const pairs = [["Adapter", about.adapter], ["Base", about.base], ["Asked with", about.asked], ["Computed on", about.computed]];
    return element("details", { class: "card", id: "about" }, element("summary", {}, "How this model is asked"),
      element("div", { class: "inside" }, element("dl", { class: "facts" },
        pairs.map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]))));
  }

  function composer(about) {
    const several = about.columns.length > 1;
    at.question = element("textarea", {
      id: "question", rows: "1", "aria-label": "Question",
      placeholder: several ? `JSON: ${JSON.stringify(Object.fromEntries(about.columns.map((name) => [name, "…"])))}`
        : about.kind === "text" ? "A text to continue" : "Ask something",
    });
    at.send = element("button", { class: "primary", type: "submit" }, "Send");
    at.stop = element("button", { type: "button", hidden: true, id: "stop" }, "Stop");
    at.reset = element("button", { type: "button", id: "reset" }, about.has_turns ? "New conversation" : "Clear");
    const form = element("form", { class: "composer" }, element("div", { class: "inner" }, at.question,
      element("div", { class: "buttons" }, at.send, at.stop, at.reset)));
    form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
    at.question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
    });
    at.question.addEventListener("input", grow);
    at.stop.addEventListener("click", () => state.running?.abort());
    at.reset.addEventListener("click", () => { state.running?.abort(); state.turns = []; draw(); at.question.focus(); });
    return form;
  }

  function grow() {
    at.question.style.height = "auto";
    at.question.style.height = `${Math.min(at.question.scrollHeight + 2, 220)}px`;
  }

  function card(turn, side) {
    const text = element("div", { class: "said", tabindex: "0" });
    const foot = element("p", { class: "note", role: "status" });
    turn.places[side] = { text, foot };
    return element("article", { class: `answer ${side}`, "aria-label": `${side} model` }, element("h3", {}, side === "tuned" ? "Tuned" : "Base"), text, foot);
  }

  function show(turn, side) {
    const place = turn.places[side], answer = turn.answers[side];
    const end = answer.ended === null && turn.live ? (answer.text ? "" : "…") : ended(answer, turn);
    place.text.textContent = answer.text;
    place.text.classList.toggle("growing", turn.live && answer.ended === null);
    place.text.classList.toggle("nothing", !answer.text && !turn.live);
    place.foot.textContent = end;
    place.foot.classList.toggle("bad", Boolean(turn.problem));
  }

  function ended(answer, turn) {
    if (answer.ended === null) return turn.problem ?? "stopped";
    const tokens = `${answer.tokens} ${answer.tokens === 1 ? "token" : "tokens"}`;
    if (answer.ended === "length") return `cut at ${answer.limit} new tokens`;
    return answer.ended === "stopped" ? `${tokens}, stopped` : answer.tokens ? tokens : "ended at once, without an answer";
  }

  function addTurn(turn) {
    turn.places = {};
    const sides = SIDES.filter((side) => turn.answers[side]);
    at.empty?.remove();
    const sampled = turn.sampling = element("p", { class: "note sampling" });
    at.log.append(element("section", { class: "turn" }, element("div", { class: "question" }, element("p", { class: "asked" }, turn.question)),
      element("div", { class: sides.length > 1 ? "sides two" : "sides" }, sides.map((side) => card(turn, side))), sampled));
    for (const side of sides) show(turn, side);
  }

  function draw() {
    const { about } = state;
    const hint = about.has_turns ? "Both models answer, each with its own conversation." : "Each question stands alone: training had no conversations.";
    at.empty = element("p", { class: "empty" }, hint);
    at.log.replaceChildren(at.empty);
    for (const turn of state.turns) addTurn(turn);
  }

  function conversation(side, question) {
    const said = [];
    if (state.about.has_turns) {
      for (const turn of state.turns) {
        const answer = turn.answers[side];
        // An answer that never began is as if nothing was asked.
        if (answer && (answer.text || answer.ended === "end")) {
          said.push({ role: "user", content: turn.question }, { role: "assistant", content: answer.text });
        }
      }
    }
    return [...said, { role: "user", content: question }];
  }

  function request(question, sides) {
    const draws = Number(at.temperature.value) > 0;
    const system = state.about.takes_system ? at.system.value.trim() : "";
    return {
      conversations: Object.fromEntries(sides.map((side) => [side, conversation(side, question)])),
      system: system || null, temperature: Number(at.temperature.value), top_p: draws ? number(at.top_p) : null,
      seed: draws ? number(at.seed) : null, max_new_tokens: number(at.max_new_tokens),
    };
  }

  function busy(is) {
    const focused = document.activeElement;
    at.send.hidden = is;
    at.stop.hidden = !is;
    if (focused === at.send) at.stop.focus();  // a button that is hidden takes the focus away with it
    if (focused === at.stop) at.question.focus();
  }

  function follow() {
    const bottom = document.documentElement.scrollHeight - window.innerHeight - window.scrollY;
    return bottom < 160;
  }

  function take(line, turn) {
    const atEnd = follow();
    if (line.error) turn.problem = line.error;
    else if (line.sampling) turn.sampling.textContent = line.sampling.startsWith("greedy") ? "" : line.sampling;
    else if (line.text !== undefined) turn.answers[line.side].text += line.text;
    else Object.assign(turn.answers[line.side], { ended: line.ended, tokens: line.tokens, limit: line.limit });
    if (line.side) show(turn, line.side);
    if (atEnd) window.scrollTo({ top: document.documentElement.scrollHeight });
  }

  async function read(answer, turn) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) take(JSON.parse(line), turn);
    }
  }

  async function ask() {
    const written = at.question.value;
    if (!written.trim() || state.running) return;
    const question = state.about.kind === "text" ? written : written.trim();  // a text is continued to the character
    const sides = SIDES.filter((side) => side === "tuned" || at.withBase.checked);
    const body = JSON.stringify(request(question, sides));
    const turn = { question, live: true, answers: Object.fromEntries(sides.map((side) => [side, { text: "", ended: null, tokens: 0 }])) };
    const stop = (state.running = new AbortController());
    addTurn(turn);
    state.turns.push(turn);
    at.question.value = "";
    grow();
    busy(true);
    window.scrollTo({ top: document.documentElement.scrollHeight });
    try {
      const answer = await fetch("/api/answer", { method: "POST", headers: { "Content-Type": "application/json" }, body, signal: stop.signal });
      if (answer.ok) await read(answer, turn);
      else turn.problem = answer.headers.get("Content-Type")?.includes("json") ? (await answer.json()).error : await answer.text();
      if (answer.ok && sides.some((side) => turn.answers[side].ended === null)) turn.problem ??= "the answer broke off";
    } catch (error) {
      if (error.name !== "AbortError") turn.problem = "no response: is `shardtune chat` still running?";
    }
    turn.live = false;
    state.running = null;
    for (const side of sides) show(turn, side);
    busy(false);
    if (turn.problem && sides.every((side) => !turn.answers[side].text)) {
      at.question.value = at.question.value || question;  // nothing was answered: it can be sent again
      grow();
    }
  }

  async function begin() {
    const answer = await fetch("/api/model");
    if (!answer.ok) { document.body.append(element("p", { class: "empty" }, await answer.text())); return; }
    const about = (state.about = await answer.json());
    const main = element("main", { class: "chat" });
    at.log = element("div", { class: "log", role: "log", "aria-live": "polite", "aria-label": "Conversation" });
    main.append(element("h1", {}, about.name), element("p", { class: "lead" }, about.adapter),
      about.notes.length ? element("ul", { class: "notes" }, about.notes.map((text) => element("li", {}, text))) : "",
      element("div", { class: "panels" }, settings(about), facts(about)), at.log);
    document.body.replaceChildren(header(about.name), main, composer(about));
    draw();
    at.question.focus();
  }

  document.addEventListener("DOMContentLoaded", begin);
})();
