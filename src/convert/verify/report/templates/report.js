(() => {
  const box = document.getElementById("q");
  if (!box) return;
  const rows = [...document.querySelectorAll("#mapping tbody tr")];
  const text = (cells) => [...cells].map((cell) => cell.textContent).join(" ").toLowerCase();
  const texts = rows.map((row) => text(row.cells));
  const names = rows.map((row) => text([...row.cells].slice(0, -1))); // without the rule, whose line is a number, too
  const count = document.getElementById("count");
  const tests = () => box.value.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const whole = /^\d+$/.test(word) && new RegExp("(^|\\D)" + word + "(\\D|$)"); // 2 is not 12 or 32
    return (k) => whole ? whole.test(names[k]) : texts[k].includes(word);
  });
  const filter = () => {
    const all = tests();
    let shown = 0;
    rows.forEach((row, k) => {
      row.hidden = !all.every((test) => test(k));
      shown += !row.hidden;
    });
    count.textContent = shown + " of " + rows.length;
  };
  const read = () => {
    if (!location.hash.startsWith("#q=")) return;
    try { box.value = decodeURIComponent(location.hash.slice(3)); } catch { box.value = location.hash.slice(3); }
  };
  document.documentElement.classList.add("scripted");
  box.addEventListener("input", () => {
    filter();
    try { history.replaceState(null, "", "#q=" + encodeURIComponent(box.value)); } catch { /* some browsers: not in files */ }
  });
  addEventListener("hashchange", () => { read(); filter(); });
  read();
  filter();
})();
