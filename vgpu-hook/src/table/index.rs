//! Names to rows, by a hash table that the compiler fills in.

use super::NAMES;

const SLOTS: usize = 1024;
const EMPTY: u16 = u16::MAX;

/// FNV-1a.
const fn hash(name: &[u8]) -> usize {
    let (mut hash, mut i) = (0x811c_9dc5_u32, 0);
    while i < name.len() {
        hash = (hash ^ name[i] as u32).wrapping_mul(0x0100_0193);
        i += 1;
    }
    hash as usize % SLOTS
}

/// `family << 12 | row`, at the first free place behind the name's hash.
static TABLE: [u16; SLOTS] = {
    let mut table = [EMPTY; SLOTS];
    let (mut family, mut count) = (0, 0);
    while family < NAMES.len() {
        let names = NAMES[family];
        let mut row = 0;
        while row < names.len() {
            let mut at = hash(names[row].as_bytes());
            while table[at] != EMPTY {
                at = (at + 1) % SLOTS;
            }
            assert!(row < 1 << 12);
            #[expect(clippy::cast_possible_truncation, reason = "asserted, and there are 4 families")]
            {
                table[at] = (family << 12 | row) as u16;
            }
            row += 1;
            count += 1;
        }
        family += 1;
    }
    assert!(count * 2 < SLOTS, "the hash table is too full");
    table
};

/// Family and row of a name.
pub(super) fn find(name: &[u8]) -> Option<(usize, usize)> {
    let mut at = hash(name);
    loop {
        let entry = *TABLE.get(at)?;
        if entry == EMPTY {
            return None;
        }
        let (family, row) = (usize::from(entry >> 12), usize::from(entry & 0xfff));
        if NAMES.get(family)?.get(row)?.as_bytes() == name {
            return Some((family, row));
        }
        at = (at + 1) % SLOTS;
    }
}

/// Whether the name has a per-thread default stream's suffix.
pub(super) fn is_per_thread(symbol: &str) -> bool {
    symbol.ends_with("_ptds") || symbol.ends_with("_ptsz")
}

/// A symbol without stream flavour and version: `cuMemcpyHtoD_v2_ptds` is `cuMemcpyHtoD`.
pub(super) fn base(symbol: &str) -> &str {
    let plain = symbol.strip_suffix("_ptds").or_else(|| symbol.strip_suffix("_ptsz")).unwrap_or(symbol);
    match plain.rsplit_once("_v") {
        Some((name, version)) if !version.is_empty() && version.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bases_of_names() {
        for (symbol, want) in [
            ("cuInit", "cuInit"),
            ("cuMemAlloc_v2", "cuMemAlloc"),
            ("cuMemAllocAsync_ptsz", "cuMemAllocAsync"),
            ("cuMemcpyHtoD_v2_ptds", "cuMemcpyHtoD"),
            ("cuCtxCreate_v4", "cuCtxCreate"),
            ("cu_v", "cu_v"),
        ] {
            assert_eq!(base(symbol), want);
        }
    }
}
