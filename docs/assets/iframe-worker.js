// Search without a server: a browser starts no worker from a file, so the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      const load = (file) => new Promise((loaded) => {
        const script = frame.contentDocument.createElement("script");
        script.src = file;
        script.onload = loaded;
        frame.contentDocument.body.append(script);
      });
      this.ready = new Promise((loaded) => (frame.onload = loaded)).then(() => {
        const inside = frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.importScripts = (...files) => Promise.all(files.map(load));
        return load(url).then(() => inside);
      });
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><body>";
      document.body.append(frame);
    }

    async postMessage(data) {
      const inside = await this.ready;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }
  };
}
