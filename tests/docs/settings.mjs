// Compares the configuration files that docs/install.md shows with the structs that read them: what a reader is not told, and
// what is told of nothing.

/** camelCase, as serde makes it. */
const camel = (name) => name.replace(/_([a-z])/g, (_, letter) => letter.toUpperCase());

/** The fields of a struct of a Rust source file, `{field, name, type}`. */
function fieldsOf(source, struct) {
  const body = source.match(new RegExp(`struct ${struct} \\{\\n([\\s\\S]*?)\\n\\}`))?.[1];
  if (body === undefined) return null;
  const fields = [];
  let renamed;
  for (const line of body.split("\n")) {
    renamed = line.match(/#\[serde\(.*rename = "(\w+)"/)?.[1] ?? renamed;
    const [, field, type] = line.match(/^    (?:pub(?:\(\w+\))? )?(\w+): (.*),$/) ?? [];
    if (!field) continue;
    fields.push({ field, name: renamed ?? camel(field), type: type.replace(/^Option<(.*)>$/, "$1") });
    renamed = undefined;
  }
  return fields;
}

/** What a file may say, as paths such as `lease.name`; with the names of those that a flag of the same name says as well. */
export function settings(source, root) {
  const flags = new Set((fieldsOf(source, "Args") ?? []).map(({ name }) => name));
  const paths = (struct, prefix) =>
    fieldsOf(source, struct).flatMap(({ name, type }) =>
      fieldsOf(source, type) ? paths(type, `${prefix}${name}.`) : [`${prefix}${name}`]);
  const all = paths(root, "");
  return { all, flags: all.filter((path) => flags.has(path)) };
}

/** The paths that a YAML text sets, those in comments (`# key: value`) included. Mappings only, of which one may be in braces. */
export function told(yaml) {
  const paths = [];
  const above = [];
  for (const line of yaml.split("\n")) {
    const [, indent, key, value] = line.match(/^( *)(?:# )?(\w+):(.*)$/) ?? [];
    if (!key) continue;
    above.length = indent.length / 2;
    above.push(key);
    const inside = value.match(/^ \{(.*)\}/)?.[1];
    if (inside) for (const [, name] of inside.matchAll(/(?:^|, )(\w+):/g)) paths.push([...above, name].join("."));
    else if (!/^\s*(#.*)?$/.test(value)) paths.push(above.join("."));
  }
  return paths;
}

/** What is wrong with the files that a document shows, each a fenced YAML text or a part of one that names its kind. */
export function errorsOf(markdown, kinds) {
  const texts = [...markdown.matchAll(/```yaml\n([\s\S]*?)```/g)].flatMap(([, text]) => text.split(/^---\n/m));
  const errors = [];
  for (const [kind, { source, root }] of Object.entries(kinds)) {
    const text = texts.find((text) => new RegExp(`^kind: ${kind}$`, "m").test(text));
    if (!text) {
      errors.push(`no ${kind} is shown`);
      continue;
    }
    const { all, flags } = settings(source, root);
    const shown = told(text);
    for (const path of all) if (!shown.includes(path) && !flags.includes(path)) errors.push(`${kind}: ${path} is not shown`);
    for (const path of shown) if (!all.includes(path)) errors.push(`${kind}: ${path} is shown, and no file may say it`);
  }
  return errors;
}
