import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { check, parseToml, satisfied } from "./check.mjs";

const rules = parseToml(readFileSync(new URL("../../deny.toml", import.meta.url), "utf8"));
const CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index";
const crate = (name, more = {}) => ({ name, version: "1.0.0", id: name, license: "MIT", source: CRATES_IO, dependencies: [], ...more });
const roots = crate("webpki-root-certs", { license: "CDLA-Permissive-2.0" });
const of = (...packages) => check(rules, { workspace_members: ["ours"], packages: [roots, ...packages] }).errors;

test("licence expressions", () => {
  const allowed = new Set(["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "ISC"]);
  for (const [expression, want] of [
    ["MIT", true],
    ["GPL-3.0-only", false],
    ["GPL-3.0-only OR MIT", true],
    ["MIT/Apache-2.0", true],
    ["MIT AND GPL-3.0-only", false],
    ["(MIT OR GPL-3.0-only) AND ISC", true],
    ["GPL-3.0-only OR MIT AND ISC", true],
    ["GPL-3.0-only WITH LLVM-exception", false],
    ["Apache-2.0 WITH LLVM-exception", true],
  ]) assert.equal(satisfied(expression, allowed), want, expression);
  for (const bad of ["", "MIT OR", "(MIT", "MIT ISC", "MIT )"]) assert.throws(() => satisfied(bad, allowed), undefined, bad);
});

test("what is refused", () => {
  for (const [name, packages, want] of [
    ["clean", [crate("a"), crate("ours", { source: null })], []],
    ["copyleft", [crate("a", { license: "GPL-3.0-only" })], [/a 1\.0\.0 is under GPL-3\.0-only/]],
    ["an exception is for its crate only", [crate("a", { license: "CDLA-Permissive-2.0" })], [/a 1\.0\.0 is under/]],
    ["no licence", [crate("a", { license: null })], [/names no licence/]],
    ["git source", [crate("a", { source: "git+https://example.com/a" })], [/not in allow-registry/]],
    ["a path outside", [crate("a", { source: null })], [/path outside/]],
    ["banned", [crate("openssl-sys")], [/openssl-sys 1\.0\.0 is banned/]],
    ["wildcard", [crate("ours", { source: null, dependencies: [{ name: "a", source: CRATES_IO, req: "*" }] })], [/any version of a/]],
  ]) {
    const errors = of(...packages);
    assert.equal(errors.length, want.length, `${name}: ${errors}`);
    want.forEach((pattern, i) => assert.match(errors[i], pattern, name));
  }
});

test("an exception that nobody needs and a key that is not understood are errors", () => {
  const none = { workspace_members: [], packages: [] };
  assert.match(check(rules, none).errors[0], /exception for webpki-root-certs is not needed/);
  const more = { ...rules, licenses: { ...rules.licenses, clarify: [] } };
  assert.match(check(more, { ...none, packages: [roots] }).errors[0], /clarify is not understood/);
});

test("two versions are a warning", () => {
  const { errors, warnings } = check(rules, { workspace_members: [], packages: [roots, crate("a"), crate("a", { version: "2.0.0" })] });
  assert.deepEqual(errors, []);
  assert.deepEqual(warnings, ["a in 2 versions: 1.0.0, 2.0.0"]);
});

test("TOML that is not understood is refused", () => {
  assert.deepEqual(parseToml('[a]\n# x\nb = ["c", # d\n"e",]\nf = { g = true }'), { a: { b: ["c", "e"], f: { g: true } } });
  for (const bad of ["[a", "a = 1.5.", 'a = "b" "c"', "a = '''x'''", 'a = "1"\na = "2"', "a ="]) assert.throws(() => parseToml(bad), undefined, bad);
});
