// Behaviour of pages besides links and forms: live values, the theme, and a shortcut for the search.
(() => {
  "use strict";
  const root = document.documentElement;
  const news = document.getElementById("news");
  const query = (selector) => document.querySelector(selector);

  // Theme -------------------------------------------------------------------------------------
  const THEMES = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  const label = () => { button.textContent = `Theme: ${root.dataset.theme || "auto"}`; };
  button.addEventListener("click", () => {
    const theme = THEMES[(THEMES.indexOf(root.dataset.theme || "auto") + 1) % THEMES.length];
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    try { localStorage.setItem("taskqueue-theme", theme); } catch { /* storage is forbidden: the choice is not saved */ }
    label();
    Charts.make();
  });
  label();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Charts.make());

  // Keys --------------------------------------------------------------------------------------
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, select, textarea, [contenteditable]");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const search = document.getElementById("q");
    if (!search) return;
    event.preventDefault();
    search.focus();
    search.select();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches("[type=checkbox]")) event.preventDefault();
  });
  document.addEventListener("change", (event) => {
    if (event.target.id !== "all-of-them") return;
    for (const box of document.querySelectorAll("#letters [name=ids]")) box.checked = event.target.checked;
  });

  // Live --------------------------------------------------------------------------------------
  const url = document.body.dataset.liveUrl;
  const texts = new Map();
  let shape = document.getElementById("main").dataset.shape;
  let source = null;
  let again = 0;
  let first = true;
  let refreshing = false;

  function connection(state, text) {
    const badge = document.getElementById("connection");
    if (!badge || badge.dataset.state === state) return;
    const before = badge.dataset.state;
    badge.dataset.state = state;
    badge.querySelector("b").textContent = text;
    if (before !== "idle" || state === "off") news.textContent = text;
  }

  function put(scope) {
    for (const element of scope.querySelectorAll("[data-live]")) {
      const text = texts.get(element.dataset.live);
      if (text !== undefined && element.textContent !== text) element.textContent = text;
      const state = texts.get(`@${element.dataset.live}`);
      if (state !== undefined && element.dataset.state !== state) {
        element.dataset.state = state;
        if (element.dataset.live === "balance") news.textContent = text;
      }
    }
    for (const line of scope.querySelectorAll("[data-line]")) {
      const path = texts.get(`~${line.dataset.line}`);
      if (path !== undefined) line.setAttribute("d", path);
    }
  }

  function onSample(event) {
    const sample = JSON.parse(event.data);
    connection("live", "Live");
    for (const [name, text] of Object.entries(sample.texts)) texts.set(name, text);
    put(document);
    const ledger = document.getElementById("ledger");
    if (ledger) {
      for (const [name, number] of Object.entries(sample.ledger)) ledger.setAttribute(`data-ledger-${name.replace("_", "-")}`, number);
      ledger.dataset.sample = sample.sample;
    }
    Charts.add(sample.rows, first);
    first = false;
    if (sample.shape !== shape) refresh(sample.shape);
  }

  // When the shape of the page has changed, reload the sections marked data-refresh and restore the focus.
  async function refresh(wanted) {
    const changed = document.getElementById("changed");
    if (changed) changed.hidden = false;
    if (refreshing) return;
    refreshing = true;
    try {
      const parts = [...document.querySelectorAll("[data-refresh]")];
      if (!parts.length) shape = wanted;
      if (!parts.length || query("[data-refresh] details[open], [data-refresh] [type=search]:focus")) return;
      const response = await fetch(location.href, { headers: { accept: "text/html" } });
      if (response.redirected || !response.headers.get("content-type")?.startsWith("text/html")) return;
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      shape = page.getElementById("main").dataset.shape || wanted;
      for (const part of parts) {
        const fresh = page.getElementById(part.id);
        if (!fresh) continue;
        const focused = part.contains(document.activeElement) ? document.activeElement : null;
        const index = focused && [...part.querySelectorAll("a, button, input, [tabindex]")].indexOf(focused);
        const left = part.querySelector(".scroll")?.scrollLeft || 0;
        part.replaceWith(fresh);
        htmx.process(fresh);
        if (fresh.querySelector(".scroll")) fresh.querySelector(".scroll").scrollLeft = left;
        if (focused) (focused.id && document.getElementById(focused.id) || fresh.querySelectorAll("a, button, input, [tabindex]")[index])?.focus();
      }
    } catch { /* the next sample tries again */ } finally { refreshing = false; }
  }

  // A list of tasks with a filter may end before the page is full: read on.
  async function readOn() {
    const more = query("#tasks [data-more]");
    if (!more) return;
    try {
      const response = await fetch(more.dataset.more, { headers: { accept: "text/html" } });
      if (!response.ok || response.redirected || !more.isConnected) return;
      const next = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("tasks");
      const table = query("#tasks tbody");
      if (table) {
        table.append(...next.querySelectorAll("tbody tr"));
        more.replaceWith(next.querySelector("#more"));
      } else {
        document.getElementById("tasks").replaceWith(next);
        htmx.process(next);
      }
    } catch { return; /* the link to the next page is still there */ }
    readOn();
  }

  function open() {
    if (!url || source || document.hidden) return;
    first = true;
    source = new EventSource(url);
    source.addEventListener("sample", onSample);
    source.addEventListener("bye", (event) => {
      close();
      if (JSON.parse(event.data).reason === "signed-out") location.reload(); else retry();
    });
    source.onerror = () => { close(); retry(); };
  }
  function close() {
    source?.close();
    source = null;
  }
  function retry() {
    connection("off", "Not live: reconnecting");
    clearTimeout(again);
    again = setTimeout(open, 2000);
  }
  // A hidden page closes its connection, because browsers limit the connections per server.
  document.addEventListener("visibilitychange", () => { if (document.hidden) close(); else open(); });
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  addEventListener("resize", () => Charts.fit());

  // After an action htmx replaces the main element.
  document.body.addEventListener("htmx:afterSettle", () => {
    const said = document.getElementById("said");
    const wrong = query("#main [role=alert]");
    news.textContent = (wrong || said)?.textContent || "";
    shape = document.getElementById("main").dataset.shape || shape;
    put(document);
    Charts.make();
    const first = query("#main [aria-invalid=true], #said[tabindex]");
    if (first) first.focus();
    else if (document.activeElement === document.body) document.getElementById("main").focus();
    readOn();
  });
  open();
  readOn();
})();
