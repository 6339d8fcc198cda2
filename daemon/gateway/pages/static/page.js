// What is nicer with a script; everything works without one.
"use strict";

// Enter sends a question, Shift+Enter begins a line.
for (const field of document.querySelectorAll("textarea[data-enter]")) {
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      field.form.requestSubmit();
    }
  });
}

// A question is sent once, and the button says that it is under way.
for (const form of document.querySelectorAll("form[data-busy]")) {
  const button = form.querySelector("button");
  const usual = button.textContent;
  form.addEventListener("submit", (event) => {
    if (form.getAttribute("aria-busy") === "true") {
      event.preventDefault();
      return;
    }
    form.setAttribute("aria-busy", "true");
    button.textContent = form.dataset.busy;
  });
  window.addEventListener("pageshow", () => {
    form.removeAttribute("aria-busy");
    button.textContent = usual;
  });
}
