import { test } from "node:test";
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { errorsOf, settings, told } from "./settings.mjs";

const source = `pub struct Args {
    pub state_dir: Option<PathBuf>,
}
struct File {
    api_version: String,
    state_dir: Option<PathBuf>,
    #[serde(default)]
    health: Health,
    metrics: Option<Metrics>,
}
pub struct Health {
    /// Text.
    pub poll_seconds: Option<u32>,
    #[serde(rename = "memoryMiB")]
    pub memory_mib: Option<u64>,
}
struct Metrics {
    legacy_names: Option<bool>,
}
`;

test("what a file may say", () => {
  assert.deepEqual(settings(source, "File"), {
    all: ["apiVersion", "stateDir", "health.pollSeconds", "health.memoryMiB", "metrics.legacyNames"],
    flags: ["stateDir"],
  });
});

test("what a text says", () => {
  assert.deepEqual(told("apiVersion: x\nhealth:   # why\n  pollSeconds: 5\n  # memoryMiB: 1\nmetrics: {legacyNames: true, b: 1}  # c: d\n"),
    ["apiVersion", "health.pollSeconds", "health.memoryMiB", "metrics.legacyNames", "metrics.b"]);
});

test("what is missing and what is too much", () => {
  const kinds = { FileKind: { source, root: "File" } };
  const errors = errorsOf("```yaml\napiVersion: x\nkind: FileKind\nhealth: {pollSeconds: 5, memoryMiB: 1}\n```", kinds);
  assert.deepEqual(errors, ["FileKind: metrics.legacyNames is not shown", "FileKind: kind is shown, and no file may say it"]);
  assert.deepEqual(errorsOf("", kinds), ["no FileKind is shown"]);
});

test("docs/install.md shows all that the files may say", () => {
  const read = (file) => readFileSync(new URL(`../../${file}`, import.meta.url), "utf8");
  assert.deepEqual(errorsOf(read("docs/install.md"), {
    ControllerConfig: { source: read("controller/src/config.rs"), root: "Config" },
    NodeAgentConfig: { source: read("nodeagent/src/config.rs"), root: "File" },
  }), []);
});
