#!/usr/bin/env node
// Checks that links between documents lead somewhere, that the paths they name exist, and that every error code that a program can give is explained in
// docs/troubleshooting.md, and none that no program gives.
import { existsSync, readFileSync } from "node:fs";
import { spawnSync } from "node:child_process";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const PROGRAMS = /^(controller|crds|nodeagent|telemetry|vgpu-hook\/src)\/.*\.rs$/;

/** Files of tests alone. */
const TESTS = /(^|\/)tests?(\.rs$|\/)/;

/** The words that functions named `code` (and `as_str` of an enum `Code`) return, and those that are given as `code` where they are met with; test modules aside. */
export function codesIn(source) {
  const code = source.split("#[cfg(test)]")[0];
  const codes = new Set();
  const functions = /fn code\(|impl Code \{[\s\S]*?fn as_str\(/g;
  for (const found of code.matchAll(functions)) {
    const body = code.slice(found.index + found[0].length).split(/\n    \}\n/)[0];
    for (const [, word] of body.matchAll(/(?:=>|\{)\s*"([A-Z][A-Za-z]+)"/g)) codes.add(word);
  }
  for (const [, word] of code.matchAll(/\bcode(?::| =)\s*"([A-Z][A-Za-z]+)"/g)) codes.add(word);
  const constants = new Map([...code.matchAll(/\bconst ([A-Z_]+): &str = "([A-Z][A-Za-z]+)"/g)].map(([, name, word]) => [name, word]));
  for (const [, value] of code.matchAll(/\bcode(?::| =)([^,;\n]+)/g)) {
    for (const [name] of value.matchAll(/\b[A-Z_]+\b/g)) if (constants.has(name)) codes.add(constants.get(name));
  }
  return codes;
}

/** The first words of the rows of tables whose first column is headed `Code`. */
export function codesExplained(markdown) {
  const codes = new Set();
  let inside = false;
  for (const line of markdown.split("\n")) {
    if (!line.startsWith("|")) inside = false;
    else if (/^\|\s*Code\s*\|/.test(line)) inside = true;
    else if (inside) for (const [, word] of line.split("|")[1].matchAll(/`([A-Za-z]+)`/g)) codes.add(word);
  }
  return codes;
}

/** Relative links of a document. */
export function links(markdown) {
  const prose = markdown.replace(/```[\s\S]*?```/g, "");
  return [...prose.matchAll(/\]\(([^)\s]+)\)/g)].map((m) => m[1]).filter((to) => !/^[a-z]+:|^#/.test(to)).map((to) => to.split("#")[0]);
}

/** Paths of the repository that a document names in backticks, `folder/` or `folder/file.rs`, from the root or from a folder that the document is in; none with a pattern. */
export function paths(markdown, roots) {
  const prose = markdown.replace(/```[\s\S]*?```/g, "");
  const words = [...prose.matchAll(/`([\w./-]+)`/g)].map((m) => m[1]);
  return words.filter((word) => word.includes("/") && roots.has(word.split("/")[0]));
}

function main() {
  const root = fileURLToPath(new URL("../..", import.meta.url));
  const git = spawnSync("git", ["ls-files", "-co", "--exclude-standard"], { cwd: root, encoding: "utf8" });
  const files = git.stdout.split("\n").filter((file) => file && existsSync(join(root, file)));
  const read = (file) => readFileSync(join(root, file), "utf8");
  const errors = [];
  const roots = new Set(files.filter((file) => file.includes("/")).map((file) => file.split("/")[0]));
  for (const file of files.filter((name) => name.endsWith(".md"))) {
    for (const path of paths(read(file), roots)) {
      const folders = file.split("/").slice(0, -1).map((_, i, all) => all.slice(0, i + 1).join("/"));
      if (!["", ...folders].some((folder) => existsSync(join(root, folder, path)))) errors.push(`${file}: there is no ${path}`);
    }
    for (const to of links(read(file))) {
      if (!existsSync(join(root, dirname(file), to))) errors.push(`${file}: the link to ${to} leads nowhere`);
    }
  }
  const explained = codesExplained(read("docs/troubleshooting.md"));
  const given = new Map();
  for (const file of files.filter((name) => PROGRAMS.test(name) && !TESTS.test(name))) for (const code of codesIn(read(file))) given.set(code, file);
  for (const [code, file] of given) if (!explained.has(code)) errors.push(`docs/troubleshooting.md does not explain ${code} (${file})`);
  for (const code of explained) if (!given.has(code)) errors.push(`docs/troubleshooting.md explains ${code}, which no program gives`);
  for (const line of errors.sort()) console.log(`error: ${line}`);
  console.log(`${given.size} error codes, ${errors.length} errors`);
  return errors.length === 0 ? 0 : 1;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) process.exitCode = main();
