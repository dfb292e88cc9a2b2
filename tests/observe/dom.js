// What page.html uses of a browser's document, for a JavaScript engine that has none. It paints
// nothing: a test clicks on elements, not on pixels.
"use strict";

class Element {
  constructor(tag, attributes = {}) {
    Object.assign(this, { tag, attributes, children: [], parent: null, listeners: {}, style: {} });
    Object.assign(this, { textContent: "", value: "", hidden: "hidden" in attributes });
    Object.assign(this, { clientWidth: 1200, clientHeight: 800, offsetWidth: 200, offsetHeight: 100 });
  }
  get classes() { return (this.attributes.class || "").split(" ").filter(Boolean); }
  get classList() {
    const set = (names) => { this.attributes.class = [...names].join(" "); };
    const add = (name) => set(new Set([...this.classes, name]));
    const remove = (name) => set(this.classes.filter((other) => other !== name));
    return { add, remove, toggle: (name, on) => (on ? add(name) : remove(name)) };
  }
  get dataset() {
    const data = Object.entries(this.attributes).filter(([name]) => name.startsWith("data-"));
    return Object.fromEntries(data.map(([name, value]) => [name.slice(5), value]));
  }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  appendChild(child) { child.parent = this; this.children.push(child); return child; }
  append(...children) {
    for (const child of children)
      if (typeof child === "string") this.textContent += child; else this.appendChild(child);
  }
  replaceChildren() { this.children = []; }
  closest(selector) {
    for (let at = this; at instanceof Element; at = at.parent)
      if (at.classes.includes(selector.slice(1))) return at;
    return null;
  }
  all() { return [this, ...this.children.flatMap((child) => child.all())]; }
  getBoundingClientRect() { return { bottom: 40 }; }
  getBBox() {
    const rects = this.all().filter((each) => each.tag === "rect").map((each) => each.attributes);
    const side = (name, size) => rects.map((rect) => Number(rect[name]) + Number(rect[size] || 0));
    const [x, y] = [Math.min(...side("x")), Math.min(...side("y"))];
    return { x, y, width: Math.max(...side("x", "width")) - x, height: Math.max(...side("y", "height")) - y };
  }
  addEventListener(type, listener) { (this.listeners[type] ||= []).push(listener); }
  focus() { document.focused = this; }
}

const window = new Element("window"), document = window.appendChild(new Element("document"));
const { innerWidth, innerHeight } = { innerWidth: 1200, innerHeight: 800 };
document.createElement = (tag) => new Element(tag);
document.createElementNS = (_, tag) => new Element(tag);
const named = new Map();
document.getElementById = (id) => named.get(id) || null;

/** Build the document from [tag, attributes, text, children], as Python has read it. */
function build([tag, attributes, text, children], parent) {
  const element = parent.appendChild(new Element(tag, attributes));
  element.textContent = text;
  if (attributes.id) named.set(attributes.id, element);
  children.forEach((child) => build(child, element));
}

/** An event at an element, which then passes through all that it is in. */
function fire(target, type, facts = {}) {
  const event = { ...facts, target, prevented: false, preventDefault() { this.prevented = true; } };
  for (let at = target; at; at = at.parent)
    (at.listeners[type] || []).forEach((listener) => listener(event));
  return event.prevented;
}
