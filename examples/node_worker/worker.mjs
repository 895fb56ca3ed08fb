#!/usr/bin/env -S node --experimental-websocket
// A worker in plain Node, without packages: 22 or later, or 20.10 with the option above. It knows docs/protocol.md only.
import process from "node:process";
import { setTimeout as sleep } from "node:timers/promises";

class Reject extends Error {} // no further attempt can succeed
class Snooze extends Error {} // run the task again later, without counting an attempt: `new Snooze("", { cause: seconds })`

const handlers = {
  "node.square": ({ n }) => n * n,
  "node.flaky": (_, { attempt }) => { if (attempt < 2) throw new Error("not yet"); return attempt; },
  "node.picky": () => { throw new Reject("bad_input"); },
  "node.early": (_, { attempt }) => { if (attempt < 3) throw new Snooze("", { cause: 0.05 }); return attempt; },
  "node.sum": (_, { inputs = [] }) => inputs.reduce((sum, each) => sum + each, 0), // the results of the tasks that it waited for
  "node.slow": async ({ seconds }, { signal }) => { await sleep(seconds * 1000, null, { signal }); return "slept"; },
  "node.count": async ({ to }, { stream }) => { for (let n = 1; n <= to; n++) stream(n), await sleep(1); return to; }, // readers get the numbers while it runs
};

const url = (process.env.TASKQUEUE_SERVER_URL ?? "http://127.0.0.1:8420").replace(/^http/, "ws") + "/v1/socket";
const workerId = `node.${process.pid}.${Date.now().toString(36)}`; // unique per start
const room = 10;
const held = new Map(); // receipt -> its verdict, null while it runs; kept until the server has stored the verdict
const streams = new Map(); // receipt -> what it has streamed and the server has not confirmed, with the number of the first of these events
let socket, features = [], ready = false, leaving = false, pause = 0, lease = 15, heard = 0;

const say = (frame) => ready && socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(frame));

function tell(receipt, value, channel = "data") {
  if (!held.has(receipt) || !features.includes("events")) return;
  if (!streams.has(receipt)) streams.set(receipt, { first: 1, events: [] });
  const kept = streams.get(receipt);
  kept.events.push({ value: value ?? null, channel });
  if (kept.events.length > 1000) kept.events.shift(), kept.first++; // the server is slow: readers get the number of what is missing
  say({ type: "event", streams: [{ receipt, first: kept.first + kept.events.length - 1, events: kept.events.slice(-1) }] });
}

async function limited(seconds, start) { // ends an attempt at its timeout; a handler should end when `signal` says so
  const ending = new AbortController(), timeout = sleep(Math.min(seconds * 1000, 2 ** 31 - 1), null, { signal: ending.signal });
  const over = timeout.then(() => { ending.abort(); throw `timeout after ${seconds} s`; });
  return await Promise.race([over, start(ending.signal)]).finally(() => ending.abort());
}

const withInputs = (payload, inputs = []) => JSON.parse(JSON.stringify(payload ?? null), (_, value) => // {"$input": 0} stands for a result
  value !== null && typeof value === "object" && "$input" in value ? inputs[value.$input] ?? null : value);

async function run({ receipt, task, ...delivery }) {
  held.set(receipt, null);
  let verdict;
  try {
    const start = async (signal) => handlers[task.key](withInputs(task.payload, delivery.inputs), { ...delivery, signal, stream: (...event) => tell(receipt, ...event) });
    const result = await (delivery.timeout ? limited(delivery.timeout, start) : start());
    verdict = { type: "ack", receipts: [receipt], results: { [receipt]: result ?? null } };
  } catch (error) {
    const traceback = features.includes("tracebacks") ? error?.stack?.slice(-8192) : undefined;
    verdict = error instanceof Reject
      ? { type: "dead_letter", receipt, reason: error.message.slice(0, 4096), error: String(error).slice(0, 4096), traceback }
      : error instanceof Snooze
        ? { type: "retry", receipt, delay: error.cause, free: features.includes("snooze") }
        : { type: "retry", receipt, error: String(error).slice(0, 4096), traceback };
  }
  if (held.has(receipt)) held.set(receipt, verdict), say(verdict); // else it was revoked: somebody else's by now
  say({ type: "credit", n: 1 });
}

const forget = (receipt) => { held.delete(receipt); streams.delete(receipt); };

const hear = {
  welcome(frame) {
    ready = true; pause = 0; lease = frame.lease; features = frame.features ?? [];
    const adopted = new Set(frame.adopted); // the rest is gone
    for (const [receipt, kept] of streams) adopted.has(receipt) ? kept.events.length && say({ type: "event", streams: [{ receipt, ...kept }] }) : streams.delete(receipt);
    for (const [receipt, verdict] of held) adopted.has(receipt) ? verdict && say(verdict) : held.delete(receipt);
  },
  deliver: ({ deliveries }) => deliveries.filter((one) => !held.has(one.receipt)).forEach(run),
  stored: ({ numbers }) => Object.entries(numbers).forEach(([receipt, last]) => {
    const kept = streams.get(receipt), count = kept && Math.max(0, last + 1 - kept.first);
    if (kept) kept.events.splice(0, count), kept.first += count;
  }),
  settled: ({ ok = [], lease_lost = [] }) => [...ok, ...lease_lost].forEach(forget),
  revoke: ({ receipts }) => receipts.forEach(forget),
  ping: ({ n = 0 }) => say({ type: "pong", n }),
  drain: () => {}, // it closes with 1012 once what runs here is settled, or its time is over
  error: ({ code, message }) => console.error(`the server says ${code}: ${message}`),
};

function connect() {
  const mine = (socket = new WebSocket(url, "taskqueue.v1"));
  heard = Date.now(); ready = false;
  mine.onopen = () => {
    const credit = room - [...held.values()].filter((verdict) => verdict === null).length;
    const token = process.env.TASKQUEUE_TOKEN;
    mine.send(JSON.stringify({ type: "hello", worker_id: workerId, keys: Object.keys(handlers), credit, token, holding: [...held.keys()], features: ["timeouts", "inputs"] }));
  };
  mine.onmessage = ({ data }) => { heard = Date.now(); const frame = JSON.parse(data); hear[frame.type]?.(frame); };
  const lost = async ({ code }) => {
    if (mine !== socket) return; // it was noticed before
    socket = null; ready = false;
    if (leaving || code === 4401) process.exit(leaving ? 0 : 1);
    await sleep(pause * (0.5 + Math.random() / 2)); // the first time at once
    pause = Math.min(2 * pause + 100, 5000);
    connect();
  };
  mine.onclose = lost;
  mine.onerror = lost; // Node 20 says no more where nobody listens
  mine.whenSilent = () => { mine.close(); lost({ code: 0 }); };
}

setInterval(() => socket && Date.now() - heard > lease * 1000 && socket.whenSilent(), 1000);
process.on("SIGTERM", () => { leaving = true; ready ? say({ type: "bye" }) : process.exit(0); });
connect();
