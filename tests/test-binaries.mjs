// Reads `cargo test --no-run --message-format=json` and prints the test programs, one a line.
import { createInterface } from "node:readline";

for await (const line of createInterface({ input: process.stdin })) {
  let message;
  try { message = JSON.parse(line); } catch { continue; }
  if (message.reason === "compiler-artifact" && message.profile.test && message.executable) console.log(message.executable);
}
