// A page that is opened from a folder may start no worker: there, the script of the search runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((loaded) => {
        const script = this.inside.document.createElement("script");
        Object.assign(script, { src: address, onload: loaded });
        this.inside.document.body.append(script);
      });
    }
    async postMessage(data) {
      await this.loaded;
      this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
