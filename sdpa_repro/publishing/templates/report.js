"use strict";
(() => {
  const root = document.documentElement;
  const redraws = [];
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

  /* A canvas of a given height in CSS pixels, sharp on any screen; returns its context and its width. */
  function prepared(canvas, height) {
    const width = Math.max(40, Math.floor(canvas.clientWidth || canvas.parentElement.clientWidth));
    const ratio = Math.min(3, window.devicePixelRatio || 1);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    return { context, width };
  }

  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const css = (parts) => `rgb(${parts.map(Math.round).join(",")})`;
  function mixed(stops, share) {
    const place = clamp(share, 0, 1) * (stops.length - 1);
    const at = Math.min(Math.floor(place), stops.length - 2);
    return stops[at].map((low, index) => low + (stops[at + 1][index] - low) * (place - at));
  }

  /* A colour for each of the 256 codes: blue within the threshold, from orange to dark (dark page: bright) beyond. */
  function palette(scale) {
    const cold = ["--cold0", "--cold1", "--cold2"].map((name) => rgb(colour(name)));
    const hot = ["--hot0", "--hot1", "--hot2", "--hot3"].map((name) => rgb(colour(name)));
    const found = [];
    for (let code = 0; code < 256; code += 1) {
      const decades = (code - scale.limit) / scale.decade;
      if (code === scale.nonfinite) found.push(rgb(colour("--nan")));
      else if (code < 3) found.push(rgb(colour("--card")));
      else found.push(code <= scale.limit ? mixed(cold, 1 + decades / 2) : mixed(hot, decades / 3));
    }
    return found;
  }

  /* Diagonal lines, drawn from one tile so that neighbouring fields continue each other. */
  function hatch(context, x, y, width, height, line = "--hatch", ground = "--card") {
    const tile = document.createElement("canvas");
    [tile.width, tile.height] = [6, 6];
    const pen = tile.getContext("2d");
    pen.fillStyle = colour(ground);
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = colour(line);
    pen.lineWidth = 1.2;
    pen.beginPath();
    for (const at of [-6, 0, 6]) {
      pen.moveTo(at, 6);
      pen.lineTo(at + 6, 0);
    }
    pen.stroke();
    context.fillStyle = context.createPattern(tile, "repeat");
    context.fillRect(x, y, width, height);
  }

  /* Distance between labels: the smallest round number that leaves `room` pixels to each. */
  function spacing(pixels, room, tile) {
    const steps = tile ? [1, 2, 4, 8, 16, 32, 64, 128, 256].map((many) => many * tile)
      : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];
    return steps.find((step) => step * pixels >= room) || steps[steps.length - 1];
  }

  function heatMap(card) {
    const told = JSON.parse(card.querySelector("script.data").textContent);
    const { columns, rows, heads, batches, step, scale } = told;
    const codes = bytes(told.codes);
    const planes = told.planes.length;
    const overview = card.querySelector(".overview");
    const detail = card.querySelector(".detail");
    const readout = card.querySelector(".readout");
    const tiles = [...card.querySelectorAll("[data-tile]")];
    const moves = [...card.querySelectorAll("[data-go]")];
    const LEFT = batches > 1 ? 64 : 54;
    const code = (plane, column) => codes[plane * columns + column];
    const bad = new Uint8Array(columns);
    for (let plane = 0; plane < planes; plane += 1)
      for (let column = 0; column < columns; column += 1)
        bad[column] = Math.max(bad[column], code(plane, column));
    const wrong = [];
    for (let column = 0; column < columns; column += 1) if (bad[column] > scale.limit) wrong.push(column);
    moves.forEach((button) => { button.disabled = !wrong.length; });
    const start = card.querySelector("[data-row]");
    let tile = told.tile;
    let cursor = { plane: start ? +start.dataset.plane : 0, column: start ? Math.floor(+start.dataset.row / step) : 0 };
    let view = { column: 0, columns: 1, plane: 0, planes: 1 };
    let colours = [];

    const label = (plane) => {
      const index = told.planes[plane];
      const head = `head ${index % heads}`;
      return batches > 1 ? `b${Math.floor(index / heads)} h${index % heads}` : head;
    };

    function frame(width) {
      view.columns = Math.min(columns, Math.max(16, Math.floor((width - LEFT) / 13)));
      view.planes = Math.min(planes, 24);
      const inside = (at, first, count) => at >= first && at < first + count;
      if (!inside(cursor.column, view.column, view.columns)) view.column = cursor.column - Math.floor(view.columns / 2);
      if (!inside(cursor.plane, view.plane, view.planes)) view.plane = cursor.plane - Math.floor(view.planes / 2);
      view.column = clamp(view.column, 0, columns - view.columns);
      view.plane = clamp(view.plane, 0, planes - view.planes);
    }

    /* The picture of all rows is painted once for each size, tile grid and colour scheme; the frame moves over it. */
    const base = { canvas: document.createElement("canvas"), key: "" };
    function drawOverview() {
      const line = clamp(Math.floor(200 / planes), 1, 12);
      const height = Math.min(planes * line, 260);
      const { context, width } = prepared(overview, height + 26);
      const across = width - LEFT;
      const key = [overview.width, overview.height, tile, colour("--cold0")].join();
      if (key !== base.key) {
        paintOverview(context, across, height);
        [base.canvas.width, base.canvas.height, base.key] = [overview.width, overview.height, key];
        base.canvas.getContext("2d").drawImage(overview, 0, 0);
      } else context.drawImage(base.canvas, 0, 0, width, height + 26);
      if (view.columns < columns || view.planes < planes) {
        const [scaleX, top] = [across / columns, 8 + (view.plane / planes) * height];
        context.strokeStyle = colour("--ink");
        context.lineWidth = 2;
        context.strokeRect(LEFT + view.column * scaleX, top, view.columns * scaleX, (view.planes / planes) * height);
      }
    }

    function paintOverview(context, across, height) {
      const picture = document.createElement("canvas");
      picture.width = Math.min(columns, Math.round(across * (window.devicePixelRatio || 1)));
      picture.height = Math.min(planes, height);
      const pixels = picture.getContext("2d").createImageData(picture.width, picture.height);
      const worst = new Uint8Array(picture.width * picture.height);
      for (let plane = 0; plane < planes; plane += 1) {
        const first = Math.floor((plane * picture.height) / planes) * picture.width;
        for (let column = 0; column < columns; column += 1) {
          const at = first + Math.floor((column * picture.width) / columns);
          worst[at] = Math.max(worst[at], code(plane, column));
        }
      }
      worst.forEach((value, at) => pixels.data.set([...colours[value], 255], at * 4));
      picture.getContext("2d").putImageData(pixels, 0, 0);
      context.imageSmoothingEnabled = false;
      context.drawImage(picture, LEFT, 8, across, height);
      const scaleX = across / columns;
      masked(context, across, height, scaleX);
      context.strokeStyle = colour("--line");
      context.strokeRect(LEFT + 0.5, 8.5, across - 1, height - 1);
      grid(context, LEFT, 8, height, 0, columns, scaleX, 8);
      context.fillStyle = colour("--wrong");
      for (const column of wrong) {
        const x = LEFT + (column + 0.5) * scaleX;
        context.beginPath();
        context.moveTo(x - 4, 0);
        context.lineTo(x + 4, 0);
        context.lineTo(x, 7);
        context.fill();
      }
      labels(context, height + 17, 0, columns, scaleX, 54);
      context.textAlign = "right";
      const several = planes === heads * batches && batches > 1;
      context.fillText(several ? `${batches} × ${heads}` : `${planes} heads`, LEFT - 6, 8 + height / 2);
    }

    /* Stretches of rows that are not judged: head by head, or where there are too many heads for that, of all. */
    function masked(context, across, height, scaleX) {
      const each = planes * 2 <= height;
      for (let plane = 0; plane < (each ? planes : 1); plane += 1) {
        const [top, bottom] = each ? [plane, plane + 1].map((at) => 8 + (at * height) / planes) : [8, 8 + height];
        const open = (column) => (each ? code(plane, column) : bad[column]) > 1;
        for (let first = 0; first < columns; first += 1) {
          if (open(first)) continue;
          let last = first;
          while (last + 1 < columns && !open(last + 1)) last += 1;
          hatch(context, LEFT + first * scaleX, top, Math.max(1, (last - first + 1) * scaleX), bottom - top);
          first = last;
        }
      }
    }

    /* Lines at the borders of the tiles, where they are at least `least` pixels apart. */
    function grid(context, left, top, height, first, count, scaleX, least) {
      if (!tile || (tile / step) * scaleX < least) return;
      context.strokeStyle = colour("--grid");
      context.lineWidth = 1;
      context.beginPath();
      for (let row = Math.ceil((first * step) / tile) * tile; row < (first + count) * step; row += tile) {
        const x = Math.round(left + (row / step - first) * scaleX) + 0.5;
        context.moveTo(x, top);
        context.lineTo(x, top + height);
      }
      context.stroke();
    }

    function labels(context, y, first, count, scaleX, room) {
      context.fillStyle = colour("--soft");
      context.textAlign = "center";
      const every = spacing(scaleX / step, room, tile);
      for (let row = Math.ceil((first * step) / every) * every; row < Math.min(rows, (first + count) * step); row += every) {
        const x = LEFT + (row / step - first + 0.5) * scaleX;
        context.fillText(String(row), Math.min(x, LEFT + count * scaleX - 3.2 * String(row).length), y);
      }
    }

    function drawDetail() {
      const line = clamp(Math.floor(300 / view.planes), 12, 26);
      const height = view.planes * line;
      const { context, width } = prepared(detail, height + 22);
      const size = (width - LEFT) / view.columns;
      for (let y = 0; y < view.planes; y += 1) {
        context.fillStyle = colour(view.plane + y === cursor.plane ? "--ink" : "--soft");
        context.textAlign = "right";
        if (line >= 10) context.fillText(label(view.plane + y), LEFT - 6, y * line + line / 2);
        for (let x = 0; x < view.columns; x += 1) {
          const value = code(view.plane + y, view.column + x);
          const [left, top] = [LEFT + x * size, y * line];
          context.fillStyle = css(colours[value]);
          context.fillRect(left, top, size - 0.7, line - 0.7);
          if (value <= 1) hatch(context, left, top, size - 0.7, line - 0.7);
          if (value > scale.limit) cross(context, left, top, size - 0.7, line - 0.7, value);
        }
      }
      grid(context, LEFT, 0, height, view.column, view.columns, size, 6);
      labels(context, height + 12, view.column, view.columns, size, 40);
      context.strokeStyle = colour("--ink");
      context.lineWidth = 2;
      const [x, y] = [cursor.column - view.column, cursor.plane - view.plane];
      context.strokeRect(LEFT + x * size - 1, y * line - 0.5, size + 1.3, line + 0.3);
    }

    /* Wrong cells are told by a cross as well as by their colour. */
    function cross(context, left, top, width, height, value) {
      const dark = colours[value][0] * 0.3 + colours[value][1] * 0.59 + colours[value][2] * 0.11 < 130;
      const arm = Math.min(width, height) * 0.22;
      context.strokeStyle = dark ? "#fff" : "#000";
      context.lineWidth = 1.3;
      context.beginPath();
      const [x, y] = [left + width / 2, top + height / 2];
      context.moveTo(x - arm, y - arm);
      context.lineTo(x + arm, y + arm);
      context.moveTo(x + arm, y - arm);
      context.lineTo(x - arm, y + arm);
      context.stroke();
    }

    function words() {
      const value = code(cursor.plane, cursor.column);
      const first = cursor.column * step;
      const last = Math.min(rows, first + step) - 1;
      const index = told.planes[cursor.plane];
      const where = `${batches > 1 ? `batch ${Math.floor(index / heads)}, ` : ""}head ${index % heads}`;
      const row = first === last ? `query row ${first}` : `query rows ${first}–${last}`;
      const inTile = tile && first === last ? `, row ${first % tile} of tile ${Math.floor(first / tile)}` : "";
      const middle = value > scale.limit ? -0.5 : 0.5;
      const found = 10 ** ((value - scale.limit + middle) / scale.decade);
      const ratio = value > scale.limit ? found : Math.min(1, found);
      const round = ratio >= 10 ? (+ratio.toPrecision(2)).toLocaleString("en") : ratio.toPrecision(2);
      let said = `about ${round}× the threshold: ${value > scale.limit ? "WRONG" : "right"}`;
      if (value <= scale.limit && value <= 3) said = "far below the threshold: right";
      if (value === scale.nonfinite) said = "NaN or infinity: WRONG";
      if (value === 0) said = "fully masked: not judged";
      if (value === 1) said = "can see NaN or infinity that is masked out: not judged";
      if (step > 1 && value > scale.limit) said += " (the worst of them)";
      readout.textContent = `${where}, ${row}${inTile}: ${said}`;
    }

    function draw() {
      colours = palette(scale);
      frame(detail.clientWidth || detail.parentElement.clientWidth);
      const whole = view.columns >= columns && view.planes >= planes;
      overview.hidden = whole;
      overview.previousElementSibling.hidden = whole;
      card.querySelector(".zoomed").hidden = whole;
      if (!whole) drawOverview();
      drawDetail();
      words();
      tiles.forEach((button) => button.setAttribute("aria-pressed", String(+button.dataset.tile === tile)));
    }

    function moveTo(plane, column) {
      cursor = { plane: clamp(plane, 0, planes - 1), column: clamp(column, 0, columns - 1) };
      draw();
    }

    /* The next column in which some head is wrong, and the head that is worst in it. */
    function go(way) {
      const next = way > 0 ? wrong.find((column) => column > cursor.column) : wrong.findLast((column) => column < cursor.column);
      const column = next === undefined ? wrong[way > 0 ? 0 : wrong.length - 1] : next;
      if (column === undefined) return;
      let plane = 0;
      for (let other = 0; other < planes; other += 1) if (code(other, column) > code(plane, column)) plane = other;
      moveTo(plane, column);
    }

    const place = (event, canvas, height, first, columnsShown, firstPlane, planesShown, top) => {
      const box = canvas.getBoundingClientRect();
      const x = (event.clientX - box.left - LEFT) / (box.width - LEFT);
      const y = (event.clientY - box.top - top) / (box.height - height);
      return [firstPlane + Math.floor(clamp(y, 0, 0.999) * planesShown), first + Math.floor(clamp(x, 0, 0.999) * columnsShown)];
    };
    overview.addEventListener("pointerdown", (event) => moveTo(...place(event, overview, 26, 0, columns, 0, planes, 8)));
    overview.addEventListener("pointermove", (event) => {
      if (event.buttons) moveTo(...place(event, overview, 26, 0, columns, 0, planes, 8));
    });
    const inDetail = (event) => place(event, detail, 22, view.column, view.columns, view.plane, view.planes, 0);
    detail.addEventListener("pointermove", (event) => moveTo(...inDetail(event)));
    detail.addEventListener("pointerdown", (event) => moveTo(...inDetail(event)));
    detail.addEventListener("keydown", (event) => {
      const page = view.columns - 1;
      const steps = {
        ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
        PageUp: [0, -page], PageDown: [0, page], Home: [0, -columns], End: [0, columns],
      };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "n" || event.key === "p") go(event.key === "n" ? 1 : -1);
      else if (steps[event.key]) moveTo(cursor.plane + steps[event.key][0], cursor.column + steps[event.key][1]);
      else return;
      event.preventDefault();
    });
    moves.forEach((button) => button.addEventListener("click", () => go(+button.dataset.go)));
    tiles.forEach((button) => button.addEventListener("click", () => { tile = +button.dataset.tile; draw(); }));
    card.querySelectorAll("[data-row]").forEach((button) => button.addEventListener("click", () =>
      moveTo(+button.dataset.plane, Math.floor(+button.dataset.row / step))));
    redraws.push(draw);
  }

  function maskPicture(card) {
    const told = JSON.parse(card.querySelector("script.data").textContent);
    const canvas = card.querySelector("canvas.mask");
    const cells = bytes(told.cells);
    const masked = bytes(told.masked);
    function draw() {
      const [left, top] = [52, 20];
      const room = Math.max(40, (canvas.clientWidth || 300) - left - 2);
      const height = Math.round(room * clamp(told.rows / told.keys, 0.12, 1.6));
      const { context, width } = prepared(canvas, height + top + 6);
      const across = width - left - 2;
      const stops = [rgb(colour("--hidden")), rgb(colour("--mask"))];
      const picture = document.createElement("canvas");
      [picture.width, picture.height] = [told.width, told.height];
      const pixels = picture.getContext("2d").createImageData(told.width, told.height);
      cells.forEach((value, at) => pixels.data.set([...mixed(stops, value / 255).map(Math.round), 255], at * 4));
      picture.getContext("2d").putImageData(pixels, 0, 0);
      context.imageSmoothingEnabled = false;
      context.drawImage(picture, left, top, across, height);
      const line = height / told.height;
      for (let first = 0; first < told.height; first += 1) {
        if (!masked[first]) continue;
        let last = first;
        while (masked[last + 1] === masked[first]) last += 1;
        const tall = Math.max(2, (last - first + 1) * line);
        hatch(context, left, top + first * line, masked[first] === 2 ? across : across / 8, tall, "--plant", "--plant-bg");
        first = last;
      }
      context.strokeStyle = colour("--line");
      context.strokeRect(left + 0.5, top + 0.5, across - 1, height - 1);
      context.fillStyle = colour("--soft");
      context.textAlign = "left";
      context.fillText("key 0", left, 10);
      context.textAlign = "right";
      context.fillText(String(told.keys - 1), left + across, 10);
      context.fillText("row 0", left - 15, top + 7);
      if (height > 40) context.fillText(String(told.rows - 1), left - 15, top + height - 6);
      context.fillStyle = colour("--wrong");
      for (const [first, last] of told.wrong) {
        const [from, to] = [first, last + 1].map((row) => top + (row / told.rows) * height);
        const middle = clamp((from + to) / 2, top + 3, top + height - 3);
        context.fillRect(left - 4, from, 3, Math.max(2, to - from));
        context.beginPath();
        context.moveTo(left - 11, middle - 4);
        context.lineTo(left - 11, middle + 4);
        context.lineTo(left - 4, middle);
        context.fill();
      }
    }
    redraws.push(draw);
  }

  /* Copying works without a permission: where the clipboard is closed the text is selected for the reader's own keys. */
  function copying(button) {
    const code = button.parentElement.querySelector("code");
    const done = (text) => {
      button.textContent = text;
      setTimeout(() => { button.textContent = "Copy"; }, 2500);
    };
    function bySelection() {
      const range = document.createRange();
      range.selectNodeContents(code);
      const selection = getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      let copied = false;
      try { copied = document.execCommand("copy"); } catch { copied = false; }
      if (copied) selection.removeAllRanges();
      done(copied ? "Copied" : "Selected: press Ctrl+C");
    }
    button.addEventListener("click", () => {
      if (!navigator.clipboard || !window.isSecureContext) { bySelection(); return; }
      navigator.clipboard.writeText(code.textContent).then(() => done("Copied"), bySelection);
    });
  }

  document.querySelectorAll(".card.heat").forEach((card) => { if (card.querySelector("canvas")) heatMap(card); });
  document.querySelectorAll(".card.mask").forEach((card) => { if (card.querySelector("canvas")) maskPicture(card); });
  document.querySelectorAll("[data-copy]").forEach(copying);
  const redraw = () => redraws.forEach((draw) => draw());
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(redraw);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    document.querySelectorAll("details").forEach((one) => { one.open = true; });
    redraw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    redraw();
  });
  redraw();
})();
