import assert from "node:assert/strict";
import { test } from "node:test";

import { codesExplained, codesIn, links, paths } from "./check.mjs";

test("codes of a source file", () => {
  const source = `impl Error {
    pub fn code(&self) -> &'static str {
        match self {
            Self::A { .. } => "FirstCode",
            Self::B { source } => source.code(),
            Self::C | Self::D => {
                "SecondCode"
            }
        }
    }
    fn other() { x => "NotACode" }
}
#[cfg(test)]
mod tests { fn code() { a => "OfATest" } }`;
  assert.deepEqual([...codesIn(source)], ["FirstCode", "SecondCode"]);
  assert.deepEqual([...codesIn('impl Code {\n    fn as_str(self) {\n        X => "Short",\n    }\n}')], ["Short"]);
  const met = `fn take() {
    return Err(Refused { status: 413, code: "InAField", text });
    let code = "InAName";
    let other = Row { code: "word", kind: "NoCode" };
}
#[cfg(test)]
mod tests { let code = "OfATest"; }`;
  assert.deepEqual([...codesIn(met)], ["InAField", "InAName"]);
  const named = 'const GONE: &str = "Gone";\nconst NAME: &str = "Other";\nlet row = Row { code: if held { GONE } else { LEFT }.to_owned(), name: NAME };';
  assert.deepEqual([...codesIn(named)], ["Gone"]);
  assert.deepEqual([...codesIn('impl Policy {\n    fn as_str(self) {\n        X => "Word",\n    }\n}')], []);
});

test("codes of a document", () => {
  assert.deepEqual([...codesExplained("| Code | Meaning |\n| --- | --- |\n| `A`, `B` | not `C` |\n\n| Else | x |\n| `D` | y |")], ["A", "B"]);
});

test("links of a document", () => {
  assert.deepEqual(links("[a](b.md#c) [d](https://x) [e](#f) ![g](h.png)\n```\n[x](y)\n```"), ["b.md", "h.png"]);
});

test("paths that a document names", () => {
  const found = paths("`a/b.rs` `a/` `x/y` `a/*.rs` `nothing`\n```\na/in-a-block.rs\n```", new Set(["a"]));
  assert.deepEqual(found, ["a/b.rs", "a/"]);
});
