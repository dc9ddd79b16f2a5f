//! An object that may not be readable: in a list, in a watch, in an admission review.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// An object, or what is left of one that is not as its type says. kube's guard of that kind builds a tree of every
/// object first and copies it; this one keeps the text, and of what cannot be read it keeps the node as well.
#[derive(Clone, Debug)]
pub struct Guard<K>(pub Result<Box<K>, Unreadable>);

/// What can be read of an object that cannot.
#[derive(Clone, Debug)]
pub struct Unreadable {
    /// Its metadata.
    pub metadata: ObjectMeta,
    /// `spec.nodeName`, where it is a text.
    pub node: Option<String>,
    /// What is wrong.
    pub error: String,
}

#[derive(Deserialize)]
struct Remains {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: serde_json::Value,
}

/// What is wrong with a text, without more of it than fits into a line: the reader's words hold the whole value.
pub(crate) fn brief(error: &serde_json::Error) -> String {
    let mut text = error.to_string();
    if let Some((end, _)) = text.char_indices().nth(500) {
        text.truncate(end);
        text.push('…');
    }
    text
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Guard<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Box::<RawValue>::deserialize(deserializer)?;
        let error = match serde_json::from_str(text.get()) {
            Ok(object) => return Ok(Self(Ok(object))),
            Err(error) => brief(&error),
        };
        let Remains { metadata, spec } = serde_json::from_str(text.get()).map_err(D::Error::custom)?;
        let node = spec["nodeName"].as_str().filter(|node| !node.is_empty()).map(str::to_owned);
        Ok(Self(Err(Unreadable { metadata, node, error })))
    }
}

impl<K: Resource> Resource for Guard<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(kind: &K::DynamicType) -> Cow<'_, str> {
        K::kind(kind)
    }

    fn group(kind: &K::DynamicType) -> Cow<'_, str> {
        K::group(kind)
    }

    fn version(kind: &K::DynamicType) -> Cow<'_, str> {
        K::version(kind)
    }

    fn plural(kind: &K::DynamicType) -> Cow<'_, str> {
        K::plural(kind)
    }

    fn meta(&self) -> &ObjectMeta {
        match &self.0 {
            Ok(object) => object.meta(),
            Err(remains) => &remains.metadata,
        }
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match &mut self.0 {
            Ok(object) => object.meta_mut(),
            Err(remains) => &mut remains.metadata,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mullion_crds::VGPUAllocation;

    #[test]
    fn what_is_left_of_an_object_that_cannot_be_read() {
        for (case, text, want) in [
            (
                "its node",
                r#"{"metadata":{"uid":"u"},"spec":{"nodeName":"n","sequence":"x"}}"#,
                Some(Some("n")),
            ),
            ("no node", r#"{"metadata":{"uid":"u"},"spec":{"nodeName":""}}"#, Some(None)),
            ("a node that is none", r#"{"metadata":{"uid":"u"},"spec":{"nodeName":7}}"#, Some(None)),
            ("a spec that is none", r#"{"metadata":{"uid":"u"},"spec":[]}"#, Some(None)),
            ("nothing else", r#"{"metadata":{"uid":"u"}}"#, Some(None)),
            ("no metadata", r#"{"spec":{}}"#, None),
            ("no object", "7", None),
        ] {
            let read = serde_json::from_str::<Guard<VGPUAllocation>>(text);
            let found = read.ok().map(|guard| match guard.0 {
                Ok(object) => panic!("{case}: {object:?}"),
                Err(remains) => {
                    assert_eq!(remains.metadata.uid.as_deref(), Some("u"), "{case}");
                    assert!(!remains.error.is_empty(), "{case}");
                    remains.node
                }
            });
            assert_eq!(found, want.map(|node| node.map(str::to_owned)), "{case}");
        }
    }
}
