"""What the report page looks like, and its read-out of values under the pointer."""

import base64
import hashlib

# Every text has a contrast of 4.5 or more to its background and every line 3 or more, in light and dark.
STYLE = """
:root{color-scheme:light dark;--back:#fbfbfa;--card:#fff;--text:#1c2128;--soft:#5a636e;--rule:#e3e5e8;--grid:#ebedef;
--a:#2563c4;--b:#bf4f0c;--c:#0e7f6e;--good:#1a7a3c;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--back:#121519;--card:#1a1e24;--text:#e6e9ed;--soft:#9ba5b1;--rule:#2c323a;
--grid:#272d35;--a:#7aaeff;--b:#ffa766;--c:#52cdb5;--good:#62d08a;--bad:#ff8a80}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0 auto;padding:2rem 1.5rem 3rem;max-width:76rem;background:var(--back);color:var(--text);
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .25rem;font-weight:650}
h2{font-size:1.1rem;margin:2.25rem 0 .75rem;font-weight:650}
h3{font-size:1rem;margin:0;font-weight:650}
small{font-size:.8125rem;font-weight:400;color:var(--soft)}
p{margin:.25rem 0}
.status{display:flex;align-items:center;gap:.5rem}
.status i{flex:none;width:.6rem;height:.6rem;border-radius:50%;background:var(--soft)}
.running i{background:var(--a)}
.finished i{background:var(--good)}.stopped i{background:var(--b)}.broken i{background:var(--bad)}
.reason,.note,.none,footer{color:var(--soft);font-size:.9375rem}
progress{appearance:none;-webkit-appearance:none;display:block;width:100%;height:.375rem;margin:.75rem 0 1rem;border:0;
border-radius:1rem;overflow:hidden;background:var(--rule)}
progress::-webkit-progress-bar{background:var(--rule)}
progress::-webkit-progress-value{background:var(--a)}
progress::-moz-progress-bar{background:var(--a)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:1rem;margin:1.25rem 0 1rem}
.tiles>div,.chart,.box,pre,dl{background:var(--card);border:1px solid var(--rule);border-radius:.625rem}
.tiles>div{padding:.75rem 1rem}
.tiles span{display:block;font-size:.875rem;color:var(--soft)}
.tiles strong{font-size:1.375rem;font-weight:600;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:1fr 1fr;gap:1rem}
.chart{margin:0;padding:1rem;min-width:0}
#loss{grid-column:1/-1}
figcaption{position:relative;margin-bottom:.875rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:0 1.25rem;margin:.25rem 0 0;padding:0;font-size:.875rem;
min-height:1.5em}
.legend b{font-weight:600;font-variant-numeric:tabular-nums}
.legend i{display:inline-block;width:1rem;height:.1875rem;border-radius:1rem;margin-right:.4rem;vertical-align:.25em;
background:currentColor}
.legend .best i{width:.625rem;height:.625rem;border:.1875rem solid;border-radius:50%;background:none;
vertical-align:-.05em}
.legend .a i{color:var(--a)}.legend .b i{color:var(--b)}.legend .c i{color:var(--c)}
.at{position:absolute;top:0;right:0;font-size:.875rem;color:var(--soft);font-variant-numeric:tabular-nums}
.plot{position:relative;height:12rem;margin:0 .25rem 1.5rem 3.25rem}
#loss .plot{height:17rem}
.plot svg{display:block;width:100%;height:100%;overflow:visible}
.plot path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--grid);stroke-width:1}
.mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 4}
.line{stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}
.behind{stroke-width:1;opacity:.3}
.dots{stroke-width:5;stroke-linecap:round}
.ring{stroke-width:13;stroke-linecap:round}
.hole{stroke:var(--card);stroke-width:7;stroke-linecap:round}
.plot .a{stroke:var(--a)}.plot .b{stroke:var(--b)}.plot .c{stroke:var(--c)}
.ys,.xs{font-size:.75rem;line-height:1;color:var(--soft);font-variant-numeric:tabular-nums;white-space:nowrap}
.ys span{position:absolute;right:100%;transform:translateY(-50%);padding-right:.5rem}
.xs span{position:absolute;top:100%;transform:translateX(-50%);padding-top:.5rem}
.xs .first{transform:none}.xs .last{transform:translateX(-100%)}
.over{position:absolute;inset:0;touch-action:pan-y}
.over i{position:absolute;top:0;bottom:0;width:0;border-left:1px solid var(--soft)}
.columns{display:grid;grid-template-columns:minmax(0,2fr) minmax(0,3fr);gap:0 1.5rem}
.box{overflow:auto;max-height:30rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{padding:.375rem 1rem;text-align:right;border-top:1px solid var(--grid)}
th{position:sticky;top:0;background:var(--card);font-weight:600;font-size:.875rem;color:var(--soft);border:0}
.best td{font-weight:650}
td small{color:var(--good)}
dl{margin:0;padding:.25rem 1rem;display:grid;grid-template-columns:minmax(7rem,auto) 1fr}
dt,dd{margin:0;padding:.5rem 0;border-top:1px solid var(--grid)}
dt{padding-right:1.25rem;color:var(--soft);font-size:.9375rem}
dt:first-of-type,dd:first-of-type{border:0}
pre{margin:0;padding:1rem;overflow:auto;max-height:36rem;font:.8125rem/1.6 ui-monospace,SFMono-Regular,Menlo,monospace;
overflow-wrap:normal}
footer{margin-top:2rem}
:focus-visible{outline:2px solid var(--a);outline-offset:2px}
@media (max-width:47rem){
body{padding:1.25rem 1rem 2rem}
.charts,.columns{grid-template-columns:minmax(0,1fr)}
.chart{padding:.875rem .75rem}
.tiles{grid-template-columns:1fr 1fr;gap:.625rem}
#loss .plot{height:14rem}
dl{grid-template-columns:1fr}
dt{padding-bottom:0}dd{border:0;padding-top:0}
}
"""

# For every chart: the values at the recorded iteration that is nearest to the pointer, in the place of the latest.
SCRIPT = """
for (const plot of document.querySelectorAll('.plot')) {
  const over = plot.querySelector('.over'), last = +plot.dataset.last;
  const at = plot.parentNode.querySelector('.at'), legend = plot.parentNode.querySelector('.legend');
  const lines = [...plot.querySelectorAll('[data-out]')].map(path => {
    const out = document.getElementById(path.dataset.out);
    return {x: path.dataset.x.split(' ').map(Number), y: path.dataset.y.split(' '), out, latest: out.textContent};
  });
  const rule = document.createElement('i');
  const nearest = (x, to) => {
    let low = 0, high = x.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (x[mid] < to) low = mid + 1; else high = mid; }
    return low > 0 && to - x[low - 1] <= x[low] - to ? low - 1 : low;
  };
  over.addEventListener('pointermove', event => {
    const box = over.getBoundingClientRect(), to = (event.clientX - box.left) / box.width * last;
    const near = lines.map(line => line.x[nearest(line.x, to)]);
    const n = near.reduce((one, other) => Math.abs(other - to) < Math.abs(one - to) ? other : one);
    lines.forEach((line, i) => {
      const j = nearest(line.x, n);
      line.out.textContent = line.y[j] + (line.x[j] === n ? '' : ' at ' + line.x[j].toLocaleString('en'));
    });
    at.textContent = 'iteration ' + n.toLocaleString('en');
    rule.style.left = 100 * n / last + '%';
    over.append(rule);
    legend.style.minHeight = legend.offsetHeight + 'px';  // no jumping between one line of text and two
  });
  over.addEventListener('pointerleave', () => {
    for (const line of lines) line.out.textContent = line.latest;
    at.textContent = '';
    rule.remove();
  });
}
"""


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# Nothing is loaded from anywhere, and no script but this one runs, whatever text came into the page.
POLICY = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{_digest(SCRIPT)}'"
