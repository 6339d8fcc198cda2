// What is nicer with a script; everything works without one.
"use strict";

// Enter sends a question, Shift+Enter begins a line.
document.addEventListener("keydown", (event) => {
  const ends = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (ends && event.target.matches?.("textarea[data-enter]")) {
    event.preventDefault();
    event.target.form.requestSubmit();
  }
});

// A question is sent once, and it is seen that it is under way.
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (!form.dataset.busy) return;
  if (form.ariaBusy === "true") {
    event.preventDefault();
    return;
  }
  form.ariaBusy = "true";
  if (form.dataset.stream && window.ReadableStream) {
    event.preventDefault();
    ask(form);
  } else {
    const button = form.querySelector("button");
    button.dataset.usual ??= button.textContent;
    button.textContent = form.dataset.busy;
  }
});

// A file that is too large is said to be before it is sent.
document.addEventListener("change", (event) => {
  const field = event.target;
  if (field.dataset.most === undefined) return;
  const large = [...field.files].some((file) => file.size > Number(field.dataset.most));
  field.setCustomValidity(large ? field.dataset.large : "");
  field.reportValidity();
});

window.addEventListener("pageshow", () => {
  for (const button of document.querySelectorAll("[data-usual]")) {
    button.form.ariaBusy = "false";
    button.textContent = button.dataset.usual;
  }
});

// ---- an answer while it is written ----

// The server's own pages become HTML, here and nowhere else; what else it says is shown as text.
const policy = window.trustedTypes?.createPolicy("page", { createHTML: (html) => html });

function parsed(html) {
  return new DOMParser().parseFromString(policy ? policy.createHTML(html) : html, "text/html");
}

// What a stream of server-sent events tells, each as an object; comments say nothing.
async function* told(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = events.pop();
    for (const one of events) {
      if (one.startsWith("data: ")) yield JSON.parse(one.slice(6));
    }
  }
}

// Shows the answer to a form as it comes; resolves with the server's page.
async function streamed(form, signal, draft) {
  const reply = await fetch(form.dataset.stream, {
    method: "POST",
    body: new URLSearchParams(new FormData(form)),
    headers: { accept: "text/event-stream, text/html" },
    redirect: "error",
    signal,
  });
  if (!reply.headers.get("content-type")?.startsWith("text/event-stream")) {
    return reply.text();
  }
  for await (const one of told(reply.body)) {
    if (one.page !== undefined) return one.page;
    draft.querySelector("h2").textContent = "Being written …";
    const text = draft.querySelector(".answer");
    text.classList.add("writing");
    text.append(one.text);
  }
  throw new Error("the stream ended before its end");
}

function begin() {
  const draft = document.getElementById("draft").content.cloneNode(true);
  document.getElementById("outcome").replaceWith(draft);
  return document.getElementById("outcome");
}

// The server's page takes the place of what was shown; false: it is none of the server's.
function finish(html) {
  const page = parsed(html);
  const outcome = page.getElementById("outcome");
  if (outcome) {
    document.getElementById("outcome").replaceWith(outcome);
  } else if (page.querySelector("main#main")) {
    document.body.replaceWith(page.body); // to sign in anew, for one
    document.querySelector("[autofocus]")?.focus();
  } else {
    return false;
  }
  document.title = page.title;
  return true;
}

function breakOff(draft, why) {
  draft.querySelector(".writing")?.classList.remove("writing");
  const heading = draft.querySelector("h2");
  heading.textContent = draft.querySelector(".answer").textContent ? `${why}: not all of an answer` : why;
}

async function ask(form) {
  const usual = form.querySelector("button:not([data-stop])");
  const stop = form.querySelector("[data-stop]");
  const said = document.getElementById("said");
  const going = new AbortController();
  const giveUp = () => going.abort();
  const swap = (from, to) => {
    const focused = document.activeElement === from;
    to.hidden = false;
    if (focused) to.focus();
    from.hidden = true;
  };
  stop.addEventListener("click", giveUp);
  window.addEventListener("pagehide", giveUp);
  swap(usual, stop);
  said.textContent = "Searching …";
  const draft = begin();
  try {
    if (!finish(await streamed(form, going.signal, draft))) throw new Error("no page of ours");
    said.textContent = document.title.split(" · ")[0];
  } catch (error) {
    breakOff(draft, going.signal.aborted ? "Stopped" : "Broken off");
    said.textContent = going.signal.aborted ? "Stopped" : "";
    if (!going.signal.aborted) draft.prepend(document.getElementById("cut-off").content.cloneNode(true));
  } finally {
    going.abort(); // behind the page nothing comes
    stop.removeEventListener("click", giveUp);
    window.removeEventListener("pagehide", giveUp);
    swap(stop, usual);
    form.ariaBusy = "false";
  }
}
