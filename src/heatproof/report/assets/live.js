/* The live page: asks the server how much there is, and shows the images that were chosen. */
"use strict";
(() => {
  const { make, outside, number, arrow, stack, answer, score, labelled, fill, named } = heatproof;
  const EVERY = 2000, MOST_MAPS = 600, TYPING = 150;
  const at = (id) => document.getElementById(id);
  const choice = {
    model: "", checkpoint: "", method: "", against: "", label: "", answer: "", search: "", sort: "", order: "", page: 1,
  };
  let choices = null, version = "", list = [], turn = 0, reported = 0;
  const look = { colours: null, opacity: 0.6 };

  const ask = async (path, query = {}) => {
    const response = await fetch(`${path}?${new URLSearchParams(query)}`);
    if (response.status === 401) throw new Error("the token is no longer valid; open the address that heatproof serve printed");
    const result = await response.json();
    if (!response.ok) throw new Error(result.error);
    return result;
  };
  const trouble = (error) => {
    const gone = error instanceof TypeError; // what fetch throws if there is no server
    at("trouble").textContent = gone ? "The server no longer responds; the page shows the last state." : `Error: ${error.message}`;
    at("trouble").hidden = false;
  };
  const well = () => { at("trouble").hidden = true; };

  /* Maps that come into view together are requested together, and cached. */
  const cache = new Map(), waiting = new Map();
  const fetchMaps = async (group) => {
    const wanted = waiting.get(group), [model, checkpoint, method] = JSON.parse(group);
    waiting.delete(group);
    let result = {};
    try {
      result = await ask("/maps", { model, checkpoint, method, keys: [...wanted.keys()].join(",") });
    } catch (error) { trouble(error); }
    wanted.forEach((resolve, key) => resolve(result[key] || null));
  };
  const mapOf = (checkpoint, method, key) => {
    const group = JSON.stringify([choices.model, checkpoint, method]), name = `${group} ${key}`;
    if (cache.has(name)) return cache.get(name);
    const promise = new Promise((resolve) => {
      if (!waiting.has(group)) { waiting.set(group, new Map()); setTimeout(fetchMaps, 0, group); }
      waiting.get(group).set(key, resolve);
    });
    cache.set(name, promise);
    promise.then((result) => { if (!result) cache.delete(name); }); // it may come with a later unit
    if (cache.size > MOST_MAPS) cache.delete(cache.keys().next().value);
    return promise;
  };

  /* Images and maps are fetched when their card comes near the window. */
  const eye = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      eye.unobserve(entry.target);
      const box = entry.target.build();
      entry.target.replaceWith(box);
    }
  }, { rootMargin: "300px" });

  const here = () => ({ method: choice.method, checkpoint: choices.checkpoint });
  const sides = () => (choice.against ? [here(), JSON.parse(choice.against)] : [here()]);
  const words = (side) => (sides().every((each) => each.checkpoint === choices.checkpoint) ? side.method : `${side.method} at ${side.checkpoint}`);
  const metricOf = (name) => choices.metrics.find((metric) => metric.name === name);
  const placeOf = (name) => choices.methods.findIndex((method) => method.name === name);
  const query = () => {
    const { model, checkpoint, method, label, answer: right, search, sort, order, page } = choice;
    const beside = sides().length > 1 ? sides()[1].checkpoint : "";
    return { model, checkpoint, method, class: label, answer: right, search, sort, order, page, beside };
  };

  const shownScores = (image) => {
    const names = new Set([choice.sort, choices.headline].filter((name) => name && image.scores[name]));
    const [left, right] = sides();
    return [...names].map((name) => {
      const metric = metricOf(name), mine = image.scores[name][placeOf(left.method)];
      if (!right) return score(metric, mine);
      const scores = right.checkpoint === choices.checkpoint ? image.scores : image.beside || {};
      const what = make("span", { class: "what" }), a = make("span"), b = make("span");
      what.textContent = metric.plain.split(":")[0] + arrow(metric);
      a.textContent = number(mine);
      b.textContent = number((scores[name] || [])[placeOf(right.method)]);
      return make("div", { class: "pair" }, what, a, b);
    });
  };
  const card = (image) => {
    const id = make("div", { class: "id" }, outside(image.id));
    id.title = image.id;
    const empty = make("div", { class: "frame" });
    empty.build = () => stack(image.picture, sides().map((side) => ({
      map: () => mapOf(side.checkpoint, side.method, image.key), label: `${words(side)}: map of ${image.id}`,
    })), look.colours);
    eye.observe(empty);
    const button = make("button", { type: "button", onclick: () => compare(image.key) });
    button.textContent = "Compare";
    button.setAttribute("aria-label", `Compare maps of ${image.id}`);
    const { floor } = choices.methods[placeOf(choice.method)];
    return make("li", { class: "card" }, empty, id, answer(image, floor), ...shownScores(image), button);
  };
  const compare = (key) => {
    const [left, right] = sides();
    const other = choices.methods.find((method) => method.name !== left.method);
    heatproof.compareTwo({
      list, place: list.findIndex((image) => image.key === key), choices, ask, mapOf, ...look,
      sides: [left, right || { ...left, method: other ? other.name : left.method }],
    });
  };

  const cards = make("ul", { class: "cards" }), means = make("ul", { class: "means" });
  const status = make("p", { class: "status", role: "status" });
  const csv = make("a", { class: "button", download: "" });
  csv.textContent = "Save CSV";
  const turnTo = (page) => { choice.page = page; show(); };
  const pager = () => {
    const text = make("span"), root = make("nav", { class: "pager", "aria-label": "Pages" });
    const button = (label, page) => {
      const made = make("button", { type: "button", onclick: () => { turnTo(page()); cards.scrollIntoView({ block: "nearest" }); } });
      made.textContent = label;
      return made;
    };
    const back = [button("First", () => 1), button("Previous", () => choice.page - 1)];
    const on = [button("Next", () => choice.page + 1), button("Last", () => root.pages)];
    root.append(...back, text, ...on);
    root.update = ({ page, pages }) => {
      Object.assign(root, { pages });
      root.hidden = pages < 2;
      text.textContent = `Page ${page.toLocaleString("en")} of ${pages.toLocaleString("en")}`;
      back.forEach((made) => { made.disabled = page === 1; });
      on.forEach((made) => { made.disabled = page === pages; });
    };
    return root;
  };
  const below = pager();

  /* Cards that did not change stay, so that nothing flickers while a run goes on. */
  let before = new Map();
  const draw = (result) => {
    const view = JSON.stringify([sides(), choice.sort, choices.headline]), now = new Map(), had = document.activeElement;
    list = result.images;
    for (const image of list) {
      const look = view + JSON.stringify(image), old = before.get(image.key);
      now.set(image.key, old && old.look === look ? old : { look, element: card(image) });
    }
    before = now;
    const elements = [...now.values()].map((entry) => entry.element);
    if (elements.length !== cards.children.length || elements.some((element, i) => element !== cards.children[i])) {
      cards.replaceChildren(...elements);
      if (cards.contains(had)) had.focus({ preventScroll: true });
    }
    choice.page = result.page;
    below.update(result);
    const last = result.first + list.length - 1, all = result.of.toLocaleString("en");
    status.textContent = list.length
      ? `${result.total.toLocaleString("en")} of ${all} images, ${result.first.toLocaleString("en")} to ${last.toLocaleString("en")} shown: ${sides().map(words).join(" beside ")}`
      : `No image matches these filters (of ${all})`;
    means.replaceChildren(...choices.metrics.filter((metric) => result.means[metric.name]).map((metric) => {
      const [these, every] = result.means[metric.name], line = make("li"), value = make("b"), rest = make("span");
      value.textContent = ` ${number(these)}`;
      rest.textContent = result.total === result.of ? "" : ` (all: ${number(every)})`;
      line.append(`mean ${metric.plain.split(":")[0]}${arrow(metric)}`, value, rest);
      return line;
    }));
    csv.href = `/rows.csv?${new URLSearchParams({ ...query(), page: 1 })}`;
  };
  const show = async () => {
    const mine = ++turn;
    try {
      const result = await ask("/images", query());
      if (mine === turn) { draw(result); well(); }
    } catch (error) { trouble(error); }
  };

  /* The report's own sections; what is open stays open, and the focus where it was. */
  const put = (id, html) => {
    const root = at(id), stops = () => [...root.querySelectorAll("a, summary, button, [tabindex]")];
    if (root.given === html) return;
    const open = new Set([...root.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
    const focused = stops().indexOf(document.activeElement);
    root.given = html;
    root.innerHTML = html; // made by the server, which escapes whatever came from outside
    root.querySelectorAll("details").forEach((fold) => { fold.open = open.has(fold.firstElementChild.textContent); });
    root.querySelectorAll("svg.chart").forEach((chart) => {
      const name = chart.querySelector("title").textContent;
      const button = make("button", { type: "button", class: "save", onclick: () => heatproof.save(heatproof.fileName(name, "svg"), heatproof.toSVG(chart)) });
      button.textContent = "Save SVG";
      button.setAttribute("aria-label", `Save the chart as SVG: ${name}`);
      chart.after(button);
    });
    if (focused >= 0 && stops()[focused]) stops()[focused].focus({ preventScroll: true });
  };
  const report = async () => {
    const mine = ++reported;
    try {
      const result = await ask("/report", { model: choice.model, checkpoint: choice.checkpoint });
      if (mine !== reported) return;
      put("head", result.head);
      put("verdict-here", result.verdict);
      put("contents", result.contents);
      put("first-here", result.first);
      put("rest-here", result.sections + result.left_out);
      const plain = new DOMParser().parseFromString(result.title, "text/html").documentElement.textContent;
      if (document.title === "heatproof live") setTimeout(heatproof.unfold);
      document.title = plain;
    } catch (error) { trouble(error); }
  };

  /* Controls. */
  const fields = {}, groups = {};
  const field = (key, label, change) => {
    fields[key] = make("select", { onchange: () => { choice[key] = fields[key].value; choice.page = 1; change(); } });
    groups[key] = labelled(label, fields[key], fields[key]);
    return groups[key];
  };
  const elsewhere = () => { choices = null; choice.against = ""; renew(); };
  const whole = () => { list = []; before = new Map(); fillFields(); show(); };
  const best = () => {
    const metric = metricOf(choice.sort);
    choice.order = (metric ? metric.up !== false : choice.sort === "confidence") ? "down" : "up";
  };
  const fillFields = () => {
    const { methods, metrics, checkpoints, models, classes } = choices, plain = (text) => ({ value: text, text });
    if (placeOf(choice.method) < 0) choice.method = (methods.find((method) => !method.floor) || methods[0] || { name: "" }).name;
    if (choice.sort !== "name" && choice.sort !== "confidence" && !metricOf(choice.sort)) {
      choice.sort = choices.headline || "name";
      best();
    }
    fill(fields.model, models.map(plain), choices.model);
    groups.model.hidden = models.length < 2;
    const lastOne = checkpoints[checkpoints.length - 1];
    fill(fields.checkpoint, [{ value: "", text: `last (${lastOne})` }, ...checkpoints.map(plain)], choice.checkpoint);
    fill(fields.method, methods.map(named), choice.method);
    const side = (method, checkpoint, text) => ({ value: JSON.stringify({ method, checkpoint }), text });
    const others = methods.filter((method) => method.name !== choice.method).map((method) => side(method.name, choices.checkpoint, named(method).text));
    const times = checkpoints.filter((name) => name !== choices.checkpoint).map((name) => side(choice.method, name, name));
    if (![...others, ...times].some((option) => option.value === choice.against)) choice.against = "";
    fill(fields.against, [{ value: "", text: "nothing" }, ...[["Another method", others], ["Another checkpoint", times]]
      .filter(([, options]) => options.length).map(([group, options]) => ({ group, options }))], choice.against);
    fill(fields.label, [{ value: "", text: "all" }, ...classes.map((each) => ({ value: String(each.label), text: each.name }))], choice.label);
    fill(fields.answer, [{ value: "", text: "right and wrong" }, plain("right"), plain("wrong")], choice.answer);
    fill(fields.sort, [plain("name"), plain("confidence"), ...metrics.map((metric) => ({ value: metric.name, text: metric.plain.split(":")[0] + arrow(metric) }))], choice.sort);
    const [down, up] = choice.sort === "name" ? ["last first", "first first"] : ["highest first", "lowest first"];
    fill(fields.order, [{ value: "down", text: down }, { value: "up", text: up }], choice.order);
    wiping.hidden = !choice.against;
    const names = Object.keys(choices.colours);
    fill(fields.colours, names.map(plain), fields.colours.value || names[0]);
    if (!look.colours) recolour();
  };
  const recolour = () => {
    look.colours = heatproof.ramp(choices.colours[fields.colours.value]);
    cards.querySelectorAll(".frame").forEach((box) => box.recolour && box.recolour(look.colours));
    heatproof.paintScale(scale, look.colours);
  };
  const slide = (label, value, show) => {
    const seen = make("output"), range = make("input", { type: "range", min: 0, max: 100, step: 5, value, oninput: () => set(Number(range.value)) });
    const set = (percent) => { seen.textContent = `${percent} %`; show(percent); };
    set(value);
    return labelled(label, range, make("div", { class: "range" }, range, seen));
  };
  const root = at("browse"), scale = make("canvas", { class: "scale", width: 256, height: 1, "aria-hidden": "true" });
  const wiping = slide("Slider", 50, (percent) => root.style.setProperty("--wipe", `${percent}%`));
  const heat = slide("Heatmap opacity", 60, (percent) => { look.opacity = percent / 100; root.style.setProperty("--heat", look.opacity); });
  let typed = 0;
  const search = make("input", { type: "search", autocomplete: "off", spellcheck: "false", oninput: () => {
    clearTimeout(typed);
    typed = setTimeout(() => { choice.search = search.value; choice.page = 1; show(); }, TYPING);
  } });
  const controls = make("div", { class: "controls" },
    field("model", "Model", () => { choice.checkpoint = ""; elsewhere(); }), field("checkpoint", "Checkpoint", elsewhere),
    field("method", "Method", whole), field("against", "Compare with", whole), wiping,
    field("label", "True class", show), field("answer", "Answer", show), labelled("Name contains", search, search),
    field("sort", "Sort by", () => { best(); whole(); }), field("order", "Order", show), heat,
    field("colours", "Colours", recolour), scale);
  const bar = make("div", { class: "bar" }, status, make("div", { class: "tools" }, csv));

  const renew = async () => {
    try {
      choices = await ask("/choices", { model: choice.model, checkpoint: choice.checkpoint });
      if (!root.childElementCount) root.append(controls, bar, means, cards, below);
      fillFields();
      await Promise.all([show(), report()]);
    } catch (error) { trouble(error); }
  };
  const ago = (seconds) => (seconds < 90 ? `${seconds} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`);
  const tell = ({ units, rows, idle }) => {
    const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
    at("live").textContent = rows ? `${count(units, "unit")} finished, ${count(rows, "row")}; the last ${ago(idle)} ago`
      : "Waiting for the first unit of the run; this page updates automatically.";
    at("live").classList.toggle("going", Boolean(rows) && idle < 60);
    if (!rows) {
      at("verdict").textContent = "Waiting for the first unit";
      document.querySelector("#verdict-here .lead").textContent = "The run has not finished a unit yet. This page updates automatically.";
    }
  };
  const poll = async () => {
    try {
      const now = await ask("/state");
      well();
      tell(now);
      if (now.rows && now.version !== version) { version = now.version; await renew(); }
    } catch (error) { trouble(error); }
    setTimeout(poll, document.hidden ? 5 * EVERY : EVERY);
  };
  poll();
})();
