// Browsers give no workers to pages that are opened as files, and the search of the theme is a worker. Of such a page,
// a worker is a hidden frame: its script runs there, and messages are events. IFrameWorker is what the theme looks for.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.queue = [];
      this.onmessage = null;
      this.addEventListener("message", (event) => this.onmessage?.(event));
      const frame = document.createElement("iframe");
      frame.hidden = true;
      (document.body ?? document.documentElement).append(frame);
      this.frame = frame;
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => this.load(one)), Promise.resolve());
      this.load(url).then(() => {
        const waiting = this.queue;
        this.queue = null;
        for (const data of waiting) this.postMessage(data);
      });
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = new URL(url, document.baseURI);
        script.onload = done;
        script.onerror = () => failed(new Error(`cannot load ${script.src}`));
        this.frame.contentDocument.body.append(script);
      });
    }

    postMessage(data) {
      if (this.queue) this.queue.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
