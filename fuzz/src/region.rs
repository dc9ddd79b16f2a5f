//! The files that containers share with the node's agent.

use mullion_region::hami::Layout;
use mullion_region::{extension, hami, page, usage};

/// A control page: what is read of it is written the same again.
pub fn control_page(data: &[u8]) {
    if let Ok(spec) = page::decode(data) {
        let again = page::encode(&spec);
        assert_eq!(page::decode(&again).unwrap(), spec);
    }
}

/// The first bytes and the tail of a usage file, with the length that the file has.
pub fn usage_file(mut data: &[u8]) {
    let (len, cut) = (crate::number(&mut data), crate::number(&mut data));
    let lens = [len, usage::FILE_LEN as u64, usage::HAMI_LEN as u64];
    let len = lens[usize::try_from(len % 3).unwrap_or(0)];
    let cut = usize::try_from(cut).unwrap_or(usize::MAX).min(data.len());
    let (head, tail) = data.split_at(cut);
    if let Ok(header) = usage::read_header(len, head, tail) {
        // It is copied into metrics: it must be as small as it claims to be.
        assert!(header.devices.iter().count() <= mullion_region::MAX_DEVICES);
    }
    if let Ok(layout) = hami::identify(len, head) {
        assert!(!layout.name().is_empty());
        let _ = layout.read_header(head, tail);
        let _ = layout.read_slot(data);
    }
    let _ = Layout::V1_2.read_slot(data);
}

/// Our part of a usage file.
pub fn usage_extension(data: &[u8]) {
    let _ = extension::check(data);
    let _ = extension::read_hot(data);
    assert!(extension::slots(data).count() <= usage::SLOTS);
}
