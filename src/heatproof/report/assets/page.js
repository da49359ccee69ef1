/* heatproof: heatmaps over images, and the controls that change them.

   heatproof.gallery(root, set) shows a set of images. The set holds methods, metrics, groups, colours and images;
   an image's `picture` is an address and its maps are {h, w, data}, or functions and promises of these, so that the
   same code serves a page with everything inside and one that asks a server. The state of the page is in the address
   after the #, so that a link leads to it. Text from outside only ever becomes textContent. */
"use strict";
const heatproof = (() => {
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") element.className = value;
      else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (value === true) element.setAttribute(key, "");
      else if (value !== false && value != null) element.setAttribute(key, value);
    }
    element.append(...children.filter((child) => child != null));
    return element;
  };
  const outside = (text) => { const bdi = make("bdi"); bdi.textContent = text; return bdi; };
  const number = (value) => (value == null ? "–" : value.toFixed(Math.abs(value) >= 100 ? 1 : 3).replace("-", "−"));
  const arrow = (metric) => (metric.up == null ? "" : metric.up ? "\u00a0↑" : "\u00a0↓");

  /* 256 colours from a few points, linear in between. */
  const ramp = (points) => {
    const colours = new Uint8ClampedArray(256 * 3);
    const parsed = points.map((hex) => [0, 2, 4].map((k) => parseInt(hex.slice(k, k + 2), 16)));
    for (let i = 0; i < 256; i++) {
      const at = (i / 255) * (parsed.length - 1), low = Math.min(Math.floor(at), parsed.length - 2), t = at - low;
      for (let c = 0; c < 3; c++) colours[3 * i + c] = parsed[low][c] * (1 - t) + parsed[low + 1][c] * t;
    }
    return colours;
  };

  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

  /* Maps come deflated; each is unpacked when it is first shown. */
  const unpack = async (map) => {
    if (map && typeof map.data === "string") {
      const inflated = new Blob([bytes(map.data)]).stream().pipeThrough(new DecompressionStream("deflate"));
      map.data = new Uint8Array(await new Response(inflated).arrayBuffer());
    }
    return map;
  };

  /* Bilinear with pixel centres (align_corners=False), then stretched to 0..1 as every metric does. */
  const enlarge = (map, size) => {
    const { h, w, data: from } = map;
    const out = new Float32Array(size * size);
    const line = (n) => Array.from({ length: size }, (_, i) => {
      const at = Math.min(Math.max((i + 0.5) * n / size - 0.5, 0), n - 1), low = Math.floor(at);
      return [low, Math.min(low + 1, n - 1), at - low];
    });
    const rows = line(h), columns = line(w);
    let least = Infinity, most = -Infinity, k = 0;
    for (const [y0, y1, v] of rows) {
      for (const [x0, x1, u] of columns) {
        const top = from[y0 * w + x0] * (1 - u) + from[y0 * w + x1] * u;
        const bottom = from[y1 * w + x0] * (1 - u) + from[y1 * w + x1] * u;
        const value = top * (1 - v) + bottom * v;
        out[k++] = value;
        if (value < least) least = value;
        if (value > most) most = value;
      }
    }
    const span = most - least;
    for (k = 0; k < out.length; k++) out[k] = span > 0 ? (out[k] - least) / span : 0;
    return out;
  };

  const paint = (canvas, values, colours) => {
    const size = canvas.width, context = canvas.getContext("2d"), picture = context.createImageData(size, size);
    const pixels = picture.data;
    for (let k = 0, to = 0; k < values.length; k++) {
      const level = 3 * Math.round(values[k] * 255);
      pixels[to++] = colours[level];
      pixels[to++] = colours[level + 1];
      pixels[to++] = colours[level + 2];
      pixels[to++] = 255;
    }
    context.putImageData(picture, 0, 0);
  };

  const paintScale = (canvas, colours) => {
    const context = canvas.getContext("2d"), line = context.createImageData(256, 1);
    for (let i = 0; i < 256; i++) line.data.set([...colours.slice(3 * i, 3 * i + 3), 255], 4 * i);
    context.putImageData(line, 0, 0);
  };

  const SIZE = 112;
  const settled = async (thing) => (typeof thing === "function" ? thing() : thing);

  /* One image with maps over it, each {map, label}; where there are two, a slider shows one left of the other. */
  const stack = (picture, layers, colours) => {
    const box = make("div", { class: layers.length > 1 ? "frame two" : "frame" });
    const drawn = [];
    settled(picture).then((address) => {
      if (!address) return;
      const img = make("img", { alt: "" });
      img.addEventListener("load", () => { box.style.aspectRatio = `${img.naturalWidth} / ${img.naturalHeight}`; });
      img.src = address;
      box.prepend(img);
    });
    for (const layer of layers) {
      const canvas = make("canvas", { width: SIZE, height: SIZE, role: "img", "aria-label": layer.label });
      settled(layer.map).then(unpack).then((map) => {
        if (!map) {
          const none = make("span", { class: "none" });
          none.textContent = layers.length > 1 ? `no map: ${layer.label}` : "no map";
          box.append(none);
          return;
        }
        const values = enlarge(map, SIZE);
        box.append(canvas);
        drawn.push((table) => paint(canvas, values, table));
        drawn[drawn.length - 1](box.colours);
      });
      canvas.className = layer === layers[0] ? "left" : "right";
    }
    box.colours = colours;
    box.recolour = (table) => { box.colours = table; drawn.forEach((each) => each(table)); };
    return box;
  };

  const frame = (image, method, name, colours) =>
    stack(image.picture, [{ map: image.maps[method], label: `${name} map of ${image.id}` }], colours);

  const explains = (image, floor) => (floor ? ["explains no class (control)"]
    : image.explains ? ["explains ", make("b", {}, outside(image.explains)), ` (${image.which})`] : []);
  const answer = (image, floor = false) => {
    const line = make("div", { class: "answer" }), about = explains(image, floor);
    const says_all = image.right && image.explains === image.label && !floor; // one class, so one line
    if (about.length) line.append(...about, says_all ? "," : make("br"));
    if (image.label && !says_all) line.append("true ", outside(image.label), make("br"));
    if (image.predicted) {
      if (!says_all) line.append("predicted ", outside(image.predicted));
      if (image.confidence != null) line.append(` ${Math.round(image.confidence * 100)}\u00a0%`);
      if (image.right != null) {
        const mark = make("span", { class: image.right ? "right" : "wrong" });
        mark.textContent = image.right ? " ✓\u00a0right" : " ✗\u00a0wrong";
        line.append(mark);
      }
    }
    if (image.planes) line.append(make("br"), image.planes); // of a volume, those that the image shows
    if (image.unavailable) line.append(make("br"), image.unavailable);
    return line;
  };

  const score = (metric, value) => {
    const line = make("div", { class: "score" }), what = make("span"), much = make("span");
    what.textContent = metric.plain.split(":")[0] + arrow(metric);
    much.textContent = number(value);
    line.append(what, much);
    return line;
  };

  let fields = 0;
  const labelled = (text, field, content) => {
    field.id = `field-${++fields}`;
    const label = make("label", { for: field.id });
    label.textContent = text;
    return make("div", { class: "field" }, label, content);
  };

  const select = (label, options, change) => {
    const field = make("select", { onchange: () => change(field.value) });
    for (const option of options) {
      const entry = make("option", { value: option.value, selected: option.selected });
      entry.textContent = option.text;
      field.append(entry);
    }
    return labelled(label, field, field);
  };

  const choices = (label, name, options, change) => {
    const legend = make("legend");
    legend.textContent = label;
    const row = make("div", { class: "choices" });
    for (const option of options) {
      const text = make("span");
      text.textContent = option.text;
      const input = make("input", {
        type: "radio", name, value: option.value, checked: option.selected, onchange: () => change(option.value),
      });
      row.append(make("label", {}, input, text));
    }
    return make("fieldset", {}, legend, row);
  };

  /* A method's insertion and deletion on one image. */
  const drawn = (tag, attributes, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const curve = (set, image, method) => {
    const kinds = Object.keys(set.percents || {}).filter((kind) => (image.curves || {})[kind]);
    const lines = kinds.map((kind) => image.curves[kind][method].map((value, i) => [set.percents[kind][i], value]).filter(([, value]) => value != null));
    if (!lines.some((line) => line.length)) return null;
    const name = set.methods[method].name;
    const chart = drawn("svg", { class: "chart curve", viewBox: "0 0 120 66", role: "img", "aria-label": `Insertion and deletion of ${image.id} by ${name}, n = 1` });
    for (const level of [0, 50, 100]) {
      const label = drawn("text", { x: 18, y: 60 - level / 2, "text-anchor": "end", style: "font-size:8px" });
      label.textContent = level / 100;
      chart.append(drawn("line", { class: "grid", x1: 21, x2: 118, y1: 57 - level / 2, y2: 57 - level / 2 }), label);
    }
    lines.forEach((line, k) => {
      const points = line.map(([x, y]) => `${21 + 0.97 * x},${57 - y / 2}`).join(" ");
      chart.append(drawn("polyline", { class: `line ${kinds[k] === "insertion" ? "one" : "two"}`, points, "stroke-width": 1.6 }));
    });
    return chart;
  };

  /* Every class that was explained of an image: its labels (IMAGE#LABEL), or what the network predicts instead. */
  const entriesOf = (set, image) => {
    const picture = (each) => (set.several ? each.id.slice(0, each.id.lastIndexOf("#")) : each.id);
    const own = set.images.filter((other) => picture(other) === picture(image));
    return own.flatMap((one) => ((one.instead || []).some(Boolean)
      ? [one, { ...one, maps: one.instead, explains: one.predicted, which: "prediction", scores: {}, curves: {} }] : [one]));
  };

  /* One image: every method, every class that was explained, curves, and every score. */
  const compare = (set, image, state, closed) => {
    const dialog = make("dialog", { "aria-labelledby": "compared" });
    const title = make("h3", { id: "compared" }, outside(image.id));
    const close = make("button", { type: "button", onclick: () => dialog.close() });
    close.textContent = "Close";
    dialog.append(make("header", {}, make("div", {}, title, answer(image)), close));
    const both = entriesOf(set, image);
    for (const one of both) {
      if (both.length > 1) dialog.append(make("h4", {}, ...explains(one, false)));
      const cards = make("ul", { class: "cards" });
      if (one.picture) cards.append(make("li", { class: "card plain" }, make("strong", {}, "image"), stack(one.picture, [], state.colours)));
      set.methods.forEach((method, i) => {
        const name = make("strong", {}, outside(method.name + (method.floor ? " (control)" : "")));
        if (one.maps[i] || one === image) cards.append(make("li", { class: "card" }, name, frame(one, i, method.name, state.colours), curve(set, one, i)));
      });
      dialog.append(cards);
    }
    both.filter((one) => Object.keys(one.scores).length).forEach((one) => dialog.append(scoresOf(set, one)));
    const note = make("p", { class: "status" });
    const alone = both.length === 1 && image.right === false ? `This run explains ${image.explains} only; with both_classes = true in its [run] it would explain ${image.predicted} too. ` : "";
    const drew = Object.keys(image.curves || {}).length ? "Under each map: insertion (solid) and deletion (dashed) of this image, probability over pixels shown or removed." : "";
    note.textContent = alone + drew;
    dialog.append(note);
    dialog.style.setProperty("--heat", state.opacity);
    dialog.addEventListener("close", () => { dialog.remove(); closed(); });
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    document.body.append(dialog);
    dialog.showModal();
    return dialog;
  };
  const scoresOf = (set, image) => {
    const head = make("tr", {}, make("td"));
    set.methods.forEach((method) => head.append(make("th", { scope: "col" }, outside(method.name))));
    const body = make("tbody");
    for (const metric of set.metrics) {
      const values = image.scores[metric.name];
      if (!values || values.every((value) => value == null)) continue;
      const first = make("th", { scope: "row" });
      first.textContent = metric.plain + arrow(metric);
      const row = make("tr", {}, first);
      values.forEach((value) => { const cell = make("td"); cell.textContent = number(value); row.append(cell); });
      body.append(row);
    }
    const table = make("table", {}, make("thead", {}, head), body);
    return make("div", { class: "wide", role: "region", tabindex: "0", "aria-label": `Scores of this image, ${image.explains}` }, table);
  };

  /* What is chosen, as name=value behind the #; an anchor there has no "=". */
  const inAddress = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const toAddress = (chosen, push) => {
    const text = new URLSearchParams(Object.entries(chosen).filter(([, value]) => value)).toString();
    const address = text || location.hash.includes("=") ? location.href.split("#")[0] + (text && `#${text}`) : location.href;
    if (address !== location.href) history[push ? "pushState" : "replaceState"](null, "", address);
  };

  const gallery = (root, set) => {
    const names = Object.keys(set.colours);
    const groups = Object.keys(set.groups);
    const metricOf = (name) => set.metrics.find((metric) => metric.name === name);
    const usual = {
      group: groups[0] || "all", method: Math.max(0, set.methods.findIndex((method) => !method.floor)),
      sort: "", answer: "all", label: "",
    };
    const state = { ...usual, colours: ramp(set.colours[names[0]]), opacity: 0.6 };
    let open = null; // the dialog of an image
    const cards = make("ul", { class: "cards" });
    const status = make("p", { class: "status", role: "status" });
    const scale = make("canvas", { class: "scale", width: 256, height: 1, "aria-hidden": "true" });

    const shown = () => {
      const matching = set.images.filter((image) =>
        (state.group === "all" || state.group in image.groups) &&
        (state.answer === "all" || image.right === (state.answer === "right")) &&
        (!state.label || image.label === state.label));
      const metric = metricOf(state.sort), sign = metric && metric.up === false ? 1 : -1;
      const value = (image) => (image.scores[state.sort] || [])[state.method];
      if (metric) {
        const known = matching.filter((image) => value(image) != null).sort((a, b) => sign * (value(a) - value(b)));
        return [...known, ...matching.filter((image) => value(image) == null)];
      }
      return state.group === "all" ? matching : matching.sort((a, b) => a.groups[state.group] - b.groups[state.group]);
    };

    const card = (image) => {
      const method = set.methods[state.method], id = make("div", { class: "id" }, outside(image.id));
      id.title = image.id;
      const box = frame(image, state.method, method.name, state.colours);
      box.classList.add("opens");
      box.addEventListener("click", () => show(image));
      const item = make("li", { class: "card" }, box, id, answer(image, method.floor));
      for (const name of new Set([state.sort || set.headline, set.headline])) {
        if (name && image.scores[name]) item.append(score(metricOf(name), image.scores[name][state.method]));
      }
      if (state.group === "disputed" && image.agreement != null) {
        item.append(score({ plain: "agreement of methods", up: true }, image.agreement));
      }
      const button = make("button", { type: "button", onclick: () => show(image) });
      button.textContent = "Compare methods";
      button.setAttribute("aria-label", `Compare methods on ${image.id}`);
      item.append(button);
      return item;
    };

    const draw = () => {
      const images = shown();
      cards.replaceChildren(...images.map(card));
      status.textContent = images.length ? `${images.length} of ${set.images.length} images shown, maps of ${set.methods[state.method].name}`
        : "No image matches these filters";
    };
    const recolour = (name) => {
      state.colours = ramp(set.colours[name]);
      cards.querySelectorAll(".frame").forEach((box) => box.recolour(state.colours));
      paintScale(scale, state.colours);
    };
    const fade = (percent) => {
      state.opacity = percent / 100;
      root.style.setProperty("--heat", state.opacity);
      seen.textContent = `${percent} %`;
    };
    const redraw = (key) => (value) => { state[key] = key === "method" ? Number(value) : value; tell(); draw(); };

    /* The address and the page say the same. */
    const KEYS = { group: "show", method: "method", sort: "sort", answer: "answer", label: "class" };
    const tell = (picture = "", push = false) => {
      const chosen = Object.entries(KEYS).filter(([key]) => state[key] !== usual[key])
        .map(([key, name]) => [name, key === "method" ? set.methods[state.method].name : state[key]]);
      toAddress({ ...Object.fromEntries(chosen), picture }, push);
    };
    const show = (image, push = true) => {
      if (open && open.image === image) return;
      if (open) open.dialog.close();
      if (push) tell(image.id, true);
      const mine = { image };
      mine.dialog = compare(set, image, state, () => {
        if (open !== mine) return;
        open = null;
        if (inAddress().get("picture") === image.id) tell();
      });
      open = mine;
    };
    const possible = {
      group: (value) => value === "all" || groups.includes(value), method: (value) => value >= 0, sort: (value) => Boolean(metricOf(value)),
      answer: (value) => value === "right" || value === "wrong", label: (value) => set.images.some((image) => image.label === value),
    };
    const follow = () => {
      const address = inAddress(), before = JSON.stringify(Object.keys(usual).map((key) => state[key]));
      for (const [key, name] of Object.entries(KEYS)) {
        const text = address.get(name), value = key === "method" && text != null ? set.methods.findIndex((method) => method.name === text) : text;
        state[key] = text != null && possible[key](value) ? value : usual[key];
      }
      if (JSON.stringify(Object.keys(usual).map((key) => state[key])) !== before) { fillControls(); draw(); }
      const image = set.images.find((each) => each.id === address.get("picture"));
      if (image) show(image, false);
      else if (open) open.dialog.close();
      return Boolean(image) || Object.values(KEYS).some((name) => address.has(name));
    };
    const fillControls = () => {
      controls.querySelectorAll("input[name=group]").forEach((input) => { input.checked = input.value === state.group; });
      for (const [key, box] of Object.entries(boxes)) if (box) box.querySelector("select").value = state[key];
    };

    const seen = make("output");
    const range = make("input", { type: "range", min: 0, max: 100, step: 5, value: 60, oninput: () => fade(Number(range.value)) });
    const labels = [...new Set(set.images.map((image) => image.label).filter(Boolean))].sort();
    const plain = (text) => ({ value: text, text });
    const boxes = {
      method: select("Method", set.methods.map((method, i) => (
        { value: i, text: method.name + (method.floor ? " (control)" : ""), selected: i === state.method })), redraw("method")),
      sort: select("Sort by", [{ value: "", text: "order of the group" }, ...set.metrics.map((metric) => (
        { value: metric.name, text: metric.plain.split(":")[0] + arrow(metric) }))], redraw("sort")),
      answer: select("Answer", [{ value: "all", text: "right and wrong" }, plain("right"), plain("wrong")], redraw("answer")),
      label: labels.length > 1 ? select("True class", [{ value: "", text: "all" }, ...labels.map(plain)], redraw("label")) : null,
    };
    const controls = make("div", { class: "controls" },
      choices("Show", "group", [...groups.map((key, i) => ({ value: key, text: set.groups[key], selected: i === 0 })),
        { value: "all", text: "All", selected: !groups.length }], redraw("group")),
      ...Object.values(boxes),
      labelled("Heatmap opacity", range, make("div", { class: "range" }, range, seen)),
      select("Colours", names.map(plain), recolour), scale);
    root.append(controls, status, cards);
    fade(60);
    paintScale(scale, state.colours);
    draw();
    window.addEventListener("hashchange", follow);
    if (follow() && !open) root.scrollIntoView();
    return { state, draw, set };
  };

  /* A link into a fold opens it. */
  const unfold = () => {
    const target = location.hash.length > 1 && !location.hash.includes("=") && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    if (target) target.scrollIntoView();
  };
  window.addEventListener("hashchange", unfold);
  document.addEventListener("click", (event) => {
    const link = event.target.closest && event.target.closest('a[href^="#"]');
    if (link && link.hash === location.hash) unfold();
  });

  return { gallery, ramp, enlarge, unfold, make, outside, number, arrow, stack, explains, answer, score, labelled, select, paintScale };
})();

(() => {
  const root = document.getElementById("gallery"), data = document.getElementById("data");
  if (root && data) {
    const set = JSON.parse(data.textContent);
    if (set.images) heatproof.gallery(root, set);
  }
  heatproof.unfold();
})();
