// What the page can do better with a script. All of it works without one.
"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  root.classList.add("js");

  // --- instants: in UTC, and in the viewer's zone for who points at them ------------------------------------
  const zoned = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });
  function explain(within) {
    for (const each of all("time[datetime]", within)) each.title = zoned.format(new Date(each.dateTime));
  }

  // --- ticking rows, and the number that is typed ---------------------------------------------------------
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
    const field = document.createElement("textarea"); // over plain HTTP there is no clipboard
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

  // --- what is told to those who do not see it -------------------------------------------------------------
  function announce(text) {
    const place = document.getElementById("announce");
    if (place && text) place.textContent = text;
  }
  function live(isLive) {
    document.getElementById("strip")?.classList.toggle("is-live", isLive);
    for (const each of all("[data-live-word]")) each.textContent = isLive ? "live," : "as of";
  }
  let isLive = false;
  document.addEventListener("htmx:sse:after:message", () => live((isLive = true)));
  for (const name of ["htmx:sse:close", "htmx:sse:error", "htmx:sse:before:connection"]) {
    document.addEventListener(name, () => live((isLive = false)));
  }
  document.addEventListener("visibilitychange", () => document.hidden && live((isLive = false)));
  document.addEventListener("htmx:after:swap", (event) => {
    refresh();
    const target = event.target;
    if (target instanceof Element && !target.closest("#follow")) {
      announce(document.querySelector("#results [data-announce]")?.textContent);
    }
  });

  function refresh() {
    explain(document);
    all("[data-selects]").forEach(selected);
    all("[data-typed]").forEach(typed);
    live(isLive);
  }
  document.querySelector(".tabs [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
  refresh();
})();
