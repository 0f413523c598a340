"use strict"
// Draws the figures in the colours that the reader prefers, and again when that changes.
window.rendering = true // until the mark "rendered"
const page = JSON.parse(document.getElementById("figures").textContent)
const dark = matchMedia("(prefers-color-scheme: dark)")
const touch = matchMedia("(pointer: coarse)")
let managers = []

const coloured = text => dark.matches ? text.replace(/#[0-9a-f]{6}/g, colour => page.dark[colour] ?? colour) : text

// A finger that moves over a figure scrolls the page, unless a tool above the figure was tapped.
function forTouch(value) {
  if (value === null || typeof value !== "object") return
  if (value.name === "Toolbar" && value.attributes) Object.assign(value.attributes, {active_drag: null, autohide: false})
  for (const item of Object.values(value)) forTouch(item)
}

async function draw() {
  for (const manager of managers) manager.clear()
  for (const entry of document.querySelectorAll("[data-colour]")) entry.style.color = coloured(entry.dataset.colour)
  const docs = JSON.parse(coloured(JSON.stringify(page.docs)))
  if (touch.matches) forTouch(docs)
  managers = await Bokeh.embed.embed_items(docs, page.items)
}

Bokeh.set_log_level("warn")
draw().then(() => requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("rendered"))))
dark.addEventListener("change", draw)

// A tap shows what a mouse shows that stops there, until the next tap or until the page scrolls.
let tapped = null
function leave() {
  tapped?.dispatchEvent(new PointerEvent("pointerout", {bubbles: true, composed: true, isPrimary: true}))
  tapped = null
}
document.addEventListener("scroll", leave, {passive: true})
document.addEventListener("click", event => {
  if (!touch.matches || event.pointerType === "mouse") return
  leave()
  tapped = event.composedPath()[0]
  const where = {view: window, clientX: event.clientX, clientY: event.clientY, bubbles: true, composed: true, isPrimary: true}
  tapped.dispatchEvent(new PointerEvent("pointermove", where))
})

if (reload) {
  setInterval(() => document.getElementById("pause").checked || location.reload(), 1000 * reload)
}
