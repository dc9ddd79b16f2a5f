// `test-binaries.mjs PACKAGE TARGET`: reads `cargo test --no-run --message-format=json` and prints the path of that test
// program.
import { createInterface } from "node:readline";

const [name, target] = process.argv.slice(2);
let found;
for await (const line of createInterface({ input: process.stdin })) {
  let message;
  try { message = JSON.parse(line); } catch { continue; }
  if (message.reason !== "compiler-artifact" || !message.profile.test || !message.executable) continue;
  // path+file:///…/tests/e2e#mullion-e2e@0.1.0, or without the name where the folder has it.
  const isOurs = message.package_id.includes(`#${name}@`) || message.package_id.includes(`/${name}#`);
  if (isOurs && message.target.name === target) found = message.executable;
}
if (found) console.log(found);
else {
  console.error(`no test program ${target} of ${name} was built`);
  process.exitCode = 1;
}
