//! Whole numbers as a pod spec writes them.

use super::RequestError;

/// Longest piece of a user's text that a message repeats.
const SHOWN: usize = 64;

/// Binary suffixes and how many MiB one of each is, in KiB.
const BINARY: [(&str, u64); 6] =
    [("Ki", 1), ("Mi", 1 << 10), ("Gi", 1 << 20), ("Ti", 1 << 30), ("Pi", 1 << 40), ("Ei", 1 << 50)];

/// A user's text, cut so that a message stays readable.
pub(super) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Reads `text`: ASCII digits, optionally followed by a decimal `k`.
///
/// `k` must be known because the API server itself writes it: `20000` arrives as `20k`. `M` and larger are
/// refused: nobody means a million MiB, but many mean megabytes.
///
/// # Errors
/// [`RequestError::Quantity`] with a hint for everything else, and for what does not fit `u64`.
pub(super) fn whole(container: &str, key: &str, text: &str) -> Result<u64, RequestError> {
    let refuse = |hint: String| {
        Err(RequestError::Quantity {
            container: shown(container),
            key: key.to_owned(),
            value: shown(text),
            hint,
        })
    };
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, suffix) = text.split_at(end);
    if digits.is_empty() {
        let hint = if text.starts_with('-') {
            "it cannot be negative: write a whole number, or drop it"
        } else {
            "write a whole number"
        };
        return refuse(hint.to_owned());
    }
    let scale = match suffix {
        "" => 1,
        "k" => 1000,
        _ => return refuse(hint(key, digits, suffix)),
    };
    match digits.parse::<u64>().ok().and_then(|number| number.checked_mul(scale)) {
        Some(number) => Ok(number),
        None => refuse("it is too large: write a smaller number".to_owned()),
    }
}

/// The way out for a number with a suffix that is not taken.
fn hint(key: &str, digits: &str, suffix: &str) -> String {
    let binary = BINARY.iter().find(|(name, _)| *name == suffix);
    if let Some((_, kib)) = binary {
        let mib = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(*kib)).map(|n| n >> 10);
        return match mib {
            Some(mib) if key == super::MEMORY && mib > 0 => {
                format!("{key} counts MiB and takes no binary suffix: write {mib}")
            }
            _ => format!("{key} takes no binary suffix: write a whole number"),
        };
    }
    match suffix {
        "m" => "thousandths (fractions) are not taken: write a whole number".to_owned(),
        _ if suffix.starts_with('.') => "fractions are not taken: write a whole number".to_owned(),
        "M" | "G" | "T" | "P" | "E" if key == super::MEMORY => {
            format!("{key} counts MiB, so that would be {digits}{suffix} of MiB: write the number of MiB")
        }
        _ => "write a whole number, with no suffix other than k".to_owned(),
    }
}
