"""How pages look, and the little that they do: one style sheet and one script, which stand in every page.

Invariants: colours come in pairs, for light and dark; figures name them by number (`--c1`). Nothing is fetched: the
content policy of the page allows this script alone, so that no text of a run can become one.
"""

from __future__ import annotations

import base64
import hashlib

NUM_COLOURS = 8  # of Okabe and Ito in light, brighter ones of the same hues in dark


def within_colours(number: int) -> int:
    """The number of a colour that there is, for any number from 1 on."""
    return (number - 1) % NUM_COLOURS + 1


STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --grid: #e4e8ec;
  --card: #f5f7f9; --good: #0a6b38; --warn: #855200; --bad: #b00020; --info: #0b57a4; --c1: #0072b2; --c2: #d55e00;
  --c3: #009e73; --c4: #b8548e; --c5: #b37d00; --c6: #3a9bd9; --c7: #1b1f24; --c8: #8a8f95 }
@media screen and (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e8ebee; --soft: #a3adb7;
  --line: #343b42; --grid: #2a3036; --card: #1e2328; --good: #5ed495; --warn: #f0b45c; --bad: #ff8a8a;
  --info: #7fbcff; --c1: #57b0f0; --c2: #ff9650; --c3: #3ecf9f; --c4: #ec9bca; --c5: #f3c244; --c6: #9ad5fb;
  --c7: #f2f4f6; --c8: #8d959d } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 74rem; margin: 0 auto; padding: 1.2rem 1rem 3rem;
  color: var(--ink); background: var(--page); overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem } p { margin: .5rem 0; max-width: 46rem }
.head { display: flex; flex-wrap: wrap; gap: .4rem .9rem; align-items: center }
.status { border: 1.5px solid; border-radius: 1rem; padding: 0 .7rem; font-weight: 600; font-size: .9rem }
.good { color: var(--good) } .warn { color: var(--warn) } .bad, .fail { color: var(--bad) } .info { color: var(--info) }
.fail { font-weight: 600 } .note { color: var(--soft); font-size: .9rem } .lead { font-size: 1.1rem }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: .7rem; margin: 1rem 0 }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem }
.tile b { display: block; font-size: 1.7rem; line-height: 1.25; font-variant-numeric: tabular-nums }
.tile small { display: block; font-size: .82rem; color: var(--soft); line-height: 1.35 }
.bar { height: .7rem; border: 1px solid var(--line); border-radius: .4rem; background: var(--card); overflow: hidden }
.bar i { display: block; height: 100%; background: var(--c1) }
.table { overflow-x: auto; margin: .6rem 0 } table { border-collapse: collapse; font-size: .9rem }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
td { font-variant-numeric: tabular-nums; white-space: nowrap; overflow-wrap: normal }
th.num, td.num { text-align: right }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 16rem }
th { overflow-wrap: normal } th button { font: inherit; color: inherit; background: none; border: 0; padding: 0;
  cursor: pointer; text-align: inherit }
th button::after { content: "\\2195"; opacity: .45; padding-left: .2em }
th[aria-sort=ascending] button::after { content: "\\2191"; opacity: 1 }
th[aria-sort=descending] button::after { content: "\\2193"; opacity: 1 }
tr.best td { font-weight: 650; background: var(--card) }
.switch { display: flex; gap: 1rem; font-size: .9rem; margin: .4rem 0 } .switch input { accent-color: var(--c1) }
.keys { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .85rem; list-style: none; margin: .3rem 0;
  padding: 0 }
.keys i { display: inline-block; width: 1.6em; margin-right: .4em; vertical-align: middle; border-top: 3px solid }
.keys i.thin { border-top-width: 1.5px; opacity: .75 } .keys i.dashed { border-top-style: dashed }
.keys i.dotted { border-top-style: dotted } .keys i.area { border-top-width: .8em }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); gap: 1.2rem }
figure { margin: 0; container-type: inline-size; break-inside: avoid } figcaption { font-size: .9rem }
figcaption b { font-weight: 650 } figure svg { width: 100%; height: auto; display: block }
figure svg path { vector-effect: non-scaling-stroke }
figure svg text { font-family: system-ui, sans-serif !important; font-size: 13px !important }
@container (min-width: 440px) { figure svg text { font-size: 10.6px !important } }
@container (min-width: 530px) { figure svg text { font-size: 9px !important } }
body:has(#by-time:checked) .by-samples, body:not(:has(#by-time:checked)) .by-time { display: none }
details { margin: .5rem 0 } summary { cursor: pointer; font-weight: 600; padding: .15rem 0 }
@media (max-width: 640px) { .tiles { grid-template-columns: 1fr 1fr } .tile b { font-size: 1.35rem } }
@media print { body { max-width: none; font-size: 11pt } .switch, th button::after, .live { display: none }
  .figures { grid-template-columns: 1fr 1fr } .tile, tr, figure { break-inside: avoid } }
"""

# Tables are sorted by a click; a page that is written anew loads itself again, and keeps what was unfolded and chosen.
SCRIPT = """
for (const head of document.querySelectorAll("th button")) head.onclick = () => {
  const cell = head.parentNode, table = cell.closest("table"), column = [...cell.parentNode.children].indexOf(cell);
  const up = cell.getAttribute("aria-sort") !== "ascending";
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  cell.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => { const one = row.children[column], text = one.dataset.value ?? one.textContent;
    return text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text) };
  const order = (a, b) => a === b ? 0 : a === null ? 1 : b === null ? -1
    : (typeof a === typeof b ? a < b : typeof a === "number") === up ? -1 : 1;
  const rows = [...table.tBodies[0].rows].map(row => [key(row), row]);
  rows.sort((a, b) => order(a[0], b[0])).forEach(pair => table.tBodies[0].append(pair[1]));
};
const every = Number(document.body.dataset.reload), place = "mpitrain " + location.pathname;
if (every) {
  const folds = [...document.querySelectorAll("details")], byTime = document.getElementById("by-time");
  let kept = null;
  try { kept = JSON.parse(sessionStorage.getItem(place)) } catch {}
  if (kept) {
    folds.forEach(one => { const name = one.querySelector("summary").textContent;
      if (name in kept.open) one.open = kept.open[name] });
    if (byTime && kept.byTime) byTime.checked = true;
    scrollTo(0, kept.y);
  }
  addEventListener("pagehide", () => { try { sessionStorage.setItem(place, JSON.stringify({ y: scrollY,
    byTime: Boolean(byTime && byTime.checked),
    open: Object.fromEntries(folds.map(one => [one.querySelector("summary").textContent, one.open])) })) } catch {} });
  if (Date.now() / 1000 - Number(document.body.dataset.written) > 60 + 10 * every)
    document.getElementById("old").hidden = false;
  setTimeout(() => location.reload(), 1000 * every);
}
"""

_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'"
