#!/usr/bin/env node
// Checks licences, sources, banned crates and the lock file against deny.toml, without cargo-deny and its
// advisory database (docs/decisions/0002-own-licence-check.md). `check.test.mjs` tests it.
import { spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

const CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index";

/** Reads the part of TOML that deny.toml uses; anything else is an error and never ignored. */
export function parseToml(text) {
  const tokens = [];
  const lexer = /\s*(?:#[^\n]*|"((?:[^"\\]|\\.)*)"|([A-Za-z0-9_-]+)|([[\]{}=,]))|\s+/y;
  let at = 0;
  while (at < text.length) {
    lexer.lastIndex = at;
    const m = lexer.exec(text);
    if (!m || m[0] === "") {
      if (text.slice(at).trim() === "") break;
      throw new Error(`deny.toml line ${text.slice(0, at).split("\n").length}: cannot read ${JSON.stringify(text.slice(at, at + 20))}`);
    }
    at = lexer.lastIndex;
    if (m[1] !== undefined) tokens.push({ string: JSON.parse(`"${m[1]}"`) });
    else if (m[2] !== undefined) tokens.push({ word: m[2] });
    else if (m[3] !== undefined) tokens.push({ mark: m[3] });
  }
  let next = 0;
  const fail = (what) => { throw new Error(`deny.toml: expected ${what} at ${JSON.stringify(tokens[next] ?? "the end")}`); };
  const mark = (c) => tokens[next]?.mark === c && ++next;
  const need = (c) => mark(c) || fail(c);
  const value = () => {
    const token = tokens[next] ?? fail("a value");
    if (token.string !== undefined) { next++; return token.string; }
    if (token.word === "true" || token.word === "false") { next++; return token.word === "true"; }
    if (mark("[")) {
      const list = [];
      while (!mark("]")) { list.push(value()); if (!mark(",")) { need("]"); break; } }
      return list;
    }
    if (mark("{")) {
      const table = {};
      while (!mark("}")) { pair(table); if (!mark(",")) { need("}"); break; } }
      return table;
    }
    return fail("a value");
  };
  const pair = (table) => {
    const key = tokens[next]?.word ?? fail("a key");
    next++;
    need("=");
    if (key in table) throw new Error(`deny.toml: ${key} is given twice`);
    table[key] = value();
  };
  const root = {};
  let section = root;
  while (next < tokens.length) {
    if (mark("[")) {
      const name = tokens[next]?.word ?? fail("a section name");
      next++;
      need("]");
      section = root[name] ??= {};
    } else pair(section);
  }
  return root;
}

/** Does `allowed` satisfy an SPDX expression? `/` is the old spelling of OR. */
export function satisfied(expression, allowed) {
  const words = expression.replaceAll("/", " OR ").replaceAll("(", " ( ").replaceAll(")", " ) ").trim().split(/\s+/);
  let at = 0;
  const or = () => { let ok = and(); while (words[at] === "OR") { at++; const right = and(); ok ||= right; } return ok; };
  const and = () => { let ok = one(); while (words[at] === "AND") { at++; const right = one(); ok &&= right; } return ok; };
  const one = () => {
    if (words[at] === "(") {
      at++;
      const ok = or();
      if (words[at++] !== ")") throw new Error(`unbalanced licence expression ${JSON.stringify(expression)}`);
      return ok;
    }
    let name = words[at++];
    if (!name || /^(AND|OR|WITH|\))$/.test(name)) throw new Error(`malformed licence expression ${JSON.stringify(expression)}`);
    if (words[at] === "WITH") { name = `${name} WITH ${words[at + 1]}`; at += 2; }
    return allowed.has(name);
  };
  const ok = or();
  if (at !== words.length) throw new Error(`malformed licence expression ${JSON.stringify(expression)}`);
  return ok;
}

const KNOWN = {
  graph: ["all-features"],
  licenses: ["allow", "exceptions"],
  bans: ["multiple-versions", "wildcards", "deny"],
  sources: ["unknown-registry", "unknown-git", "allow-registry", "allow-git"],
};

/** All that is wrong with the packages of `cargo metadata` by the rules of deny.toml, and what is worth a look. */
export function check(rules, metadata) {
  const errors = [];
  const warnings = [];
  for (const [section, table] of Object.entries(rules)) {
    for (const key of Object.keys(table)) {
      if (!KNOWN[section]?.includes(key)) errors.push(`deny.toml: [${section}] ${key} is not understood by this check: teach it first`);
    }
  }
  const allow = rules.licenses?.allow ?? [];
  const registries = new Set((rules.sources?.["allow-registry"] ?? []).map((url) => `registry+${url}`));
  const banned = new Set((rules.bans?.deny ?? []).map((entry) => entry.crate));
  const exceptions = new Map((rules.licenses?.exceptions ?? []).map((entry) => [entry.crate, entry.allow]));
  const unused = new Set(exceptions.keys());
  const members = new Set(metadata.workspace_members);
  const versions = new Map();
  for (const crate of metadata.packages) {
    const name = `${crate.name} ${crate.version}`;
    const allowed = new Set([...allow, ...(exceptions.get(crate.name) ?? [])]);
    unused.delete(crate.name);
    if (!crate.license) errors.push(`${name} names no licence: take it out, or add an exception with the reason`);
    else {
      try {
        if (!satisfied(crate.license, allowed)) errors.push(`${name} is under ${crate.license}, which deny.toml does not allow`);
      } catch (e) { errors.push(`${name}: ${e.message}`); }
    }
    if (crate.source === null) {
      if (!members.has(crate.id)) errors.push(`${name} comes from a path outside of the workspace`);
      for (const dependency of crate.dependencies) {
        if (dependency.source && dependency.req === "*") errors.push(`${crate.name} takes any version of ${dependency.name}: name one`);
      }
    } else if (!registries.has(crate.source)) errors.push(`${name} comes from ${crate.source}, which is not in allow-registry`);
    if (banned.has(crate.name)) errors.push(`${name} is banned in deny.toml`);
    versions.set(crate.name, [...(versions.get(crate.name) ?? []), crate.version]);
  }
  for (const crate of unused) errors.push(`deny.toml: the exception for ${crate} is not needed any more: take it out`);
  for (const [crate, list] of [...versions].sort()) {
    if (list.length > 1) warnings.push(`${crate} in ${list.length} versions: ${list.sort().join(", ")}`);
  }
  return { errors, warnings };
}

function main() {
  const root = fileURLToPath(new URL("../..", import.meta.url));
  const cargo = spawnSync("cargo", ["metadata", "--format-version", "1", "--locked"], { cwd: root, maxBuffer: 1 << 28 });
  if (cargo.status !== 0) {
    process.stderr.write(cargo.stderr ?? `${cargo.error}\n`);
    console.log("cargo metadata --locked failed: if Cargo.lock is stale, run `cargo check` and commit it");
    return 1;
  }
  const metadata = JSON.parse(cargo.stdout);
  const { errors, warnings } = check(parseToml(readFileSync(`${root}/deny.toml`, "utf8")), metadata);
  for (const line of warnings) console.log(`warning: ${line}`);
  for (const line of errors) console.log(`error: ${line}`);
  const outside = metadata.packages.filter((crate) => crate.source === CRATES_IO).length;
  console.log(`${outside} crates from crates.io, ${warnings.length} in several versions, ${errors.length} errors`);
  return errors.length === 0 ? 0 : 1;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) process.exitCode = main();
