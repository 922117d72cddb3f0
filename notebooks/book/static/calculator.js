// The calculator of the page int8_backward: the rule of notebooks/sage_course/results/hopper_model.py at any card's rates.
"use strict";
document.querySelectorAll(".calculator[data-model]").forEach(place => {
  const model = JSON.parse(place.dataset.model), own = "your own rates";
  const rates = {int8: "INT8 multiply-adds", sixteen: "16-bit multiply-adds", exp2: "exp2", l2: "bytes from L2 (empty: not counted)"};
  const choice = (name, label, options) => `<label>${label} <select name="${name}">${
    options.map(([value, text]) => `<option value="${value}">${text ?? value}</option>`).join("")}</select></label>`;
  const numbers = Object.entries(rates).map(([name, label]) =>
    `<label>${label} <input name="${name}" type="number" min="0" step="any"></label>`);
  place.innerHTML = `<form><fieldset><legend>Kernels</legend>
    ${choice("pass", "pass", [["bwd", "backward"], ["fwd", "forward"]])}
    ${choice("size", "head size", [[128], [64]])}
    ${choice("level", "INT8 level", [[1], [2], [3], [4, "4 (backward: Hopper only)"], [5, "5 (Hopper only)"]])}</fieldset>
    <fieldset><legend>Rates of one multiprocessor, per clock</legend>
    ${choice("card", "card", [...Object.keys(model.cards), own].map(name => [name]))}${numbers.join("")}</fieldset>
    <output></output></form>`;
  const form = place.firstElementChild, field = form.elements, output = form.querySelector("output");

  function clocks(programs, rate) { // tensor cores, and the busiest other unit of each program
    let tensor = 0, others = 0;
    for (const [int8, sixteen, exp2, alu, issue, l2] of programs) {
      tensor += int8 / rate.int8 + sixteen / rate.sixteen;
      others += Math.max(exp2 / rate.exp2, alu / model.alu, issue / model.issue, l2 / rate.l2);
    }
    return {tensor, sum: tensor + others};
  }

  function show() {
    const rate = Object.fromEntries(Object.keys(rates).map(name => [name, Number(field[name].value)]));
    if (field.l2.value === "") rate.l2 = Infinity;
    if (!Object.values(rate).every(value => value > 0)) {
      output.textContent = "Every rate must be above 0.";
      return;
    }
    const found = [0, field.level.value].map(level => model.levels[`${field.pass.value} ${field.size.value} ${level}`]);
    const [sixteen, int8] = found.map(level => clocks(level.programs, rate));
    const measured = (found[0].measured / found[1].measured).toFixed(2);
    const line = (name, level) =>
      `<br>${name}: ${level.sum.toFixed(3)} clocks per score, tensor cores ${level.tensor.toFixed(3)} of them.`;
    output.innerHTML = `INT8 should be <strong>${(sixteen.sum / int8.sum).toFixed(2)}x</strong> as fast as 16 bit.
      ${field.card.value === "H200" ? `Measured on an H200: ${measured}x.` : ""}${line("16 bit", sixteen)}${line("INT8", int8)}`;
  }

  function fill() {
    const card = model.cards[field.card.value];
    if (card) Object.keys(rates).forEach((name, i) => { field[name].value = card[i] ?? ""; });
  }

  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("input", event => {
    if (event.target === field.card) fill();
    else if (event.target.name in rates) field.card.value = own;
    show();
  });
  field.level.value = 3;
  fill();
  show();
});
