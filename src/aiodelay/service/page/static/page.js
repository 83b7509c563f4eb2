// Improvements of the page by script. The page also works without this script.
"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  root.classList.add("js");

  // --- times are in UTC; a tooltip shows the viewer's local time --------------------------------------------
  const zoned = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });
  function explain(within) {
    for (const each of all("time[datetime]", within)) each.title = zoned.format(new Date(each.dateTime));
  }

  // --- tick boxes of rows, and the number to type before a confirmation -----------------------------------
  function selected(form) {
    const boxes = all("tbody input[type=checkbox]", form);
    const ticked = boxes.filter((box) => box.checked).length;
    const everything = form.querySelector("[data-all-matching]")?.checked ?? false;
    const told = form.querySelector("[data-selected]");
    if (told) told.textContent = everything ? "" : `${ticked} of ${boxes.length} ticked`;
    for (const button of all("button[name=action]", form)) button.disabled = !ticked && !everything;
    const head = form.querySelector("[data-all]");
    if (head) {
      head.checked = ticked > 0 && ticked === boxes.length;
      head.indeterminate = ticked > 0 && ticked < boxes.length;
    }
  }
  function typed(field) {
    const button = field.form.querySelector("button");
    button.disabled = field.value.trim() !== field.dataset.typed;
  }
  document.addEventListener("change", (event) => {
    const target = event.target;
    const form = target.closest("[data-selects]");
    if (target.matches("[data-submits]")) target.form.requestSubmit();
    if (!form) return;
    if (target.matches("[data-all]")) {
      for (const box of all("tbody input[type=checkbox]", form)) box.checked = target.checked;
    }
    selected(form);
  });
  document.addEventListener("input", (event) => {
    if (event.target.matches("[data-typed]")) typed(event.target);
  });

  // --- URLs without empty fields --------------------------------------------------------------------------
  document.addEventListener("submit", (event) => {
    if (!event.target.matches("[data-clean]")) return;
    const fields = all("input, select", event.target).filter((field) => field.name && !field.value);
    for (const field of fields) field.disabled = true;
    setTimeout(() => fields.forEach((field) => (field.disabled = false)));
  });
  document.addEventListener("htmx:config:request", (event) => {
    const { ctx } = event.detail;
    if (!ctx.sourceElement?.matches?.("[data-clean]")) return;
    for (const [name, value] of [...(ctx.request.body?.entries?.() ?? [])]) if (!value) ctx.request.body.delete(name);
  });

  // --- copy -----------------------------------------------------------------------------------------------
  async function copy(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const field = document.createElement("textarea"); // browsers offer no clipboard over plain HTTP
    field.value = text;
    field.className = "hidden";
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    await copy(button.dataset.copy);
    button.textContent = "Copied";
    announce("Copied");
  });

  // --- keys -----------------------------------------------------------------------------------------------
  const screens = { o: 0, m: 1, r: 2, d: 3, s: 4, i: 5, c: 6 };
  let waits = 0;
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, select, textarea");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") {
      const search = document.querySelector("[data-search]");
      if (search) search.focus();
      else all(".tabs li")[1]?.querySelector("a")?.click();
      event.preventDefault();
    } else if (event.key === "g") {
      waits = Date.now() + 1500;
    } else if (Date.now() < waits && event.key in screens) {
      all(".tabs li")[screens[event.key]]?.querySelector("a")?.click();
    }
  });

  // --- announcements for screen readers --------------------------------------------------------------------
  function announce(text) {
    const place = document.getElementById("announce");
    if (place && text && place.textContent !== text) place.textContent = text;
  }

  // --- the age of the data: the service sends data every 2 s, or reports that the store fails -----------------
  const OLD_MS = 5000, SILENT_MS = 15000;
  const STATES = ["live", "old", "gone"];
  let follows = false, isGone = false, heard = 0, fresh = 0, shownState = "";
  function stateNow() {
    const now = performance.now();
    if (!follows) return "";
    if (isGone || now - heard > SILENT_MS) return "gone";
    return now - fresh > OLD_MS ? "old" : "live";
  }
  function live() {
    const strip = document.getElementById("strip");
    if (!strip) return;
    const state = stateNow();
    for (const each of STATES) strip.classList.toggle(`is-${each}`, each === state);
    const seconds = Math.floor((performance.now() - fresh) / 1000);
    const words = { live: "live,", old: `${seconds} s old, as of`, gone: "the service does not answer; as of" };
    for (const each of all("[data-live-word]")) each.textContent = words[state] ?? "as of";
    if (state !== shownState && (state === "old" || state === "gone")) announce(words[state].replace(/[;,] as of$/, ""));
    shownState = state;
  }
  document.addEventListener("htmx:sse:after:message", () => {
    follows = true;
    isGone = false;
    heard = performance.now();
    if (!document.getElementById("trouble")?.textContent) fresh = heard;
    live();
  });
  document.addEventListener("htmx:sse:error", (event) => {
    if (event.detail.status === 401) location.reload(); // the session has ended: the service asks for the token
    isGone = true;
    live();
  });
  function unfollow() {
    follows = false;
    live();
  }
  document.addEventListener("htmx:sse:close", unfollow);
  document.addEventListener("visibilitychange", () => document.hidden && unfollow());
  setInterval(live, 1000);
  document.addEventListener("htmx:after:swap", (event) => {
    refresh();
    const target = event.target;
    if (target instanceof Element && !target.closest("#follow")) {
      announce(document.querySelector("[data-announce]")?.textContent);
    }
  });

  function refresh() {
    explain(document);
    all("[data-selects]").forEach(selected);
    all("[data-typed]").forEach(typed);
    live();
  }
  document.querySelector(".tabs [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
  refresh();
})();
