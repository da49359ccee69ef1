// Search without a server: a browser starts no worker from a file, so the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((done) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = done;
        inside.importScripts = (...files) => Promise.all(files.map((file) => new Promise((loaded) => {
          const more = inside.document.createElement("script");
          more.src = file;
          more.onload = loaded;
          inside.document.body.append(more);
        })));
        inside.document.body.append(script);
      });
      this.inside = inside;
    }

    async postMessage(data) {
      await this.ready;
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }
  };
}
