// BullMQ. Its settings: https://docs.bullmq.io/guide/parallelism-and-concurrency (a concurrency of 100 to 300),
// https://docs.bullmq.io/guide/workers/auto-removal-of-jobs, https://api.docs.bullmq.io/interfaces/v6.WorkerOptions.html
//
// A worker blocks on the server until the next job is due. After a kill, a job runs again when its lock has expired
// (`lockDuration`) and a check for stalled jobs finds it (`stalledInterval`).
//
// This is a CommonJS module because only `require` follows NODE_PATH, which names the peer's environment.

const fs = require("node:fs");
const { Queue, Worker } = require("bullmq");

const AT_ONCE = 1000;
const AROUND = '{"number":,"text":""}'.length;
const PAYLOAD_BYTES = 200;
const BEST = { concurrency: 300, lockDuration: 5000, stalledInterval: 5000, removeOnComplete: { count: 0 } };

const { hostname: host, port } = new URL(process.env.PEER_REDIS);
const connection = { host, port: Number(port || 6379), maxRetriesPerRequest: null };
const isBest = process.env.PEER_SETTINGS === "best";
const handlerMs = Number(process.env.PEER_HANDLER_S) * 1000;
const record = fs.openSync(process.env.PEER_RECORD, "a");

function note(event, number) {
  const instant = BigInt(Math.round((performance.timeOrigin + performance.now()) * 1000)) * 1000n;
  fs.writeSync(record, `${event} ${number} ${instant}\n`);
}

async function handle(job) {
  note("b", job.data.number);
  if (handlerMs) {
    await new Promise((resolve) => setTimeout(resolve, handlerMs));
    note("e", job.data.number);
  }
}

async function schedule() {
  const queue = new Queue("peers", { connection });
  const lines = fs.readFileSync(0, "utf8").trim().split("\n");
  for (let at = 0; at < lines.length; at += AT_ONCE) {
    const jobs = lines.slice(at, at + AT_ONCE).map((line) => {
      const [number, dueMs] = line.split(" ").map(Number);
      const text = "x".repeat(PAYLOAD_BYTES - AROUND - String(number).length);
      return { name: "handle", data: { number, text }, opts: { delay: Math.max(0, dueMs - Date.now()) } };
    });
    await queue.addBulk(jobs);
  }
  await queue.close();
}

function work() {
  new Worker("peers", handle, { connection, ...(isBest ? BEST : {}) }).on("error", console.error);
}

({ schedule, work })[process.argv[2]]();
