// Material searches in a worker, which a page opened from the disk may not start: here it runs in a hidden frame.
// The name of this file keeps the plugin `offline` from loading such a script over the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inner = frame.contentWindow;
      this.inner.document.open();
      this.inner.document.write(
        `<body><script>postMessage = (data) => parent.postMessage(data, "*")</script><script src="${url}"></script>`,
      );
      this.inner.document.close();
      this.loaded = new Promise((resolve) => this.inner.addEventListener("load", resolve));
      window.addEventListener("message", ({ source, data }) => {
        if (source === this.inner) this.dispatchEvent(new MessageEvent("message", { data }));
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
