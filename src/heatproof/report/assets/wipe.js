/* Two maps of one image, left and right of a slider, with their scores; and saving what is shown. */
"use strict";
Object.assign(heatproof, (() => {
  const { make, outside, number, arrow, stack, answer, labelled } = heatproof;

  const fileName = (text, end) => `${text.replace(/[^\p{L}\p{N}.-]+/gu, "_").slice(-80)}.${end}`;

  const save = (name, blob) => {
    const link = make("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  };

  /* A frame as it is seen: the grey image, and each map on its side of the slider. */
  const toPNG = (box, opacity, wipe) => {
    const picture = box.querySelector("img"), maps = [...box.querySelectorAll("canvas")];
    const width = 672, height = Math.round(width * (picture ? picture.naturalHeight / picture.naturalWidth : 1));
    const canvas = make("canvas", { width, height }), context = canvas.getContext("2d");
    if (picture) {
      context.filter = "grayscale(1)";
      context.drawImage(picture, 0, 0, width, height);
      context.filter = "none";
    }
    const edge = box.classList.contains("two") ? width * wipe : width;
    for (const map of maps) {
      const left = map.className === "left";
      context.save();
      context.beginPath();
      context.rect(left ? 0 : edge, 0, left ? edge : width - edge, height);
      context.clip();
      context.globalAlpha = opacity;
      context.drawImage(map, 0, 0, width, height);
      context.restore();
    }
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  };

  /* A chart that looks the same without the page: its style goes with it. */
  const STYLE = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin",
    "opacity", "font-family", "font-size", "font-weight", "text-anchor"];
  const toSVG = (chart) => {
    const copy = chart.cloneNode(true), box = chart.viewBox.baseVal;
    const from = [chart, ...chart.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
    from.forEach((element, i) => {
      const style = getComputedStyle(element);
      for (const name of STYLE) to[i].setAttribute(name, style.getPropertyValue(name));
    });
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("width", box.width * 2);
    copy.setAttribute("height", box.height * 2);
    const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    paper.setAttribute("width", "100%");
    paper.setAttribute("height", "100%");
    paper.setAttribute("fill", getComputedStyle(document.body).backgroundColor);
    copy.insertBefore(paper, copy.firstChild);
    return new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
  };

  const fill = (field, options, value) => {
    const wanted = JSON.stringify(options);
    if (field.filled !== wanted) {
      field.filled = wanted;
      const entry = (option) => {
        const made = make("option", { value: option.value });
        made.textContent = option.text;
        return made;
      };
      field.replaceChildren(...options.map((option) => (option.options
        ? make("optgroup", { label: option.group }, ...option.options.map(entry)) : entry(option))));
    }
    field.value = value;
  };

  const named = (method) => ({ value: method.name, text: method.name + (method.floor ? " (control)" : "") });

  /* view: { list, place, sides: [{method, checkpoint}, ...], choices, colours, opacity, ask, mapOf } */
  const compare = (view) => {
    const { choices, ask } = view, sides = view.sides.map((side) => ({ ...side }));
    const dialog = make("dialog", { "aria-labelledby": "compared" });
    const title = make("h3", { id: "compared" }), about = make("div");
    const stage = make("div"), ends = make("div", { class: "ends" }, make("span"), make("span"));
    const table = make("table"), button = (text, onclick) => {
      const made = make("button", { type: "button", onclick });
      made.textContent = text;
      return made;
    };
    const words = (side) => (choices.checkpoints.length > 1 ? `${side.method} at ${side.checkpoint}` : side.method);
    const slider = make("input", { type: "range", min: 0, max: 100, step: 1, value: 50, oninput: () => wipe(Number(slider.value)) });
    slider.setAttribute("aria-label", "Slider between left and right");
    let place = view.place, turn = 0;

    const wipe = (percent) => {
      slider.value = percent;
      dialog.style.setProperty("--wipe", `${percent}%`);
      slider.setAttribute("aria-valuetext", `${percent} % left map, ${100 - percent} % right map`);
    };
    const drag = (event) => {
      if (event.buttons !== 1) return;
      const box = stage.getBoundingClientRect();
      wipe(Math.round(100 * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width))));
    };
    stage.addEventListener("pointerdown", drag);
    stage.addEventListener("pointermove", drag);

    const row = (first, cells, tag = "td") => {
      const head = make("th", { scope: tag === "th" ? "col" : "row" });
      head.append(first);
      return make("tr", {}, head, ...cells.map((cell) => {
        const made = make(tag, tag === "th" ? { scope: "col" } : {});
        made.append(cell);
        return made;
      }));
    };
    const draw = async () => {
      const mine = ++turn, image = view.list[place];
      title.replaceChildren(outside(image.id));
      about.replaceChildren(answer(image));
      previous.disabled = place === 0;
      next.disabled = place === view.list.length - 1;
      stage.replaceChildren(stack(image.picture, sides.map((side) => ({
        map: () => view.mapOf(side.checkpoint, side.method, image.key), label: `${words(side)}: map of ${image.id}`,
      })), view.colours));
      sides.forEach((side, i) => ends.children[i].replaceChildren(outside(words(side))));
      const records = await Promise.all(sides.map((side) => (side.checkpoint === choices.checkpoint ? image
        : ask("/image", { key: image.key, model: choices.model, checkpoint: side.checkpoint }))));
      if (mine !== turn) return;
      records.forEach((record, i) => {
        const { floor } = choices.methods.find((method) => method.name === sides[i].method);
        if (record) ends.children[i].append(": ", ...heatproof.explains(record, floor));
      });
      const value = (i, metric) => {
        const at = choices.methods.findIndex((method) => method.name === sides[i].method);
        const scores = records[i] && records[i].scores[metric.name];
        return scores ? scores[at] : null;
      };
      const body = choices.metrics.map((metric) => {
        const [a, b] = [value(0, metric), value(1, metric)];
        return row(metric.plain + arrow(metric), [number(a), number(b), number(a == null || b == null ? null : b - a)]);
      });
      table.replaceChildren(make("thead", {}, row("Metric", ["Left", "Right", "Right − left"], "th")), make("tbody", {}, ...body));
    };
    const chooser = (i) => {
      const legend = make("legend");
      legend.textContent = ["Left", "Right"][i];
      const pick = (key, label, options) => {
        const field = make("select", { onchange: () => { sides[i][key] = field.value; draw(); } });
        fill(field, options, sides[i][key]);
        return labelled(label, field, field);
      };
      return make("fieldset", {}, legend, pick("method", "Method", choices.methods.map(named)),
        pick("checkpoint", "Checkpoint", choices.checkpoints.map((name) => ({ value: name, text: name }))));
    };
    const step = (by) => () => { place += by; draw(); };
    const previous = button("Previous image", step(-1)), next = button("Next image", step(1));
    const picture = button("Save PNG", async () => save(fileName(view.list[place].id, "png"),
      await toPNG(stage.firstChild, view.opacity, Number(slider.value) / 100)));
    const region = make("div", { class: "wide", role: "region", tabindex: "0", "aria-label": "Scores of both sides" }, table);
    dialog.append(
      make("header", {}, make("div", {}, title, about),
        make("div", { class: "tools" }, previous, next, button("Close", () => dialog.close()))),
      make("div", { class: "compare" }, make("div", {}, stage, slider, ends, make("div", { class: "tools" }, picture)),
        make("div", {}, make("div", { class: "sides" }, chooser(0), chooser(1)), region)));
    dialog.style.setProperty("--heat", view.opacity);
    dialog.addEventListener("close", () => dialog.remove());
    wipe(50);
    draw();
    document.body.append(dialog);
    dialog.showModal();
    slider.focus();
  };

  return { compareTwo: compare, fill, named, save, toPNG, toSVG, fileName };
})());
