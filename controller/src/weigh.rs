//! What a JSON text costs when it is read, told before that.
//!
//! A field that a text leaves out has its place in memory all the same: `{}` in a list of volumes is 3 bytes of text and
//! 3 KiB of [`Volume`](k8s_openapi::api::core::v1::Volume). So what is read from a text may be a thousand times as large
//! as the text. It grows with the objects and lists in it, most with those that stand high up, and with the values
//! between commas: all are counted, in one pass that keeps nothing, and bounded.

/// Most objects and lists in a text. The most that honest pods have is some 60,000: at etcd's limit of 1.5 MiB, all of it
/// environment variables, each of which is an object with a name and a value and stands in `managedFields` with four
/// more, 128 bytes in all. An ordinary pod has a few hundred.
pub const OBJECTS: usize = 1 << 16;

/// Most objects and lists down to [`DEPTH`]: a pod's containers, volumes and statuses of containers, 1 to 3 KiB each.
/// Ordinary pods have some twenty, and no node runs one of thousands.
pub const ELEMENTS: usize = 1 << 12;

/// `{"request":{"object":{"spec":{"containers":[{`; in a call of kube-scheduler it is one less.
pub const DEPTH: usize = 6;

/// Most commas: four for each object. A value in a list costs 32 bytes of memory and its text, with a name 100 bytes. It
/// is room for the names of 200,000 nodes, too.
pub const VALUES: usize = 4 * OBJECTS;

/// A text that would cost too much to read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Of objects and lists.
    #[error(
        "it has more than {OBJECTS} objects and lists, {ELEMENTS} down to depth {DEPTH}, or {VALUES} values, which no pod has"
    )]
    TooComplex,
}

impl Refusal {
    /// The stable name.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::TooComplex => "BodyTooComplex",
        }
    }
}

/// Counts what is in `text`. Texts that are no JSON are read as far as their reader would read them.
///
/// # Errors
/// [`Refusal::TooComplex`].
pub fn weigh(text: &[u8]) -> Result<(), Refusal> {
    let (mut objects, mut elements, mut values, mut depth) = (0, 0, 0, 0_usize);
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'{' | b'[' => {
                depth += 1;
                objects += 1;
                elements += usize::from(depth <= DEPTH);
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            b',' => values += 1,
            // What stands in a string is text: a pod may have a large JSON document as an annotation.
            b'"' => {
                while bytes.find(|b| matches!(b, b'"' | b'\\')) == Some(&b'\\') && bytes.next().is_some() {}
            }
            _ => {}
        }
    }
    let complex = objects > OBJECTS || elements > ELEMENTS || values > VALUES;
    if complex { Err(Refusal::TooComplex) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_weighed() {
        let deep = |element: &str, count: usize| format!("{}{}", "[".repeat(DEPTH), element.repeat(count));
        let document = r#"{\"a\":[{},\\\"[,{\\\\"#.repeat(OBJECTS);
        for (case, text, passes) in [
            ("nothing", String::new(), true),
            ("as many elements as may be", "{}".repeat(ELEMENTS), true),
            ("one more", "{}".repeat(ELEMENTS + 1), false),
            ("of another list", format!("[[[[[{}],[{}", "{},".repeat(2_000), "{},".repeat(2_100)), false),
            ("deeper", deep("{}", ELEMENTS), true),
            ("as many objects as may be", deep("{}", OBJECTS - DEPTH), true),
            ("one more", deep("{}", OBJECTS - DEPTH + 1), false),
            ("lists count, too", "[".repeat(OBJECTS + 1), false),
            ("as many values as may be", "1,".repeat(VALUES), true),
            ("one more", "1,".repeat(VALUES + 1), false),
            ("a document in a string", format!(r#"{{"note":"{document}"}}"#), true),
            ("behind the string", format!(r#"{{"note":"{document}"}}{}"#, "[".repeat(OBJECTS)), false),
            ("a string that ends with a backslash", format!(r#""\\"{}"#, "[".repeat(OBJECTS + 1)), false),
            ("a string that does not end", format!("\"{}", "[".repeat(OBJECTS + 1)), true),
            ("a string that ends in the middle of an escape", "\"\\".to_owned(), true),
            ("more ends than beginnings", format!("]]]{}", "[{}".repeat(ELEMENTS)), true),
        ] {
            assert_eq!(weigh(text.as_bytes()).is_ok(), passes, "{case}");
        }
    }

    /// A pod at etcd's limit of 1.5 MiB, of nothing but environment variables, as the API server sends it.
    #[test]
    fn the_largest_honest_pod_passes() {
        let (mut env, mut fields) = (Vec::new(), Vec::new());
        let mut length = 0;
        for n in 0.. {
            let name = format!("DATABASE_PASSWORD_{n}");
            env.push(format!(r#"{{"name":"{name}","value":"some-value"}}"#));
            fields.push(format!(r#""k:{{\"name\":\"{name}\"}}":{{".":{{}},"f:name":{{}},"f:value":{{}}}}"#));
            length += [&env, &fields]
                .into_iter()
                .filter_map(|all| all.last())
                .map(|text| text.len() + 1)
                .sum::<usize>();
            if length > 3 << 19 {
                break;
            }
        }
        let fields =
            format!(r#"{{"f:spec":{{"f:containers":{{"k:{{}}":{{"f:env":{{{}}}}}}}}}}}"#, fields.join(","));
        let text = format!(
            r#"{{"request":{{"object":{{"metadata":{{"managedFields":[{{"fieldsV1":{fields}}}]}},"spec":{{"containers":[{{"env":[{}]}}]}}}}}}}}"#,
            env.join(",")
        );
        serde_json::from_str::<serde::de::IgnoredAny>(&text).unwrap();
        assert_eq!(weigh(text.as_bytes()), Ok(()), "{} bytes", text.len());
    }
}
