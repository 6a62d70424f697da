// The interactive figure of choose.md: milliseconds of a step by algorithm and network. The arithmetic is that of
// bagua_hvd/bench/predict.py. Nothing is fetched.
"use strict";

// <!-- from tradeoff.figure -->
const TRADEOFF = {constants: {"framing": 1.0455801104972375, "bucket": 10485760, "layers": 50}, algorithms: {
    gradient_allreduce: {"elements": 1.0, "thin": 0.0, "rounds": 2, "grows": true, "when": "while gradients come", "period": 1, "loss": "the reference"},
    bytegrad: {"elements": 0.25, "thin": 0.0, "rounds": 2, "grows": false, "when": "while gradients come", "period": 1, "loss": "-5 to +1 %"},
    rotated: {"elements": 0.064453125, "thin": 0.0, "rounds": 2, "grows": false, "when": "while gradients come", "period": 1, "loss": "-1 to +5 %"},
    powersgd: {"elements": 0.0, "thin": 4.0, "rounds": 4, "grows": true, "when": "while gradients come", "period": 1, "loss": "-1 to +4 %"},
    onebit_adam: {"elements": 0.03125, "thin": 0.0, "rounds": 2, "grows": false, "when": "while gradients come", "period": 1, "loss": "-3 to +1 %"},
    diloco: {"elements": 0.0322265625, "thin": 0.0, "rounds": 2, "grows": false, "when": "until the next step's end", "period": 2, "loss": "-3 to +15 %"},
    async: {"elements": 0.0, "thin": 0.0, "rounds": 0, "grows": false, "when": "beside the training", "period": 1, "loss": "-3 to +13 %; not equivalent: images, sgd"},
}};
// <!-- end -->

function tradeoffStep(algorithm, constants, network) {
    const {hosts, bytesPerS, latencyS, parameters, computingS} = network;
    const {framing, bucket, layers} = constants;
    const part = 8 * (hosts - 1) / hosts;
    const width = Math.floor(Math.sqrt(Math.round(parameters / layers)));
    const count = layers * width * width;
    const nbytes = part * (algorithm.elements * count + algorithm.thin * 2 * width * layers);
    const rounds = algorithm.grows ? 2 * Math.max(1, Math.ceil(Math.log2(hosts))) * algorithm.rounds / 2 : algorithm.rounds;
    const wait = (rounds + 2) * latencyS, sent = nbytes * framing / bytesPerS;
    if (algorithm.when === "beside the training")
        return computingS;
    if (algorithm.when === "until the next step's end")
        return computingS + Math.max(0, sent + wait - computingS) / algorithm.period;
    const [forward, backward, step] = [0.3, 0.6, 0.1].map(share => share * computingS);
    let free = 0, done = backward, waiting = 0;
    const send = ready => {
        free = Math.max(free, ready) + sent * waiting / count;
        done = Math.max(done, free + wait);
    };
    for (let layer = 0; layer < layers; layer++) {
        const size = width * width;
        if (waiting && 4 * (waiting + size) > bucket) {
            send(backward * layer / layers);
            waiting = 0;
        }
        waiting += size;
    }
    send(backward);
    return forward + done + step;
}

function tradeoffFigure(place) {
    const sliders = [       // name, label, least, most, first, shown; all logarithmic
        ["rate", "Bandwidth", 1e7, 1e11, 1e9, value => value >= 1e9 ? `${+(value / 1e9).toPrecision(2)} Gbit/s` : `${+(value / 1e6).toPrecision(2)} Mbit/s`],
        ["delay", "Latency, one way", 0.01, 100, 0.1, value => `${+value.toPrecision(2)} ms`],
        ["hosts", "Hosts", 2, 64, 4, value => `${Math.round(value)}`],
        ["parameters", "Parameters", 1e6, 1e9, 2.5e7, value => `${+(value / 1e6).toPrecision(2)} million`],
        ["computing", "A step without communication", 5, 2000, 200, value => `${+value.toPrecision(2)} ms`],
    ];
    const values = {}, draws = [];
    const controls = document.createElement("div");
    controls.className = "controls";
    for (const [name, label, least, most, first, shown] of sliders) {
        const line = document.createElement("label"), input = document.createElement("input"), output = document.createElement("output");
        Object.assign(input, {type: "range", min: 0, max: 200, step: 1, value: Math.round(200 * Math.log(first / least) / Math.log(most / least))});
        input.addEventListener("input", () => draws.forEach(draw => draw()));
        draws.push(() => {
            values[name] = least * Math.pow(most / least, input.value / 200);
            output.textContent = shown(values[name]);
        });
        line.append(Object.assign(document.createElement("span"), {textContent: label}), input, output);
        controls.append(line);
    }
    const table = document.createElement("div");
    table.className = "bars";
    table.setAttribute("aria-live", "polite");
    draws.push(() => {
        const network = {hosts: Math.round(values.hosts), bytesPerS: values.rate / 8, latencyS: values.delay / 1e3,
                         parameters: values.parameters, computingS: values.computing / 1e3};
        const rows = Object.entries(TRADEOFF.algorithms).map(([name, said]) => ({name, loss: said.loss, ms: 1e3 * tradeoffStep(said, TRADEOFF.constants, network)}));
        const longest = Math.max(...rows.map(row => row.ms)), exact = rows[0].ms;
        table.replaceChildren(...rows.map(row => {
            const line = document.createElement("div"), bar = document.createElement("i");
            bar.style.width = `${100 * row.ms / longest}%`;
            const cell = (kind, text) => Object.assign(document.createElement("span"), {className: kind, textContent: text});
            const barCell = cell("bar", "");
            barCell.append(bar);
            line.append(cell("name", row.name), barCell, cell("ms", `${row.ms < 10 ? row.ms.toFixed(1) : Math.round(row.ms).toLocaleString("en")} ms`),
                        cell("speed", `${(exact / row.ms).toFixed(1)}x`), cell("loss", `loss: ${row.loss}`));
            return line;
        }));
    });
    place.replaceChildren(controls, table);
    draws.forEach(draw => draw());
}

if (typeof document !== "undefined") {
    const place = document.querySelector("[data-figure=tradeoff]");
    if (place)
        tradeoffFigure(place);
} else {
    module.exports = {tradeoffStep, TRADEOFF};
}
