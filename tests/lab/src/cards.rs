//! Which cards each node has: `--cards node-a=h100x4,node-b=a100x2`, or one profile for all.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use crate::layout::{MAX_NODES, NodePlan};

/// Cards of the first two nodes when nothing is said; further nodes are like the second.
const DEFAULTS: [&str; 2] = ["h100x4", "a100x2"];

/// `node-a` … `node-z`, then `node-27` and up.
pub fn node_name(index: usize) -> String {
    match u8::try_from(index) {
        Ok(letter @ 0..26) => format!("node-{}", char::from(b'a' + letter)),
        _ => format!("node-{}", index + 1),
    }
}

/// The nodes of a lab with `count` of them.
///
/// # Errors
/// When `cards` names a node that is not there, a profile that nobody knows, or mixes both forms.
pub fn plan(count: usize, cards: Option<&str>) -> Result<Vec<NodePlan>> {
    if count > MAX_NODES {
        bail!(
            "--nodes {count}: at most {MAX_NODES} nodes with a kubelet fit the lab's network; use --fake-nodes for scale"
        );
    }
    let spec = parse(cards.unwrap_or_default())?;
    let names: Vec<String> = (0..count).map(node_name).collect();
    if let Some(stranger) = spec.per_node.keys().find(|node| !names.contains(node)) {
        bail!(
            "--cards names {stranger}, but the nodes are {}: use one of them or raise --nodes",
            names.join(", ")
        );
    }
    names
        .into_iter()
        .enumerate()
        .map(|(index, name)| {
            let default = spec.all.as_deref().unwrap_or(DEFAULTS[index.min(1)]);
            let cards = spec.per_node.get(&name).map_or(default, String::as_str).to_owned();
            fake_state::profile::node(&cards, &name)?;
            Ok(NodePlan { name, cards, index })
        })
        .collect()
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Spec {
    all: Option<String>,
    per_node: BTreeMap<String, String>,
}

fn parse(text: &str) -> Result<Spec> {
    let mut spec = Spec::default();
    for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
        let repeated = match item.split_once('=') {
            Some(("", _) | (_, "")) => bail!("--cards {item:?}: write NODE=PROFILE, like node-a=h100x4"),
            Some((node, profile)) => spec.per_node.insert(node.to_owned(), profile.to_owned()),
            None => spec.all.replace(item.to_owned()),
        };
        if let Some(first) = repeated {
            bail!("--cards {item:?}: {first} was given for the same nodes before; name each once");
        }
    }
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_by_node() {
        for (case, count, cards, want) in [
            ("defaults", 2, None, vec![("node-a", "h100x4"), ("node-b", "a100x2")]),
            ("one for all", 2, Some("a100x1"), vec![("node-a", "a100x1"), ("node-b", "a100x1")]),
            (
                "one node named",
                3,
                Some("node-c=h100x2"),
                vec![("node-a", "h100x4"), ("node-b", "a100x2"), ("node-c", "h100x2")],
            ),
            (
                "all and one",
                2,
                Some("a100x2, node-a=h100x1"),
                vec![("node-a", "h100x1"), ("node-b", "a100x2")],
            ),
        ] {
            let nodes = plan(count, cards).unwrap();
            let got: Vec<_> = nodes.iter().map(|node| (node.name.as_str(), node.cards.as_str())).collect();
            assert_eq!(got, want, "{case}");
        }
    }

    #[test]
    fn refusals_say_what_to_write() {
        for (case, cards, hint) in [
            ("no profile", "node-a=", "NODE=PROFILE"),
            ("no node", "=h100x1", "NODE=PROFILE"),
            ("twice", "node-a=h100x1,node-a=h100x2", "name each once"),
            ("stranger", "node-x=h100x1", "node-a, node-b"),
            ("unknown model", "node-a=voodoo2x2", "voodoo2"),
        ] {
            let error = plan(2, Some(cards)).unwrap_err().to_string();
            assert!(error.contains(hint), "{case}: {error}");
        }
    }

    #[test]
    fn names() {
        assert_eq!([0, 1, 25, 26].map(node_name), ["node-a", "node-b", "node-z", "node-27"]);
    }

    #[test]
    fn too_many_nodes() {
        assert!(plan(MAX_NODES + 1, None).is_err());
    }
}
