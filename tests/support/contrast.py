"""A script that measures in a page the contrast between each text and its background, by WCAG 2."""

__all__ = ["CONTRASTS"]

CONTRASTS = """() => {
    const parts = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
    const light = ([r, g, b]) => {
        const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        const [x, y, z] = [r, g, b].map((c) => linear(c / 255));
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const back = (element) => {
        for (let each = element; each; each = each.parentElement) {
            const [r, g, b, a = 1] = parts(getComputedStyle(each).backgroundColor);
            if (a > 0.99) return [r, g, b];
        }
        return [255, 255, 255];
    };
    const found = new Map();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.textContent.trim() || !element.getClientRects().length) continue;
        if (element.closest("svg, .hidden, button:disabled, option, script")) continue;
        const style = getComputedStyle(element);
        const [a, b] = [light(parts(style.color)), light(back(element))].sort((x, y) => y - x);
        const size = parseFloat(style.fontSize);
        const isLarge = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
        const told = {text: walker.currentNode.textContent.trim().slice(0, 40), ratio: (a + 0.05) / (b + 0.05)};
        found.set(style.color + back(element) + isLarge, {...told, least: isLarge ? 3 : 4.5, color: style.color});
    }
    return [...found.values()];
}"""
