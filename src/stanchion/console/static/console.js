/* The console's script: live updates, keyboard, confirmations. Pages work read-only without it. */
"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const body = document.body;

  // ── Times: relative to now, the exact one on hover, in the viewer's zone ──
  const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const span = (seconds) => {
    for (const [unit, name] of units) {
      const count = seconds / unit;
      if (count >= 1) return Math.floor(count) + " " + name;
    }
    return "0 s";
  };
  const times = (root = document) => {
    const now = Date.now();
    for (const each of $$("time[datetime]", root)) {
      const at = Date.parse(each.dateTime);
      const title = exact.format(at);
      if (each.title !== title) each.title = title;
      if (each.hasAttribute("data-exact")) continue;
      const past = (now - at) / 1000;
      const text = past >= 0 ? (past < 1 ? "now" : span(past) + " ago") : "in " + span(-past);
      if (each.textContent !== text) each.textContent = text;
    }
  };
  times();
  setInterval(() => { if (!document.hidden) times(); }, 5000);

  // ── What was done is said once: a reload does not say it again ──
  const address = new URL(location.href);
  if (address.searchParams.has("did")) {
    for (const name of ["did", "count", "of"]) address.searchParams.delete(name);
    history.replaceState(null, "", address);
  }

  // ── The banner ──
  const banner = $("#banner");
  let said = null;
  const alarm = (each) => {
    const line = document.createElement("p");
    line.className = "alarm " + (each.level === "bad" ? "bad" : "warn");
    const text = document.createElement("span");
    text.textContent = each.text;
    line.append(text);
    if (each.since) {
      const small = document.createElement("small"), time = document.createElement("time");
      time.dateTime = new Date(each.since).toISOString();
      small.append("first seen ", time);
      line.append(" ", small);
    }
    if (each.href) {
      const link = document.createElement("a");
      link.href = each.href;
      link.textContent = "Look";
      line.append(" ", link);
    }
    return line;
  };
  const showAlarms = (alarms) => {
    const key = JSON.stringify(alarms);
    if (key === said) return;
    said = key;
    banner.replaceChildren(...alarms.map(alarm));
    times(banner);
  };

  // ── Fetching the page again, without disturbing who reads it ──
  let isStale = false, isFetching = false, fetchedAt = performance.now(), changedAt = -Infinity;
  const isBusy = () => {
    const live = $("#live"), focused = document.activeElement, selection = getSelection();
    if ($("dialog[open]")) return true;
    if (focused && live?.contains(focused) && focused.matches("input:not([type=checkbox]), select, textarea")) return true;
    if ($$("#live form[data-dirty]").length) return true;
    return selection && !selection.isCollapsed && live?.contains(selection.anchorNode);
  };
  const refresh = async () => {
    if (!body.hasAttribute("data-refresh") || document.hidden || isFetching || isBusy()) return;
    if (performance.now() - fetchedAt < 1000) return;
    // The answer may have been rendered for another viewer up to a second ago, before the change.
    const isDoubtful = performance.now() - changedAt < 1000;
    isStale = false;
    isFetching = true;
    try {
      await htmx.ajax("GET", location.pathname + location.search, { target: "#live", source: "#live", swap: "outerMorph" });
    } catch { isStale = true; } finally {
      isFetching = false;
      fetchedAt = performance.now();
      if (isDoubtful) { changedAt = -Infinity; isStale = true; }
    }
  };
  setInterval(() => { if (isStale) refresh(); }, 500);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { isStale = true; times(); } });
  document.addEventListener("input", (event) => {
    const form = event.target.form;
    if (form && form.method === "post" && event.target.type !== "checkbox") form.toggleAttribute("data-dirty", true);
  });
  document.addEventListener("htmx:before:swap", (event) => {
    const status = event.detail?.ctx?.response?.status;
    if (status === 401) { event.preventDefault(); location.reload(); }
    else if (status >= 500) { event.preventDefault(); isStale = true; }
  });
  document.addEventListener("htmx:after:swap", () => {
    times($("#live"));
    count();
    document.dispatchEvent(new CustomEvent("console:refreshed"));
  });

  // ── One event stream per browser: one tab has it and tells the others ──
  let change = null;
  const pulse = (data) => {
    showAlarms(data.alarms);
    const key = JSON.stringify(data.change);
    // The page names the change that it shows: what came between it and the first event counts too.
    if (change === null ? String(data.change[0]) !== body.dataset.watch : key !== change) {
      isStale = true;
      changedAt = performance.now();
    }
    change = key;
  };
  const channel = "BroadcastChannel" in window ? new BroadcastChannel("stanchion-console") : null;
  channel?.addEventListener("message", (event) => pulse(event.data));
  const listen = () => new Promise(() => {
    let lost = null;
    const source = new EventSource("/console/live");
    source.addEventListener("pulse", (event) => {
      clearTimeout(lost);
      lost = null;
      const data = JSON.parse(event.data);
      pulse(data);
      channel?.postMessage(data);
    });
    source.addEventListener("error", () => {
      if (source.readyState === EventSource.CLOSED) setTimeout(() => location.reload(), 300 + Math.random() * 700);
      lost ??= setTimeout(() => showAlarms([{ level: "bad", text: "The server does not answer: this page may be out of date.", since: Date.now() }]), 2500);
    });
    addEventListener("pagehide", () => source.close(), { once: true });
  });
  if (body.hasAttribute("data-watch")) {
    if (navigator.locks) navigator.locks.request("stanchion-console-stream", listen);
    else listen();
  }

  // ── Confirmations ──
  const confirmBox = $("#confirm");
  document.addEventListener("submit", (event) => {
    const form = event.target;
    const asking = event.submitter?.dataset.confirm ? event.submitter : form;
    if (!asking.dataset?.confirm || form.dataset.confirmed) return;
    event.preventDefault();
    const chosen = $$("tbody input[type=checkbox]:checked").length;
    const fill = (text) => (text || "").replaceAll("{n}", String(chosen));
    $("#confirm-title").textContent = fill(asking.dataset.confirm);
    $("#confirm-detail").textContent = fill(asking.dataset.detail);
    $("#confirm-yes").textContent = asking.dataset.yes || "Do it";
    const submitter = event.submitter;
    confirmBox.returnValue = "no";
    confirmBox.addEventListener("close", () => {
      if (confirmBox.returnValue !== "yes") return;
      form.dataset.confirmed = "1";
      form.requestSubmit(submitter?.form === form ? submitter : undefined);
    }, { once: true });
    confirmBox.showModal();
  });
  // A second click must not send a form twice.
  document.addEventListener("submit", (event) => {
    if (event.defaultPrevented || event.target.method !== "post") return;
    setTimeout(() => $$("button", event.target).forEach((each) => { each.disabled = true; }), 0);
  });
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });

  // ── Copying, selecting rows ──
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("[data-copy]");
    if (!button) return;
    const text = button.dataset.copy || $("pre", button.parentElement).textContent;
    try { await navigator.clipboard.writeText(text); } catch { return; }
    const before = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = before; }, 1200);
  });
  const count = () => {
    for (const table of $$("table[data-select]")) {
      const boxes = $$("tbody input[type=checkbox]", table), chosen = boxes.filter((each) => each.checked).length;
      const all = $("thead input[type=checkbox]", table);
      if (all) { all.checked = chosen > 0 && chosen === boxes.length; all.indeterminate = chosen > 0 && chosen < boxes.length; }
      for (const each of $$("[data-chosen]")) { each.hidden = chosen === 0; }
      for (const each of $$("[data-chosen-count]")) each.textContent = String(chosen);
    }
  };
  document.addEventListener("change", (event) => {
    const box = event.target;
    if (box.type !== "checkbox") {
      if (box.matches("form.filters select")) box.form.requestSubmit();
      return;
    }
    const table = box.closest("table[data-select]");
    if (table && box.closest("thead")) $$("tbody input[type=checkbox]", table).forEach((each) => { each.checked = box.checked; });
    count();
  });
  count();

  // ── Check lists: what was ticked stays ticked in this browser ──
  const ticked = (box) => "stanchion-ticked:" + box.dataset.keep;
  const tick = () => { for (const each of $$("input[data-keep]")) each.checked = localStorage.getItem(ticked(each)) !== null; };
  document.addEventListener("change", (event) => {
    if (!event.target.matches("input[data-keep]")) return;
    if (event.target.checked) localStorage.setItem(ticked(event.target), "1");
    else localStorage.removeItem(ticked(event.target));
  });
  document.addEventListener("console:refreshed", tick);
  tick();

  // ── On a narrow screen the navigation is a strip: show the page's own entry ──
  const strip = $(".side"), current = $(".side [aria-current]");
  if (strip && current && strip.scrollWidth > strip.clientWidth) strip.scrollLeft = current.offsetLeft - strip.clientWidth / 3;

  // ── Keyboard ──
  const rows = () => $$("#live tbody tr, #live article.decision").filter((row) => $("a, button", row));
  const move = (step) => {
    const all = rows();
    if (!all.length) return;
    const at = all.findIndex((row) => row.contains(document.activeElement));
    const next = all[at < 0 ? (step > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + step))];
    $("a, button", next).focus();
    next.scrollIntoView({ block: "nearest" });
  };
  let isGoing = 0;
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && document.activeElement?.matches?.("input, select, textarea")) document.activeElement.blur();
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("input, select, textarea") || $("dialog[open]")) return;
    if (Date.now() - isGoing < 1500) {
      isGoing = 0;
      const link = $$("a[data-go]").find((each) => each.dataset.go === event.key);
      if (link) { event.preventDefault(); link.click(); }
      return;
    }
    switch (event.key) {
      case "/": event.preventDefault(); $("#q")?.focus(); $("#q")?.select(); break;
      case "g": isGoing = Date.now(); break;
      case "j": move(1); break;
      case "k": move(-1); break;
      case "x": $("input[type=checkbox]", document.activeElement?.closest("tr") ?? document.createElement("i"))?.click(); break;
      case "?": $("#keys").showModal(); break;
      case "y": case "n": {
        const verdict = event.key === "y" ? "approve" : "reject";
        $(`button[value=${verdict}]`, document.activeElement?.closest("article.decision") ?? document.createElement("i"))?.click();
        break;
      }
      default: {
        const button = $(`[data-key="${CSS.escape(event.key)}"]`);
        if (button) { event.preventDefault(); button.click(); }
      }
    }
  });
})();
