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

/// As [`TABLE`], by the names' bases: all forms of a name follow one another, among others.
static FORMS: [u16; SLOTS] = {
    let mut table = [EMPTY; SLOTS];
    let mut family = 0;
    while family < NAMES.len() {
        let names = NAMES[family];
        let mut row = 0;
        while row < names.len() {
            let mut at = hash(base(names[row].as_bytes()));
            while table[at] != EMPTY {
                at = (at + 1) % SLOTS;
            }
            #[expect(clippy::cast_possible_truncation, reason = "asserted above")]
            {
                table[at] = (family << 12 | row) as u16;
            }
            row += 1;
        }
        family += 1;
    }
    table
};

/// Family and row of each form of the name `wanted`.
pub(super) fn forms(wanted: &[u8]) -> impl Iterator<Item = (usize, usize)> + Clone {
    let first = hash(wanted);
    (0..SLOTS)
        .map_while(move |step| FORMS.get((first + step) % SLOTS).copied().filter(|&entry| entry != EMPTY))
        .map(|entry| (usize::from(entry >> 12), usize::from(entry & 0xfff)))
        .filter(move |&(family, row)| {
            NAMES
                .get(family)
                .and_then(|names| names.get(row))
                .is_some_and(|name| base(name.as_bytes()) == wanted)
        })
}

/// Whether the name has a per-thread default stream's suffix.
pub(super) fn is_per_thread(symbol: &str) -> bool {
    without_flavour(symbol.as_bytes()).len() < symbol.len()
}

/// A symbol without stream flavour.
pub(super) const fn without_flavour(symbol: &[u8]) -> &[u8] {
    match symbol {
        [plain @ .., b'_', b'p', b't', b'd', b's'] | [plain @ .., b'_', b'p', b't', b's', b'z'] => plain,
        _ => symbol,
    }
}

/// A symbol without stream flavour and version: `cuMemcpyHtoD_v2_ptds` is `cuMemcpyHtoD`.
pub(super) const fn base(symbol: &[u8]) -> &[u8] {
    let plain = without_flavour(symbol);
    let mut rest = plain;
    while let [before @ .., b'0'..=b'9'] = rest {
        rest = before;
    }
    match rest {
        [name @ .., b'_', b'v'] if rest.len() < plain.len() && !name.is_empty() => name,
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
            ("cuMemsetD32", "cuMemsetD32"),
            ("_v2", "_v2"),
        ] {
            assert_eq!(base(symbol.as_bytes()), want.as_bytes());
        }
    }
}
