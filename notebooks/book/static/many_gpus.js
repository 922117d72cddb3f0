// The calculator of the page many_gpus: the rule of notebooks/sage_course/results/many_gpus.py for any number of GPUs.
"use strict";
document.querySelectorAll(".calculator[data-host]").forEach(place => {
  const host = JSON.parse(place.dataset.host);
  const inputs = {tokens: ["tokens", 2 ** 20], hosts: ["hosts", 8], gpus: ["GPUs in each", 8], rate: ["GB/s of a GPU between hosts", 50]};
  place.innerHTML = `<form><fieldset><legend>Ulysses inside hosts, a ring between them</legend>${
    Object.entries(inputs).map(([name, [label, start]]) =>
      `<label>${label} <input name="${name}" type="number" min="1" step="any" value="${start}"></label>`).join("")}
    </fieldset><output></output></form>`;
  const form = place.firstElementChild, output = form.querySelector("output");

  function inTime(seconds) {
    if (seconds === 0) return "none";
    if (seconds >= 1) return `${seconds.toLocaleString("en", {minimumFractionDigits: 1, maximumFractionDigits: 1})} s`;
    return `${(1e3 * seconds).toFixed(seconds >= 0.01 ? 0 : 1)} ms`;
  }

  function show() {
    const [tokens, hosts, gpus, rate] = Object.keys(inputs).map(name => Number(form.elements[name].value));
    if (![tokens, hosts, gpus].every(count => count >= 1 && Number.isInteger(count)) || !(rate > 0)) {
      output.textContent = "Tokens, hosts and GPUs are whole numbers from 1 on, and the rate is above 0.";
      return;
    }
    if (host.heads % gpus) {
      output.textContent = `The GPUs in a host must divide the ${host.heads} heads.`;
      return;
    }
    const entries = tokens * host.width / (hosts * gpus);
    const merging = hosts > 1 ? host.merging * entries * hosts : 0;
    const computing = host.seconds * tokens ** 2 / (hosts * gpus) + merging;
    const inside = host.ulysses * entries * (gpus - 1) / gpus / host.inside;
    const between = hosts > 1 ? (host.ring * hosts - 5) * entries / (1e9 * rate) : 0;
    const way = hosts === 1 ? "sagebwd" : gpus === 1 ? "sagebwd_ring" : "sagebwd_both";
    const memory = host.memory[way] * tokens / (hosts * gpus) / 2 ** 30;
    output.innerHTML = `A pass should take <strong>${inTime(inside + Math.max(computing, between))}</strong>, limited by
      ${computing >= between ? "computing" : "links"}.
      <br>Computing: ${inTime(computing)}. Inside hosts: ${inTime(inside)}. Between hosts: ${inTime(between)}.
      <br>Memory of each GPU: ${memory.toFixed(1)} GiB of ${host.available.toFixed(0)}${
        memory > host.available ? ", so it <strong>doesn't fit</strong>: take more GPUs" : ""}.`;
  }

  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("input", show);
  show();
});
