// Texts of a page that stand out too little from what is behind them: class, text and contrast.
const parts = (colour) => colour.match(/[\d.]+/g).map(Number);
const light = (colour) => { const [r, g, b] = parts(colour).map((v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
  return .2126 * r + .7152 * g + .0722 * b; };
const behind = (element) => { for (; element; element = element.parentElement) {
  const colour = getComputedStyle(element).backgroundColor, [, , , alpha = 1] = parts(colour); if (alpha > .99) return colour; } return 'rgb(255, 255, 255)'; };
const weak = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !element.getClientRects().length || element.closest('script, style, .skip')) continue;
  const [a, b] = [light(getComputedStyle(element).color), light(behind(element))].sort((x, y) => y - x);
  if ((a + .05) / (b + .05) < 4.5) weak.push([element.className, walker.currentNode.textContent.trim().slice(0, 40), (a + .05) / (b + .05)]);
}
return weak;
