// Search without a server: browsers refuse workers in pages that were opened as files. This one is a hidden frame, as
// Material's search expects it under this name.
"use strict";

if (window.location.protocol === "file:") {
    window.IFrameWorker = class extends EventTarget {
        constructor(url) {
            super();
            this.frame = document.createElement("iframe");
            this.frame.hidden = true;
            this.ready = new Promise(resolve => this.frame.addEventListener("load", resolve, {once: true}));
            this.frame.srcdoc = `<script>postMessage = parent.postMessage.bind(parent)</script><script src="${url}"></script>`;
            window.addEventListener("message", event => {
                if (event.source === this.frame.contentWindow)
                    this.dispatchEvent(new MessageEvent("message", {data: event.data}));
            });
            document.body.append(this.frame);
        }
        postMessage(data) {
            this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data})));
        }
    };
    window.Worker = window.IFrameWorker;
}
