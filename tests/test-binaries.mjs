// `test-binaries.mjs PACKAGE`: reads `cargo test --no-run --message-format=json` and prints the test programs of
// one package, one a line.
import { createInterface } from "node:readline";

const name = process.argv[2];
for await (const line of createInterface({ input: process.stdin })) {
  let message;
  try { message = JSON.parse(line); } catch { continue; }
  if (message.reason !== "compiler-artifact" || !message.profile.test || !message.executable) continue;
  // path+file:///…/tests/e2e#mullion-e2e@0.1.0
  if (message.package_id.includes(`#${name}@`)) console.log(message.executable);
}
