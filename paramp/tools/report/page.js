"use strict"
// Draws the figures in the colours that the reader prefers, and again when that changes: first those in sight, which the
// mark "rendered" ends, then one after the other, until "rendering" is false.
window.rendering = true
const page = JSON.parse(document.getElementById("figures").textContent)
const dark = matchMedia("(prefers-color-scheme: dark)")
const touch = matchMedia("(pointer: coarse)")
let managers = [], ranges = [], drawing = 0

const coloured = text => dark.matches ? text.replace(/#[0-9a-f]{6}/g, colour => page.dark[colour] ?? colour) : text

// A finger that moves over a figure scrolls the page, unless a tool above the figure was tapped.
function forTouch(value) {
  if (value === null || typeof value !== "object") return
  if (value.name === "Toolbar" && value.attributes) Object.assign(value.attributes, {active_drag: null, autohide: false})
  for (const item of Object.values(value)) forTouch(item)
}

// Figures over steps show the same steps.
function join(range) {
  if (!range) return
  if (ranges.length) range.setv({start: ranges[0].start, end: ranges[0].end})
  ranges.push(range)
  range.change.connect(() => {
    const {start, end} = range
    for (const other of ranges) if (other.start !== start || other.end !== end) other.setv({start, end})
  })
}

const nextFrame = () => new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve)))

async function draw() {
  const mine = ++drawing
  for (const manager of managers) manager.clear()
  managers = []
  ranges = []
  for (const entry of document.querySelectorAll("[data-colour]")) entry.style.color = coloured(entry.dataset.colour)
  let inSight = true
  for (const item of page.items) {
    const place = document.getElementById(Object.values(item.roots)[0])
    if (inSight && place.getBoundingClientRect().top > innerHeight) {
      inSight = false
      await nextFrame()
      performance.mark("rendered")
    }
    const doc = JSON.parse(coloured(JSON.stringify(page.docs[item.docid])))
    if (touch.matches) forTouch(doc)
    const [manager] = await Bokeh.embed.embed_items({[item.docid]: doc}, [item])
    if (mine !== drawing) return manager.clear() // the colours have changed since
    managers.push(manager)
    for (const view of manager) join(view.model.document.get_model_by_name("steps"))
    if (!inSight) await nextFrame()
  }
  if (inSight) performance.mark("rendered")
  await nextFrame()
  window.rendering = false
}

Bokeh.set_log_level("warn")
draw()
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
