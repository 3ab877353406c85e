"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const text = document.getElementById("text");
const tip = document.getElementById("tip");
const percent = (share) => (100 * share).toFixed(share < 0.1 ? 1 : 0) + "%";

function say(line) {
  tip.hidden = line === "";
  tip.textContent = line;
}

// the map of one method, a pixel for each head and column; darker: more of it kept
function draw(canvas) {
  const method = data.methods[canvas.dataset.method];
  const levels = Uint8Array.from(atob(method.map), (c) => c.charCodeAt(0));
  canvas.width = method.columns;
  canvas.height = data.heads.length;
  const image = new ImageData(canvas.width, canvas.height);
  levels.forEach((level, i) => {
    const share = level / 255;
    image.data.set([255 - 255 * share, 255 - 141 * share, 255 - 77 * share, 255], 4 * i);
  });
  canvas.getContext("2d").putImageData(image, 0, 0);

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const at = (part, whole, n) => Math.min(n - 1, Math.max(0, Math.floor((part / whole) * n)));
    const column = at(event.clientX - box.left, box.width, canvas.width);
    const row = at(event.clientY - box.top, box.height, canvas.height);
    const first = column * data.perColumn;
    return { column, row, first, last: Math.min(first + data.perColumn, data.tokens.length) - 1 };
  };
  canvas.addEventListener("mousemove", (event) => {
    const { column, row, first, last } = place(event);
    const [layer, head] = data.heads[row];
    const share = levels[row * canvas.width + column] / 255;
    const tokens = data.tokens.slice(first, Math.min(last + 1, first + 8)).join(" ");
    say(`${method.name}: layer ${layer}, head ${head}, ` +
      (first === last ? `position ${first}: ${share ? "kept" : "evicted"}` :
        `positions ${first} to ${last}: ${percent(share)} kept`) + `   ${tokens}`);
  });
  canvas.addEventListener("mouseleave", () => say(""));
  canvas.addEventListener("click", (event) => {
    const span = text.children[place(event).first];
    text.querySelectorAll(".at").forEach((old) => old.classList.remove("at"));
    span.classList.add("at");
    span.scrollIntoView({ block: "center" });
  });
}

function shade(method) {
  const shares = data.methods[method].shares;
  for (const [i, span] of Array.from(text.children).entries()) {
    span.style.setProperty("--s", Math.sqrt(shares[i]).toFixed(3));
  }
}

document.querySelectorAll("canvas").forEach(draw);
document.querySelectorAll("input[name=method]").forEach((radio) => {
  radio.addEventListener("change", () => shade(radio.value));
  if (radio.checked) shade(radio.value); // a reloaded page keeps its choice
});
text.addEventListener("mouseover", (event) => {
  const i = event.target.dataset.i;
  if (i === undefined) return;
  const kept = data.methods.map((m) => `${m.name} ${percent(m.shares[i])}`).join(", ");
  say(`position ${i}: ${data.tokens[i]}   kept by ${kept}`);
});
text.addEventListener("mouseleave", () => say(""));
